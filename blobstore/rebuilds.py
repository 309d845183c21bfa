"""Blobs made again from their tokens: binds the queue of jobs to the store, texts and runners.

Whoever wants blobs `begin`s and waits; runners ask for the `next` job and report. Used on the
event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import suppress
from typing import Any

from blobstore.estimates import Estimates
from blobstore.index import Index, NamespaceState
from blobstore.rebuild_jobs import Job
from blobstore.rebuild_queue import RebuildQueue
from blobstore.rebuild_tasks import Task, Tasks
from blobstore.rebuild_wait import Wait
from blobstore.residency import Residency
from blobstore.runners import Runner, Runners
from blobstore.text_entry import TextEntry
from blobstore.texts import Texts

JOB_S_MIN = 30.0
JOB_S_UNKNOWN = 600.0
"""A job may take this long where it is not known how fast its runner is."""
LATE = 5.0
"""Times what was estimated."""
REASONS = frozenset(
    ("failed", "no_context", "no_room", "refused", "divergent", "unwritten", "untold")
)
"""Why a runner may say that it ended a job before all was made; anything else is "failed"."""


class Rebuilds:
    """All rebuilding of the store."""

    def __init__(
        self,
        index: Index,
        residency: Residency,
        texts: Texts,
        estimates: Estimates,
        clock: Callable[[], float],
        *,
        jobs_max: int,
    ) -> None:
        self._index = index
        self._estimates = estimates
        self._clock = clock
        self._runners = Runners(clock)
        self._queue = RebuildQueue(self._runners, clock, jobs_max)
        self._queue.on_news = self._wake
        self._tasks = Tasks(index, residency, texts, self._queue, clock)
        self._idle: set[asyncio.Future[None]] = set()
        """Of runners that ask for a job and got none yet."""
        self._made: dict[str, float] = {"blobs": 0, "tokens": 0, "seconds": 0.0}

    def possible(self, ns: NamespaceState) -> bool:
        """Some runner that is alive serves the namespace."""
        return any(runner.able for runner in self._runners.serving(ns.id))

    async def estimate_s(self, ns: NamespaceState, position: int, n_tokens: int) -> float | None:
        """Seconds until so many tokens could be rebuilt, what is queued before included."""
        own_s = self._estimates.rebuild_s(ns.id, position, n_tokens)
        if own_s is None:
            return None
        before = self._queue.queued_tokens(ns.id)
        before_s = self._estimates.rebuild_s(ns.id, position, before) if before else 0.0
        at_once = sum(runner.concurrency for runner in self._runners.serving(ns.id))
        return own_s + (before_s or 0.0) / max(at_once, 1)

    def begin(
        self,
        ns: NamespaceState,
        keys: Sequence[bytes],
        entries: Sequence[TextEntry],
        *,
        deadline_s: float,
        priority: int = 0,
    ) -> Wait:
        """Have consecutive blobs rebuilt, joining whoever asked for some of them before.

        `deadline_s` is on the store's clock: until then the caller means to wait. Never raises.
        """
        wait, above = Wait(self._queue), ns.blobs.get(entries[0].parent)
        waiter = self._queue.submit(
            ns.id, keys, entries, deadline_s=deadline_s, priority=priority, on_change=wait.look,
            ready=above is not None and above.readable,
        )  # fmt: skip
        wait.follow(waiter)
        return wait

    def entry(self, job_id: int, ns: NamespaceState, key: bytes) -> TextEntry | None:
        """What is known of a blob that a job makes.

        None if the job is not being worked on, or makes no such blob: then it writes nothing.
        """
        job = self._queue.get(job_id)
        if job is None or job.runner is None or job.namespace_id != ns.id:
            return None
        for start in (job.n_sealed, 0):  # blobs come in order: it is the next one, or near
            with suppress(ValueError):
                return job.entries[job.keys.index(key, start)]
        return None

    def forget(self, ns: NamespaceState, keys: Set[bytes]) -> None:
        """Blobs are to be forgotten: no job makes any of them any more."""
        for job in self._queue.jobs():
            if job.namespace_id == ns.id and not keys.isdisjoint(job.keys):
                self._queue.drop(job, "cancelled")

    def register(
        self, name: str, namespace_ids: Collection[bytes], concurrency: int, *, beats: bool = True
    ) -> Runner:
        """A runner is there for these namespaces.

        One that `beats` reports progress every second. Raises UnknownNamespace for one that
        is not declared: a layout that nobody uses has an id of its own. InvalidRequest, Busy.
        """
        for namespace_id in namespace_ids:
            self._index.namespace(namespace_id)
        return self._runners.add(name, namespace_ids, concurrency, beats=beats)

    def unregister(self, runner: Runner) -> bool:
        """The runner has gone, or says goodbye: its jobs are tried elsewhere; if it was there."""
        there = self._runners.remove(runner)
        if there:
            self._queue.runner_gone(runner)
            self._tasks.let_go()
        return there

    async def next(self, runner: Runner, timeout_s: float) -> Task | None:
        """The next job for `runner`, or None after `timeout_s`, or when its registration ends.

        Cancelling it is safe.
        """
        deadline_s = self._clock() + timeout_s
        self._queue.heard(runner)
        while self._runners.get(runner.runner_id) is runner:
            job = self._queue.take(runner, self._limit_s)
            if job is not None:
                task = await self._tasks.put_together(job, runner)
                if task is not None:
                    return task
                continue
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return None
            await self._news(min(left_s, runner.pace.wait_s(1, self._clock()) or left_s))
        return None

    def progress(self, runner: Runner, job_id: int, n_sealed: int) -> int:
        """`n_sealed` leading blobs of a job are said to be made; how many are still wanted.

        Only what is there counts. 0 if the job is not the runner's any more.
        """
        job = self._queue.get(job_id)
        if job is not None and job.runner is runner:
            n_sealed = self._held(job, n_sealed)
        return self._queue.progress(runner, job_id, n_sealed)

    def wants(self, runner: Runner, job_id: int) -> bool:
        """Whether a runner should go on with a job, be it to say that all is made."""
        job = self._queue.get(job_id)
        if job is None or job.runner is not runner:
            return False
        return job.needed or job.n_sealed >= len(job.keys)

    def made(self, job_id: int, key: bytes) -> None:
        """A blob of a job was sealed: it counts as made, whatever becomes of it."""
        job = self._queue.get(job_id)
        if job is None or job.runner is None:
            return
        n = job.n_sealed  # others count when the runner says so, and they are held
        if n < len(job.keys) and job.keys[n] == key:
            self._queue.sealed(job, n + 1 - job.base)

    def end(self, runner: Runner, job_id: int, n_sealed: int, reason: str, seconds: float) -> bool:
        """A runner is done with a job, or ("reason") failed; whether it was its own.

        `seconds` are what it took to compute `n_sealed` blobs, as the runner says.
        """
        if reason and reason not in REASONS:
            reason = "failed"
        self.progress(runner, job_id, n_sealed)
        job = self._queue.get(job_id)
        if job is None or job.runner is not runner:
            self._queue.end(runner, job_id, reason)
            return False
        made = job.entries[job.base : job.n_sealed]
        took_s = self._clock() - job.taken_s
        if made:
            n_tokens = sum(entry.n_tokens for entry in made)
            seconds = seconds if 0 < seconds <= took_s else took_s
            self._estimates.rebuilt(
                job.namespace_id, runner.name, made[0].position, n_tokens, seconds
            )
            self._made["blobs"] += len(made)
            self._made["tokens"] += n_tokens
            self._made["seconds"] += seconds
        self._queue.end(runner, job_id, reason)
        self._tasks.let_go()
        return True

    def tick(self) -> None:
        """Take jobs from runners that are late."""
        self._queue.tick()
        self._tasks.let_go()

    def stats(self) -> dict[str, Any]:
        """Gauges and counters by name."""
        return {
            "runners": len(self._runners),
            "able": sum(runner.able for runner in self._runners),
            "jobs": len(self._queue),
            "running": self._queue.n_running,
            "waiting": self._queue.n_waiting,
            "text_bytes": self._queue.text_bytes,
            "ended": dict(self._queue.ended),
            **self._made,
        }

    def close(self) -> None:
        """End every registration: those who wait for blobs are told that there is no runner."""
        for runner in list(self._runners):
            self.unregister(runner)

    def _limit_s(self, job: Job) -> float:
        """How long the runner of a job may take for it."""
        assert job.runner is not None
        estimate_s = self._estimates.rebuild_s(
            job.namespace_id, job.entries[job.base].position, job.n_tokens, job.runner.name
        )
        return JOB_S_UNKNOWN if estimate_s is None else max(JOB_S_MIN, LATE * estimate_s)

    def _held(self, job: Job, n_sealed: int) -> int:
        """How many of `n_sealed` leading blobs that a runner says it made are there.

        What is on SSD alone it has not made: that was there before.
        """
        blobs = self._index.namespace(job.namespace_id).blobs
        done = max(job.n_sealed - job.base, 0)
        n_sealed = min(n_sealed, len(job.keys) - job.base)
        while done < n_sealed:
            record = blobs.get(job.keys[job.base + done])
            if record is None or not record.held or record.cold:
                break
            done += 1
        return done

    async def _news(self, timeout_s: float) -> None:
        """Wait until there may be a job that there was not before."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.add(news)
        try:
            await asyncio.wait([news], timeout=timeout_s)
        finally:
            self._idle.discard(news)

    def _wake(self) -> None:
        for news in self._idle:
            if not news.done():
                news.set_result(None)
