"""A real daemon for one measurement: a process of its own, in a directory of its own.

Owns the process, its data directory and its socket; all are gone when the
`with` block ends, also when it ends by an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from blobstore.clients import Client
from blobstore.errors import SetupError
from blobstore.http.tokens import FILE_NAME as TOKEN_FILE

READY_S = 60.0
"""A daemon that is not there by then has failed: large arenas take a second per few GiB."""

STOP_S = 30.0
_POLL_S = 0.002
_ENV_PREFIX = "BLOBSTORE__"


class OwnDaemon:
    """`blobstore serve`, started by the `with` block and stopped by its end.

    `directory` is where its data goes (a directory is made in it). `ssd_bytes`
    0 means no SSD tier. `options` are further "section.key" settings. Raises
    SetupError with the end of its log if it does not come up.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dram_bytes: int,
        ssd_bytes: int = 0,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._sizes = {"--dram": str(dram_bytes), "--ssd": str(ssd_bytes or "off")}
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            # The socket's path has to fit into 107 bytes, whatever `directory` is.
            self._home = Path(tempfile.mkdtemp(prefix="blobstore-"))
            undo.callback(shutil.rmtree, self._home, ignore_errors=True)
            self.data = Path(tempfile.mkdtemp(prefix="blobstore-", dir=self._directory))
            undo.callback(shutil.rmtree, self.data, ignore_errors=True)
            self.start()
            undo.callback(self.stop)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix:{self._socket}"

    @property
    def pid(self) -> int:
        """The process that runs now."""
        assert self._process is not None
        return self._process.pid

    def client(self, *, timeout_s: float = 60.0) -> Client:
        """A client of this daemon; the caller closes it."""
        return Client(self.address, timeout_s=timeout_s)

    def http_client(self, *, timeout_s: float = 60.0) -> Client:
        """A client over HTTP, for a daemon with `http.listen`; the caller closes it."""
        return Client(self.http_address, timeout_s=timeout_s, token=self.http_token)

    @property
    def http_token(self) -> str:
        """The token that the daemon made for its own tools."""
        return (self.data / TOKEN_FILE).read_text().strip()

    @property
    def http_address(self) -> str:
        """What an HTTP client connects to; SetupError without `http.listen`."""
        address = self._announced_http()
        if not address:
            raise SetupError("the daemon announced no HTTP address: start it with http.listen")
        return address

    def start(self) -> float:
        """Start the process and wait until clients can connect; the seconds that took."""
        assert self._process is None
        command = [sys.executable, "-m", "blobstore", "serve"]
        command += ["--data", str(self.data), "--socket", str(self._socket)]
        command += [word for pair in self._sizes.items() for word in pair]
        started_s = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own program)
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )
        try:
            while not self._answers():
                self._check(started_s + READY_S)
                time.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise
        return time.perf_counter() - started_s

    def restart(self, options: Mapping[str, str] | None = None) -> float:
        """Stop and start it, from now on with `options` too; the seconds that the start took."""
        self.stop()
        self._options |= options or {}
        return self.start()

    def kill(self) -> None:
        """SIGKILL: what a crash looks like. Nothing happens if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough. Nothing happens if it is not running."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def segment_files(self) -> list[Path]:
        """The files that hold payloads on disk."""
        return sorted(self.data.rglob("*.seg"))

    def memory_bytes(self, field: str) -> int:
        """A line of /proc/PID/status, such as RssAnon or VmRSS."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise KeyError(field)

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far, to the nanosecond."""
        # What clock_getcpuclockid(3) gives for a pid; Python does not offer it.
        return time.clock_gettime((~self.pid << 3) | 2)

    @property
    def _socket(self) -> Path:
        return self._home / "blobstore.sock"

    @property
    def _log(self) -> Path:
        return self._home / "log"

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BLOBSTORE_")}
        own = {
            _ENV_PREFIX + dotted.upper().replace(".", "__"): value
            for dotted, value in self._options.items()
        }
        return inherited | own

    def _announced_http(self) -> str:
        said = self._log.read_text(errors="replace")
        found = re.findall(r"^ready: (https?://\S+)$", said, re.MULTILINE)
        return str(found[-1]) if found else ""

    def _answers(self) -> bool:
        if self._options.get("http.listen") and not self._announced_http():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(self._socket)) == 0

    def _check(self, deadline_s: float) -> None:
        assert self._process is not None
        if self._process.poll() is None and time.perf_counter() < deadline_s:
            return
        said = " / ".join(self._log.read_text(errors="replace").splitlines()[-5:])
        code = self._process.poll()
        state = f"is not ready after {READY_S:g} s" if code is None else f"ended with code {code}"
        raise SetupError(f"the daemon {state}: {said or 'it said nothing'}")
