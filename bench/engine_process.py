"""Engines in processes of their own: they share nothing but the store."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from blobstore.bench.engine import CONTEXT_TOKENS, Job, Turn
from blobstore.errors import BlobStoreError

REPLY_S = 900.0
"""No runner here takes so long for one reply, be the machine as busy as it may."""

TIDY_S = 0.5
"""For what outlives a program that has ended in order: Python's tracker removes shared memory."""

_LINES = 3
"""Of what a process said, in the message about its end."""


class EngineDied(BlobStoreError):
    """A process that runs the model, for an engine or as a rebuilder, ended by itself."""

    code = "engine_died"


class ModelProcess:
    """A program that loads a model, in a process: JSON line by line, one reply when it is ready.

    What it starts ends with it. Raises EngineDied, with the end of what it said, if it ends by
    itself, or is ended because a reply takes longer than `reply_s`.

    Args:
        command: of the program, with its arguments.
        environment: beside ours.
        reply_s: how long it may take for one reply.
        stop_s: how long it may take to end once its input has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        reply_s: float = REPLY_S,
        stop_s: float = 0.0,
    ) -> None:
        self._reply_s = reply_s
        self._stop_s = stop_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (close does)
        self._process = subprocess.Popen(  # noqa: S603 (a program of ours)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | dict(environment),
            start_new_session=True,  # its own processes go with it
        )
        try:
            self.reply()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, in order if it can. Twice is once."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        if process.returncode is None:
            ended = self._wait_for_end(self._stop_s)
            if ended:
                time.sleep(TIDY_S)
            self._kill()
            process.wait()
        process.stdout.close()
        self._log.close()

    def send(self, body: object) -> None:
        """One line of JSON to its standard input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(body) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reply says why it died

    def reply(self) -> dict[str, Any]:
        """The next line of JSON from its standard output."""
        assert self._process.stdout is not None
        late = threading.Timer(self._reply_s, self._kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
            late.join()
        if not line.endswith("\n"):  # it ended, maybe in the midst of a line
            raise EngineDied(f"the engine process ended: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _wait_for_end(self, seconds: float) -> bool:
        """Whether it ends; leaves it unreaped: no other process group can have its number yet."""
        ended = os.pidfd_open(self._process.pid)
        try:
            return bool(select.select([ended], [], [], seconds)[0])
        finally:
            os.close(ended)

    def _last_words(self) -> str:
        if self._process.returncode is None:
            self._kill()
            self._process.wait()
        self._log.seek(0)
        return " / ".join(self._log.read().decode(errors="replace").splitlines()[-_LINES:])

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class EngineProcess(ModelProcess):
    """An engine that answers."""

    def __init__(
        self, address: str, capacity_tokens: int = CONTEXT_TOKENS, layers: int = 0
    ) -> None:
        super().__init__(_command("engine", address, capacity_tokens, layers), _environment())

    def answer(
        self,
        ids: Sequence[int],
        max_tokens: int,
        *,
        restore: bool,
        store: str = "",
        prefix_tokens: int = 0,
    ) -> Turn:
        """One turn; see Job."""
        job = Job(list(ids), max_tokens, restore, store, prefix_tokens)
        self.send(asdict(job))
        return Turn(**self.reply())


class RebuilderProcess(ModelProcess):
    """A runner that serves rebuilds of the daemon at `address` until it is closed."""

    def __init__(
        self, address: str, capacity_tokens: int = CONTEXT_TOKENS, layers: int = 0
    ) -> None:
        super().__init__(_command("rebuilder", address, capacity_tokens, layers), _environment())

    def cold_s(self, ids: Sequence[int]) -> float:
        """The seconds that it takes to compute `ids`, whole chunks, while nothing is rebuilt."""
        self.send(list(ids))
        return float(self.reply()["cold_s"])


def _command(module: str, address: str, capacity_tokens: int, layers: int) -> list[str]:
    """A module of the benchmarks that runs the model in NumPy."""
    arguments = (address, str(capacity_tokens), str(layers))
    return [sys.executable, "-m", f"blobstore.bench.{module}", *arguments]


def _environment() -> dict[str, str]:
    """On all cores but one, which is the daemon's, unless it was said otherwise.

    As beside an accelerator, and because threads that share the work of a product wait long
    for one that has no core.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
    return {"OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", threads)}
