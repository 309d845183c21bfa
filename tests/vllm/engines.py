"""The test's side of vLLM engines in processes of their own.

with Nursery(home) as nursery, nursery.engine(connector(address)) as engine:
    answers = engine.run(requests, at_once=4)
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from blobstore.bench.engine_vllm_process import our_transfer
from tests.support.polling import poll_until
from tests.support.program import Program
from tests.vllm.prompts import Request

IMPORT_S = 300.0  # wide: twenty seconds of computing, on a machine of its own
START_S = 300.0
RUN_S = 600.0  # before the test itself is ended, which tells less
VERB_S = 60.0
END_S = 60.0

ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other crawl where others compute, too
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is the process that was forked
}

KV_BYTES = 128 << 20
"""Of KV space, unless a test says otherwise: more than it fills."""

_WARNING = re.compile(r"^WARNING blobstore\..*", re.MULTILINE)


connector = our_transfer
"""The KVTransferConfig of an engine that keeps its KV in the daemon at an address."""


class Engine:
    """One engine, told what to do over a socket; killed at the end if it still runs."""

    def __init__(self, line: socket.socket, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self._line = line
        self._heard = b""

    def start(self, transfer: dict[str, Any] | None, **options: Any) -> None:
        """Bring it up; AssertionError, with the reason, if it does not come up."""
        self.ask("start", options, transfer, timeout_s=START_S)

    def run(self, requests: Iterable[Request], at_once: int = 1) -> dict[str, Any]:
        """The answers to the requests, by their names."""
        self.begin(requests, at_once)
        return self.answers()

    def begin(self, requests: Iterable[Request], at_once: int = 1) -> None:
        """Begin to answer them; `answers` waits for the end."""
        self.tell("run", [one.wanted() for one in requests], at_once)

    def answers(self) -> dict[str, Any]:
        """What was begun, answered."""
        answers: dict[str, Any] = self.hear(RUN_S)
        return answers

    def submit(self, requests: Iterable[Request]) -> None:
        """Hand these requests over; they are answered in the steps that follow."""
        self.ask("submit", [one.wanted() for one in requests])

    def forget(self) -> None:
        """Empty its own prefix cache, so that what comes back is from the store; not `alone`."""

        def emptied() -> bool:
            self.ask("step", 1)  # blocks that a load holds on to are let go in a step
            return bool(self.ask("forget"))

        poll_until(emptied, 10.0, "the engine's own prefix cache is empty")

    def ask(self, verb: str, *arguments: object, timeout_s: float = VERB_S) -> Any:
        """What a verb of the engine's process returns; AssertionError with what it raised."""
        self.tell(verb, *arguments)
        return self.hear(timeout_s)

    def tell(self, verb: str, *arguments: object) -> None:
        """Begin a verb; `hear` its answer."""
        self._line.sendall(json.dumps([verb, *arguments]).encode() + b"\n")

    def hear(self, timeout_s: float = VERB_S) -> Any:
        """The next answer."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._line], [], [], max(end - time.monotonic(), 0.0))
            assert ready, f"the engine says nothing for {timeout_s} s: {self.said[-4000:]}"
            data = self._line.recv(1 << 20)
            assert data, f"the engine has ended: {self.said[-4000:]}"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        said = json.loads(line)
        assert "error" not in said, said["error"]
        return said["answer"]

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    @property
    def warnings(self) -> list[str]:
        """What the store's client warned of so far."""
        return _WARNING.findall(self.said)

    def stop(self) -> None:
        """Shut it down in order, unless it has been killed."""
        if self._line.fileno() >= 0:
            self.ask("stop")
            self._end()

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        self._line.close()
        poll_until(self._gone, END_S, "all processes of the engine have ended")

    def _gone(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


class Nursery(Program):
    """Has vLLM imported, and makes engines of itself."""

    def __init__(self, home: Path, **options: Any) -> None:
        super().__init__("tests.vllm.engine_process", environ=ENVIRON)
        self._home = home
        self._options = {"kv_cache_memory_bytes": KV_BYTES, **options}
        self._numbers = count(1)

    def wait_ready(self) -> None:
        """Until vLLM is imported."""
        assert self.hear(IMPORT_S) == "ready"

    @contextmanager
    def engine(
        self, transfer: dict[str, Any] | None = None, *, alone: bool = False, **options: Any
    ) -> Iterator[Engine]:
        """A new engine, up; shut down at the end of the block.

        `options` are vLLM's, and go before the nursery's. With `alone` it shares no interpreter
        with others, and is several processes as when vLLM is left to itself.
        """
        number = next(self._numbers)
        path, log = self._home / f"{number}.sock", self._home / f"{number}.log"
        log.touch()
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
            door.listen()
            door.settimeout(IMPORT_S)
            pid = self.ask([str(path), str(log), alone])
            engine = Engine(door.accept()[0], pid, log)
        try:
            engine.start(transfer, **{**self._options, **options})
            yield engine
            engine.stop()
        finally:
            engine.kill()
