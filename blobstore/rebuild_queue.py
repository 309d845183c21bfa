"""Which blobs are rebuilt, by whom, and when that is given up. Pure logic: no bytes, no waiting.

One job makes a blob however many wait for it. A request joins the jobs that make some of its
blobs already and adds only what none covers. Jobs go to runners by priority, then deadline.
What fails is tried by another runner, a few times; what nobody waits for any longer is not
begun, and not carried on if its last waiter has gone rather than run out of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from blobstore.rebuild_jobs import Job, Place, Share, Waiter
from blobstore.rebuild_map import JOB_BLOBS_MAX, RebuildMap, common_end, may_grow
from blobstore.runners import Runner, Runners
from blobstore.text_entry import TextEntry

TEXT_BYTES_MAX = 256 << 20
"""Of the texts of all jobs, in memory: with more there are no new ones for now."""
TRIES_MAX = 3
"""Runners that are given a job before it is given up."""
REMADE_MAX = 3
"""How often a job may begin further up, as what it continues went meanwhile."""
SILENT_S = 5.0
"""After so long without a word a runner that should be at work is taken for frozen."""
TICK_S_MAX = 1.0
"""As much of that passes between two ticks: after a stall of our own, words wait to be heard."""


class RebuildQueue:
    """All jobs, queued or given out. `jobs_max` bounds them, and TEXT_BYTES_MAX their texts."""

    def __init__(self, runners: Runners, clock: Callable[[], float], jobs_max: int) -> None:
        self._runners = runners
        self._clock = clock
        self._jobs_max = jobs_max
        self._jobs: dict[int, Job] = {}
        self._map = RebuildMap()
        self._closing: list[tuple[Job, str]] = []
        self._ticked_s = clock()
        self._next_id = 1
        self.ended = Counter[str]()
        """Jobs, by how they ended: "made", or why not."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when a runner might be given a job that it could not be given before."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def text_bytes(self) -> int:
        """What the texts of all jobs take in memory."""
        return self._map.nbytes

    @property
    def n_running(self) -> int:
        """Jobs that a runner is at work on."""
        return sum(job.runner is not None for job in self._jobs.values())

    @property
    def n_waiting(self) -> int:
        """Requests that wait for blobs of jobs; of several jobs, where they are several."""
        return sum(len(job.shares) for job in self._jobs.values())

    def jobs(self) -> list[Job]:
        """All that have not ended."""
        return list(self._jobs.values())

    def get(self, job_id: int) -> Job | None:
        """The job, unless it has ended."""
        return self._jobs.get(job_id)

    def queued_tokens(self, namespace_id: bytes) -> int:
        """Of jobs of this namespace that no runner has been given yet."""
        return sum(
            job.n_tokens
            for job in self._jobs.values()
            if job.namespace_id == namespace_id and job.runner is None
        )

    def submit(
        self,
        namespace_id: bytes,
        keys: Sequence[bytes],
        entries: Sequence[TextEntry],
        *,
        deadline_s: float,
        on_change: Callable[[], None],
        priority: int = 0,
        ready: bool = False,
    ) -> Waiter:
        """Have the blobs of a chain made; whoever makes some of them already is joined.

        If what they continue is `ready`, no job that makes it too is waited for.
        The waiter may have ended when this returns: "no_runner", or "busy" if there are too
        many jobs, or too large ones.
        """
        waiter = Waiter(len(keys), deadline_s, priority, on_change)
        if not self._served(namespace_id):
            self._end_waiter(waiter, "no_runner")
            return waiter
        above = None if ready else self._map.place(namespace_id, entries[0].parent)
        at = 0
        while at < len(keys):
            job = self._map.job_of(namespace_id, keys[at])
            if job is not None:
                end = common_end(job, keys, at)
            elif (job := self._job_for(namespace_id, entries[at], above)) is not None:
                end = self._map.extend(job, keys, entries, at)
            else:
                waiter.need, waiter.short = at, "busy"
                break
            first = job.keys.index(keys[at])
            if first == 0 and job.runner is None and job.after is None:
                job.follow(above)
            share = Share(waiter, job, first, end - at, at)
            waiter.shares.append(share)
            job.shares.add(share)
            above, at = (job, first + end - at - 1), end
        self._look_at(waiter)
        self.on_news()
        return waiter

    def take(self, runner: Runner, limit_s: Callable[[Job], float]) -> Job | None:
        """The most urgent job that `runner` may begin now, given to it.

        `limit_s` says of a job that has been given how long it may take in all.
        """
        if not runner.able or len(runner.running) >= runner.concurrency:
            return None
        job = min(
            (
                job
                for job in self._jobs.values()
                if job.runner is None
                and job.namespace_id in runner.namespace_ids
                and runner.runner_id not in job.tried
                and job.ready
            ),
            key=lambda job: job.urgency,
            default=None,
        )
        now_s = self._clock()
        if job is None or not runner.pace.take(1, now_s):
            return None
        job.runner = runner
        job.base, job.told = job.n_sealed, job.wanted
        self._map.shed(job)
        job.taken_s, job.silent_s = now_s, 0.0
        job.limit_s = now_s + limit_s(job)
        runner.running.add(job.job_id)
        return job

    def put_back(self, job: Job) -> None:
        """The runner could not be told of the job: it is queued as before."""
        if job.runner is not None:
            job.runner.running.discard(job.job_id)
            job.runner = None
            self._review(job)
            self.on_news()

    def begin_further_up(
        self, job: Job, keys: Sequence[bytes], entries: Sequence[TextEntry]
    ) -> bool:
        """What `job` was to continue is gone: make `keys`, which lead up to it, first.

        As far as no other job makes them already. False if that was done too often.
        """
        assert job.runner is not None
        job.remade += 1
        if job.remade > REMADE_MAX or len(keys) > JOB_BLOBS_MAX:
            return False
        made = [self._map.job_of(job.namespace_id, key) for key in keys]
        start = max((n + 1 for n, other in enumerate(made) if other is not None), default=0)
        above = self._map.place(job.namespace_id, keys[start - 1]) if start else None
        if above is not None and above[0] is job:  # engines' own keys may lie about parents
            return False
        self._map.prepend(job, keys[start:], entries[start:])
        job.follow(above)
        self.put_back(job)
        return True

    def heard(self, runner: Runner) -> None:
        """The runner gave a sign of life."""
        if runner.silent:
            runner.silent = False
            self.on_news()

    def progress(self, runner: Runner, job_id: int, n_sealed: int) -> int:
        """`n_sealed` leading blobs of what `runner` was given are made; how many are wanted.

        0 if the job is not that runner's (any more): it may stop.
        """
        self.heard(runner)
        job = self._given_to(runner, job_id)
        if job is None:
            return 0
        self.sealed(job, n_sealed)
        job.told = job.wanted
        self._map.shed(job)
        return max(job.told - job.base, 0)

    def sealed(self, job: Job, n_sealed: int) -> None:
        """`n_sealed` leading blobs of what the job's runner was given are made."""
        job.silent_s = 0.0
        n = min(job.base + n_sealed, len(job.keys))
        if n > job.n_sealed:
            job.n_sealed = n
            for share in list(job.shares):
                self._look_at(share.waiter)
            if job.dependants:
                self.on_news()

    def end(self, runner: Runner, job_id: int, reason: str) -> None:
        """`runner` is done with a job, or ("reason") has failed.

        What nobody wants any more cannot fail.
        """
        self.heard(runner)
        runner.running.discard(job_id)
        job = self._given_to(runner, job_id)
        if job is None:
            self.on_news()  # it may be given another
            return
        job.runner = None
        if job.needed:
            runner.backoff.fault()
            self._try_elsewhere(job, runner, reason or "incomplete")
        else:
            runner.backoff.success()
            self._close(job, "" if job.n_sealed else "cancelled")
        self.on_news()

    def drop(self, job: Job, reason: str) -> None:
        """Give up a job, whoever is at work on it."""
        if job.runner is not None:
            job.runner.running.discard(job.job_id)
            job.runner = None
        self._close(job, reason)
        self.on_news()

    def runner_gone(self, runner: Runner, reason: str = "runner_gone") -> None:
        """Its registration has ended: its jobs are tried elsewhere."""
        for job in [job for job in self._jobs.values() if job.runner is runner]:
            job.runner = None
            self._try_elsewhere(job, runner, reason)
        self._close_unserved()
        self.on_news()

    def stop_at(self, waiter: Waiter, n: int) -> None:
        """The waiter wants no more than `n` leading blobs."""
        if n < waiter.need:
            waiter.need, waiter.short = n, ""
            self._look_at(waiter)
            for share in waiter.shares:
                self._review(share.job)

    def leave(self, waiter: Waiter, *, cancelled: bool = False) -> None:
        """The waiter has gone. What runs for it is carried on, unless it was `cancelled`."""
        if waiter.reason is None:
            if not cancelled:
                for share in waiter.shares:
                    if share.job.runner is not None:
                        share.job.n_kept = max(share.job.n_kept, share.wanted)
            self._end_waiter(waiter, "cancelled")

    def tick(self) -> list[Job]:
        """Take jobs from runners that are late, or have fallen silent; those jobs.

        Call it twice a second.
        """
        now_s = self._clock()
        passed_s, self._ticked_s = min(now_s - self._ticked_s, TICK_S_MAX), now_s
        late = []
        for job in list(self._jobs.values()):
            runner = job.runner
            if runner is None:
                continue
            job.silent_s += passed_s
            silent = runner.beats and job.silent_s > SILENT_S
            if silent or now_s > job.limit_s:
                runner.silent = runner.silent or silent
                runner.backoff.fault()
                job.runner = None
                late.append(job)
                self._try_elsewhere(job, runner, "late")
        self._close_unserved()
        self.on_news()  # pauses end by time alone
        return late

    def _job_for(self, namespace_id: bytes, entry: TextEntry, above: Place | None) -> Job | None:
        """A job for a blob that continues `above`: that one, if it can grow; None: too much."""
        if self._map.nbytes >= TEXT_BYTES_MAX:
            return None
        if above is not None and may_grow(*above, entry.n_tokens):
            return above[0]
        if len(self._jobs) >= self._jobs_max:
            return None
        job = self._jobs[self._next_id] = Job(self._next_id, namespace_id, [], [])
        self._next_id += 1
        job.follow(above)
        return job

    def _given_to(self, runner: Runner, job_id: int) -> Job | None:
        job = self._jobs.get(job_id)
        return job if job is not None and job.runner is runner else None

    def _look_at(self, waiter: Waiter) -> None:
        """End the waiter if it has what it wants, or cannot get it any more; tell it anyway."""
        if waiter.reason is not None:
            return
        n_sealed = waiter.n_sealed
        if n_sealed >= waiter.need:
            self._end_waiter(waiter, waiter.short)
            return
        next_share = next(s for s in waiter.shares if s.offset + s.n > n_sealed)
        if next_share.job.reason is not None:
            self._end_waiter(waiter, next_share.job.reason or "failed")
        else:
            waiter.on_change()

    def _end_waiter(self, waiter: Waiter, reason: str) -> None:
        waiter.n_last, waiter.reason = waiter.n_sealed, reason
        for share in waiter.shares:
            share.job.shares.discard(share)
        for share in waiter.shares:
            self._review(share.job)
        waiter.on_change()

    def _review(self, job: Job) -> None:
        """Forget a job that nobody wants and no runner is at work on."""
        if job.reason is None and job.runner is None and not job.needed:
            self._close(job, "" if job.n_sealed else "cancelled")

    def _try_elsewhere(self, job: Job, runner: Runner, reason: str) -> None:
        job.tried.add(runner.runner_id)
        job.n_kept = 0
        if len(job.tried) >= TRIES_MAX or not self._served(job.namespace_id, job.tried):
            self._close(job, reason)
        else:
            self._review(job)

    def _served(self, namespace_id: bytes, tried: Collection[int] = ()) -> bool:
        """Some runner, but for those in `tried`, may be given a job, if not now then soon."""
        return any(not runner.silent for runner in self._runners.serving(namespace_id, tried))

    def _close_unserved(self) -> None:
        for job in list(self._jobs.values()):
            if job.runner is None and not self._served(job.namespace_id, job.tried):
                self._close(job, "no_runner")

    def _close(self, job: Job, reason: str) -> None:
        """The job has ended: those who wait for more of it are told why."""
        self._closing.append((job, reason))
        if len(self._closing) > 1:
            return  # whoever closes goes on with it: jobs may follow each other a thousand deep
        try:
            for ended, why in self._closing:
                self._close_one(ended, why)
        finally:
            self._closing.clear()

    def _close_one(self, job: Job, reason: str) -> None:
        if job.reason is not None:
            return
        job.reason = reason
        self.ended[reason or "made"] += 1
        del self._jobs[job.job_id]
        self._map.remove(job)
        for share in list(job.shares):
            self._look_at(share.waiter)
        for other in list(job.dependants):
            if not other.ready:
                self._close(other, reason or "failed")
        above = job.after
        job.follow(None)
        if above is not None:
            self._review(above[0])
