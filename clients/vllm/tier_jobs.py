"""A tier's work under way: questions, loads and saves on threads of their own.

Whatever happens to a job, it ends, and is told of once: the engine keeps its rows pinned
until then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from blobstore.clients.vllm.lane import Lane
from blobstore.clients.vllm.reasons import BUSY
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.request_params import RequestParams
from blobstore.clients.vllm.tier_chunks import Chunk
from blobstore.clients.vllm.tier_lookups import Batch
from blobstore.clients.vllm.tier_store import TierStore

LOOKUPS_MAX = 64
"""Batches of questions that wait: one for each step of the scheduler."""
JOBS_MAX = 64
"""Loads that wait, and saves: each keeps rows of the engine's memory from being used."""
LOAD_THREADS = 2
"""One copies while another waits for the daemon; more would take cores from the engine."""

Answered = Callable[[Batch, Sequence[bool]], None]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that is over: `done` of its keys were loaded or are kept, `failed` not."""

    job_id: int
    is_load: bool
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    seconds: float


class TierJobs:
    """Takes jobs from the scheduler without holding it up.

    Args:
        store: does the work.
        recorder: is told of what was not tried.
        answered: is given answers, on a thread.
    """

    def __init__(
        self,
        store: TierStore,
        recorder: Recorder,
        answered: Answered,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._answered = answered
        self._clock = clock
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._under_way = 0
        self._lookups = Lane("tier-lookups", waiting_max=LOOKUPS_MAX)
        self._loads = Lane("tier-loads", threads=LOAD_THREADS, waiting_max=JOBS_MAX)
        self._saves = Lane("tier-saves", waiting_max=JOBS_MAX)

    def ask(self, keys: Batch) -> bool:
        """Find out which of `keys` are held; False if too many questions wait."""
        return self._lookups.post(partial(self._ask, keys))

    def load(self, job_id: int, chunks: Sequence[Chunk], params: RequestParams) -> None:
        """Fill the rows of `chunks` from the store."""
        self._begin(self._loads, job_id, chunks, lambda: self._store.load(chunks, params))

    def save(self, job_id: int, chunks: Sequence[Chunk], params: RequestParams) -> None:
        """Store what is in the rows of `chunks`."""
        if params.no_store:
            keys = tuple(chunk.key for chunk in chunks)
            self._finished.put(Finished(job_id, False, keys, (), 0.0))
            return
        self._begin(self._saves, job_id, chunks, lambda: self._store.save(chunks, params))

    def finished(self) -> list[Finished]:
        """The jobs that have ended since the last call."""
        ended = []
        while not self._finished.empty():
            ended.append(self._finished.get_nowait())
        return ended

    def drain(self, timeout_s: float) -> int:
        """Wait until no row is read or written: for the calls under way, which have deadlines.

        What has not begun by now fails. Returns how many jobs go on nevertheless.
        """
        with self._changed:
            self._store.stopping = True
            self._changed.wait_for(lambda: not self._under_way, timeout_s)
            self._store.stopping = False
            return self._under_way

    def close(self, timeout_s: float) -> bool:
        """End after the calls under way; False if they take longer."""
        self._store.stopping = True
        deadline_s = self._clock() + timeout_s
        lanes = (self._lookups, self._loads, self._saves)
        ended = [lane.close(max(0.0, deadline_s - self._clock())) for lane in lanes]
        return all(ended)

    def _begin(
        self, lane: Lane, job_id: int, chunks: Sequence[Chunk], work: Callable[[], Sequence[bytes]]
    ) -> None:
        keys, is_load = tuple(chunk.key for chunk in chunks), lane is self._loads
        with self._changed:
            self._under_way += 1
        if not lane.post(partial(self._run, job_id, is_load, keys, work)):
            (self._recorder.missed if is_load else self._recorder.unsaved)(BUSY, len(keys))
            self._end(Finished(job_id, is_load, (), keys, 0.0))

    def _run(
        self,
        job_id: int,
        is_load: bool,
        keys: tuple[bytes, ...],
        work: Callable[[], Sequence[bytes]],
    ) -> None:
        began_s, done = self._clock(), frozenset[bytes]()
        try:
            done = frozenset(work())
        finally:
            kept = tuple(key for key in keys if key in done)
            failed = tuple(key for key in keys if key not in done)
            self._end(Finished(job_id, is_load, kept, failed, self._clock() - began_s))

    def _end(self, finished: Finished) -> None:
        with self._changed:
            self._finished.put(finished)
            self._under_way -= 1
            self._changed.notify_all()

    def _ask(self, keys: Batch) -> None:
        self._answered(keys, self._store.held(keys))
