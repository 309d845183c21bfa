"""Background threads for what must not hold up the engine."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress

log = logging.getLogger("blobstore.clients.vllm")

Job = Callable[[], None]


def launch_cores() -> set[int]:
    """The cores of the calling thread, and those of the process that started this one.

    vLLM binds a worker on CPUs to the cores that compute, and its threads inherit that: copies
    would share those with the forward, and leave alone what the operator kept free for others.
    """
    cores = os.sched_getaffinity(0)
    with suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores


class Lane:
    """Runs jobs in the order in which they were posted, `threads` at a time.

    At most `waiting_max` wait; more are refused. A job that raises is logged, and the
    lane goes on. A ThreadPoolExecutor has no bound, cannot be closed with a deadline, and the
    interpreter waits for its threads when it exits: a frozen daemon would hold up the engine.
    """

    def __init__(self, name: str, *, threads: int = 1, waiting_max: int = 256) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting_max = waiting_max
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"blobstore-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, job: Job) -> bool:
        """Have `job` run soon; whether it will be."""
        if self._closed or self._jobs.qsize() >= self._waiting_max:
            return False
        self._jobs.put(job)
        return True

    def spread(self, cores: AbstractSet[int]) -> None:
        """Let all threads run on `cores`; where they may not, they stay where they are."""
        for thread in self._threads:
            if thread.native_id is not None:
                with suppress(OSError):
                    os.sched_setaffinity(thread.native_id, cores)

    def stop(self) -> None:
        """Take no more jobs."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs; whether all that were taken have run within `timeout_s`."""
        self.stop()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of the connector failed")
            del job  # what it holds of the arena must not outlive it
