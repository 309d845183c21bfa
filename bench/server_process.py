"""A foreign server for one measurement, which never outlives it.

The server runs under a guardian: a process of ours that ends the server, and
whatever that has started in the meantime, as soon as its standard input ends. So
all of them go also when the benchmark is killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from blobstore.errors import SetupError

READY_S = 60.0
STOP_S = 20.0
_GRACE_S = 5.0
"""What a server gets between SIGTERM and SIGKILL."""
_POLL_S = 0.01
_LOOK_S = 0.2
_WATCH = "--watch"
_PR_SET_CHILD_SUBREAPER = 36


class ServerProcess:
    """A server, its log and a `home` directory for its files; `stop` removes all three."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._undo = contextlib.ExitStack()
        # Short, and not below TMPDIR's possibly long path: sockets go here (107 bytes).
        self.home = Path(tempfile.mkdtemp(prefix="peer-"))
        self._undo.callback(shutil.rmtree, self.home, ignore_errors=True)

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.home / "log"

    def start(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Run `command` and wait until `ready`. Raises SetupError with the end of its log."""
        guarded = [sys.executable, "-m", "blobstore.bench.server_process", *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (the peers name their own programs)
                guarded,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environ or {}),
                start_new_session=True,  # an interrupt from the terminal is for us
            )
        deadline_s = time.monotonic() + READY_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SetupError(f"{self._name} does not come up: {self.last_words()}")
            time.sleep(_POLL_S)

    def last_words(self) -> str:
        """The end of its log, in one line."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return (
            " / ".join([line.strip() for line in lines if line.strip()][-3:]) or "it said nothing"
        )

    def stop(self) -> None:
        """End it and everything it started."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._undo.close()


class Watch:
    """Ends a process of ours, that is not under a guardian, should we be killed."""

    def __init__(self, pid: int) -> None:
        command = [sys.executable, "-m", "blobstore.bench.server_process", _WATCH, str(pid)]
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            command, stdin=subprocess.PIPE, start_new_session=True
        )

    def stop(self) -> None:
        """End it now, which ends the process as well."""
        self._process.communicate()


def free_port() -> int:
    """A TCP port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether somebody accepts connections on this port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def guard(command: Sequence[str]) -> int:
    """Run `command` until it ends or our standard input does; its exit code."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    # What the server's children leave behind becomes our child, not init's.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 (as we were told)
    try:
        while server.poll() is None:
            if select.select([sys.stdin], [], [], _LOOK_S)[0] and not os.read(0, 1024):
                break
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
        _end_descendants(server)
    return server.returncode


def watch(pid: int) -> None:
    """Wait until our standard input ends, and tell this process to end."""
    while os.read(0, 1024):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _end_descendants(server: subprocess.Popen[bytes]) -> None:
    """SIGKILL, again and again: a process may start another while it is being killed."""
    while pids := list(_descendants(os.getpid())):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def _descendants(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield from _descendants(child)
                yield child


if __name__ == "__main__":
    if sys.argv[1] == _WATCH:
        watch(int(sys.argv[2]))
    else:
        sys.exit(guard(sys.argv[1:]))
