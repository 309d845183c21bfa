"""Engines in processes of their own: they share nothing but the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from blobstore.bench.engine import CONTEXT_TOKENS, Job, Turn
from blobstore.errors import BlobStoreError

_LINES = 3
"""Of what a process said, in the message about its end."""


class EngineDied(BlobStoreError):
    """A process that runs the model, for an engine or as a rebuilder, ended by itself."""

    code = "engine_died"


class ModelProcess:
    """A module of the benchmarks that loads the model, in a process: one reply when it is ready.

    It computes on all cores but one, which is the daemon's: as beside an accelerator, and
    because threads that share the work of a product wait long for one that has no core.
    Raises EngineDied, with what the process said, if it ends.
    """

    def __init__(self, module: str, address: str, capacity_tokens: int, layers: int) -> None:
        command = [sys.executable, "-m", f"blobstore.bench.{module}", address]
        command += [str(capacity_tokens), str(layers)]
        threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"OPENBLAS_NUM_THREADS": threads, **os.environ},
        )
        self.reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

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
        line = self._process.stdout.readline()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        _, complaint = self._process.communicate()
        said = " / ".join(complaint.splitlines()[-_LINES:])
        raise EngineDied(f"the engine process ended: {said}")


class EngineProcess(ModelProcess):
    """An engine that answers."""

    def __init__(
        self, address: str, capacity_tokens: int = CONTEXT_TOKENS, layers: int = 0
    ) -> None:
        super().__init__("engine", address, capacity_tokens, layers)

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
        super().__init__("rebuilder", address, capacity_tokens, layers)
