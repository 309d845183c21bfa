"""`blobstore serve` as a process of its own, watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.polling import poll_until

READY_S = 60.0
STOP_S = 60.0


class Daemon:
    """One run of the daemon; its standard error is in `log`."""

    def __init__(self, home: Path, *options: str, environ: Mapping[str, str] | None = None) -> None:
        self.socket = home / "b.sock"
        self.data = home / "data"
        self.address = f"unix:{self.socket}"
        self.log = home / "log"
        command = [sys.executable, "-m", "blobstore", "serve"]
        command += ["--data", str(self.data), "--socket", str(self.socket)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BLOBSTORE_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--dram", "64MiB", "--ssd", "256MiB", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | dict(environ or {}),
            )

    @property
    def said(self) -> str:
        """All that it wrote so far."""
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Until clients may connect; AssertionError if it ends first."""

        def ready() -> bool:
            assert self.process.poll() is None, self.said
            return f"ready: {self.address}\n" in self.said

        poll_until(ready, READY_S, "the daemon is ready")

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def kill_after(self, seconds: float) -> None:
        """SIGKILL once so much time has passed; AssertionError if it ended before."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            raise AssertionError(f"it ended by itself with code {code}: {self.said}")
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()


@contextmanager
def daemon(home: Path, *options: str, environ: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """A daemon in `home`, ready; killed at the end if it still runs."""
    run = Daemon(home, *options, environ=environ)
    try:
        run.wait_ready()
        yield run
    finally:
        run.kill()


def refused(home: Path, *options: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and the one line of a daemon that must not start; nothing is left behind."""
    run = Daemon(home, *options, environ=environ)
    try:
        code = run.wait(READY_S)
    finally:
        run.kill()
    assert run.said.startswith("error: ")
    assert run.said.count("\n") == 1, run.said
    return code, run.said
