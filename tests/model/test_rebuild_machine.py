"""The queue of rebuilds under any order of requests, runners, faults and time.

Each blob is made by one job at a time, bounds hold, runners are never given what they may
not have, and whoever waits comes to an end once runners do their work or all have gone.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blobstore.rebuild_jobs import Job, Waiter
from blobstore.rebuild_queue import SILENT_S, TRIES_MAX, RebuildQueue
from blobstore.runners import Runner, Runners
from tests.support.clock import FakeClock
from tests.support.rebuild_chains import run_of

NS = b"namespace"
JOBS_MAX = 6
PATHS = ("a", "ab", "abc", "abcd", "abcde", "abx", "abxy", "abcz", "k", "kl", "klm")


class RebuildMachine(RuleBasedStateMachine):
    """Rules are what readers, runners and time do to a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.runners = Runners(self.clock)
        self.queue = RebuildQueue(self.runners, self.clock, JOBS_MAX)
        self.waiters: list[tuple[Waiter, int]] = []
        """With how many blobs of theirs were made when that was looked at last."""
        self.asked: dict[Waiter, list[bytes]] = {}
        self.made: set[bytes] = set()
        """Blobs that a runner at work said that it had made."""
        self.given: list[tuple[Runner, Job, int]] = []
        """With how many blobs the runner was given."""

    @rule(path=st.sampled_from(PATHS), start=st.integers(0, 3), priority=st.integers(0, 2))
    def ask(self, path: str, start: int, priority: int) -> None:
        keys, entries = run_of(path, min(start, len(path) - 1))
        waiter = self.queue.submit(
            NS, keys, entries, deadline_s=self.clock() + 5.0, priority=priority,
            on_change=lambda: None,
        )  # fmt: skip
        self.waiters.append((waiter, 0))
        self.asked[waiter] = keys

    @precondition(lambda self: len(self.runners) < 3)
    @rule(concurrency=st.integers(1, 3))
    def register(self, concurrency: int) -> None:
        self.runners.add("r", [NS], concurrency)

    @precondition(lambda self: len(self.runners) > 0)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from(list(self.runners)))
        job = self.queue.take(runner, lambda job: 20.0)
        if job is not None:
            assert runner.able
            assert job.ready
            assert job.wanted > job.n_sealed
            assert len(job.keys) == job.wanted
            above = job.entries[job.base].parent
            others = {key for other in self.queue.jobs() if other is not job for key in other.keys}
            if above in others and above not in self.made:  # a branch of what is made again as well
                path = next(path for path in PATHS if run_of(path)[0][-1] == above)
                if not self.queue.begin_further_up(job, *run_of(path, len(path) - 1)):
                    self.queue.drop(job, "nested")
                assert job.runner is None
                return
            self.given.append((runner, job, len(job.keys) - job.base))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        runner, job, n = data.draw(st.sampled_from(self.given))
        sealed = data.draw(st.integers(0, n + 2))  # runners may lie
        if job.runner is runner:
            self.made.update(job.keys[: job.base + sealed])
        wanted = self.queue.progress(runner, job.job_id, sealed)
        assert 0 <= wanted <= n
        if job.runner is not runner:
            assert wanted == 0

    @precondition(lambda self: self.given)
    @rule(data=st.data(), reason=st.sampled_from(["", "failed"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        runner, job, _ = given = data.draw(st.sampled_from(self.given))
        self.given.remove(given)
        self.queue.end(runner, job.job_id, reason)
        assert job.job_id not in runner.running or given in self.given

    @precondition(lambda self: len(self.runners) > 0)
    @rule(data=st.data())
    def leave_runner(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from(list(self.runners)))
        self.runners.remove(runner)
        self.queue.runner_gone(runner)
        self.given = [given for given in self.given if given[0] is not runner]

    @precondition(lambda self: self.waiters)
    @rule(data=st.data(), cancelled=st.booleans())
    def leave(self, data: st.DataObject, cancelled: bool) -> None:
        waiter, _ = data.draw(st.sampled_from(self.waiters))
        self.queue.leave(waiter, cancelled=cancelled)
        assert waiter.reason is not None

    @precondition(lambda self: self.waiters)
    @rule(data=st.data(), n=st.integers(0, 3))
    def stop_at(self, data: st.DataObject, n: int) -> None:
        waiter, _ = data.draw(st.sampled_from(self.waiters))
        self.queue.stop_at(waiter, n)
        assert waiter.need <= max(n, waiter.need)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), up=st.integers(1, 2))
    def begin_further_up(self, data: st.DataObject, up: int) -> None:
        """What the job was to continue has gone meanwhile."""
        given = data.draw(st.sampled_from(self.given))
        runner, job, _ = given
        paths = [path for path in PATHS if job.keys and run_of(path)[0][-1] == job.keys[0]]
        if job.runner is not runner or job.n_sealed or not paths or len(paths[0]) < 2:
            return
        above = paths[0][:-1]
        self.given.remove(given)
        if not self.queue.begin_further_up(job, *run_of(above, max(len(above) - up, 0))):
            self.queue.drop(job, "nested")
        assert job.runner is None

    @rule(seconds=st.floats(0.1, 2 * SILENT_S))
    def time_passes(self, seconds: float) -> None:
        while seconds > 0:
            self.clock.advance(min(seconds, 1.0))
            self.queue.tick()
            seconds -= 1.0

    @invariant()
    def each_blob_is_made_by_one_job(self) -> None:
        jobs = self.queue.jobs()
        assert len(jobs) <= JOBS_MAX
        keys = [key for job in jobs for key in job.keys]
        assert len(keys) == len(set(keys))
        for job in jobs:
            assert job.reason is None
            assert len(job.tried) <= TRIES_MAX
            assert job.needed or job.runner is not None
            assert len(job.keys) == len(job.entries) >= job.n_sealed

    @invariant()
    def runners_have_what_they_may(self) -> None:
        for runner in self.runners:
            assert len(runner.running) <= runner.concurrency
            working = {job.job_id for job in self.queue.jobs() if job.runner is runner}
            assert working <= runner.running

    @invariant()
    def what_is_made_stays_made(self) -> None:
        for at, (waiter, before) in enumerate(self.waiters):
            assert waiter.n_sealed >= before
            assert self.made.issuperset(self.asked[waiter][: waiter.n_sealed])
            self.waiters[at] = waiter, waiter.n_sealed
            if waiter.reason == "":
                assert waiter.n_sealed >= waiter.need
            if waiter.reason is None:
                assert waiter.n_sealed < waiter.need
                assert any(share.job.reason is None for share in waiter.shares)

    def teardown(self) -> None:
        """With a runner that does its work, everybody comes to an end."""
        for runner, job, _ in list(self.given):
            self.queue.end(runner, job.job_id, "failed")
        runner = self.runners.add("last", [NS], 8)
        for _ in range(200):
            self.clock.advance(1.0)
            taken = self.queue.take(runner, lambda job: 20.0)
            if taken is not None:
                self.made.update(taken.keys)
                self.queue.progress(runner, taken.job_id, len(taken.keys) - taken.base)
                self.queue.end(runner, taken.job_id, "")
        assert [waiter for waiter, _ in self.waiters if waiter.reason is None] == []
        assert len(self.queue) == 0


RebuildMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRebuildMachine = RebuildMachine.TestCase
