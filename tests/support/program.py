"""A Python program of ours in a process of its own, spoken to line by line in JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

ROOT = Path(__file__).parents[2]
ANSWER_S = 30.0


class Program:
    """`python -m module arguments…`, killed at the end of the `with` block if it still runs."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *options, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | (environ or {}),
        )
        self._heard = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()

    def tell(self, message: object) -> None:
        """Send one line to its standard input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._has_ended()

    def hear(self, timeout_s: float = ANSWER_S) -> Any:
        """Its next line; AssertionError if none comes, with what it said on standard error."""
        end = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            ready, _, _ = select.select([fd], [], [], max(end - time.monotonic(), 0.0))
            assert ready, f"{self.process.args!r} says nothing for {timeout_s} s"
            data = os.read(fd, 1 << 20)
            if not data:
                self._has_ended()
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def ask(self, message: object, timeout_s: float = ANSWER_S) -> Any:
        """Tell, then hear."""
        self.tell(message)
        return self.hear(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def _has_ended(self) -> NoReturn:
        assert self.process.stderr is not None
        errors = self.process.stderr.read().decode(errors="replace")
        raise AssertionError(
            f"{self.process.args!r} has ended, code {self.process.wait()}: {errors}"
        )

    def end(self, timeout_s: float = ANSWER_S) -> tuple[int, str]:
        """Close its input and wait for its end: exit code and standard error."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors.decode(errors="replace")


def say(message: object) -> None:
    """In the program: send one line to whoever started it."""
    os.write(1, json.dumps(message).encode() + b"\n")
