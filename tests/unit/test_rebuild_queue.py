"""Who makes which blob, and when that is given up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from blobstore import rebuild_map, rebuild_queue
from blobstore.rebuild_jobs import Job, Waiter
from blobstore.rebuild_queue import REMADE_MAX, SILENT_S, TRIES_MAX, RebuildQueue
from blobstore.runners import BURST_JOBS, JOBS_PER_S, Runner, Runners
from tests.support.clock import FakeClock
from tests.support.rebuild_chains import TOKENS, entry_of, key_of, run_of

NS = b"namespace"
LONG_S = 1000.0


class Queue:
    """A queue with runners, and short names for what is done to it."""

    def __init__(self, *, runners: int = 1, concurrency: int = 4, jobs_max: int = 100) -> None:
        self.clock = FakeClock()
        self.runners = Runners(self.clock)
        self.queue = RebuildQueue(self.runners, self.clock, jobs_max)
        self.told = Counter[str]()
        """How often each waiter heard of a change, by path."""
        self.all = [self.add(concurrency) for _ in range(runners)]

    @property
    def runner(self) -> Runner:
        return self.all[0]

    def add(self, concurrency: int = 4) -> Runner:
        return self.runners.add("r", [NS], concurrency)

    def ask(self, path: str, start: int = 0, *, wait_s: float = 10.0, priority: int = 0) -> Waiter:
        keys, entries = run_of(path, start)
        return self.queue.submit(
            NS, keys, entries, deadline_s=self.clock() + wait_s, priority=priority,
            on_change=lambda: self.told.update([path]),
        )  # fmt: skip

    def take(self, runner: Runner | None = None) -> Job | None:
        return self.queue.take(runner or self.runner, lambda job: LONG_S)

    def taken(self, runner: Runner | None = None) -> Job:
        job = self.take(runner)
        assert job is not None
        return job

    def seal(self, job: Job, n: int) -> int:
        assert job.runner is not None
        return self.queue.progress(job.runner, job.job_id, n)

    def pass_s(self, seconds: float) -> list[Job]:
        """Let time pass as for a daemon that is alive; the jobs that were late."""
        late = []
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            late += self.queue.tick()
        return late

    def end(self, job: Job, reason: str = "") -> None:
        assert job.runner is not None
        self.queue.end(job.runner, job.job_id, reason)


def outcome(waiter: Waiter) -> tuple[int, str | None]:
    """How many of its blobs are made, and how it ended."""
    return waiter.n_sealed, waiter.reason


@pytest.fixture
def q() -> Queue:
    return Queue()


def test_without_a_runner_nobody_waits() -> None:
    q = Queue(runners=0)
    assert q.ask("ab").reason == "no_runner"
    assert len(q.queue) == 0


def test_consecutive_blobs_are_one_job(q: Queue) -> None:
    waiter = q.ask("abcd", 1)
    job = q.taken()
    assert job.keys == run_of("abcd", 1)[0]
    assert q.seal(job, 2) == 3
    assert outcome(waiter) == (2, None)
    q.seal(job, 3)
    assert outcome(waiter) == (3, "")
    q.end(job)
    assert len(q.queue) == 0


def test_many_who_want_the_same_have_one_job(q: Queue) -> None:
    waiters = [q.ask("abc") for _ in range(32)]
    job = q.taken()
    assert q.take() is None
    waiters += [q.ask("abc") for _ in range(32)]
    assert q.take() is None
    q.seal(job, 3)
    q.end(job)
    assert {waiter.reason for waiter in waiters} == {""}


def test_who_wants_more_of_a_queued_run_makes_it_longer(q: Queue) -> None:
    first, longer = q.ask("ab"), q.ask("abcd")
    job = q.taken()
    assert job.keys == run_of("abcd")[0]
    q.seal(job, 2)
    assert (first.reason, longer.reason) == ("", None)


def test_what_continues_a_running_job_comes_after_it(q: Queue) -> None:
    q.ask("ab")
    job = q.taken()
    longer = q.ask("abcd")
    assert q.take() is None  # what it continues is not there yet
    q.seal(job, 2)
    after = q.taken()
    assert after.keys == run_of("abcd", 2)[0]
    q.seal(after, 2)
    assert longer.reason == ""


def test_a_branch_waits_for_the_blob_that_it_leaves(q: Queue) -> None:
    q.ask("abcd")
    job = q.taken()
    branch = q.ask("abxy")
    q.seal(job, 1)
    assert q.take() is None
    q.seal(job, 2)
    other = q.taken()
    assert other.keys == run_of("abxy", 2)[0]
    q.seal(other, 2)
    assert branch.reason == ""


def test_a_suffix_joins_in_the_middle(q: Queue) -> None:
    q.ask("abcd")
    suffix = q.ask("abcd", 2)
    job = q.taken()
    assert q.take() is None
    q.seal(job, 3)
    assert (suffix.n_sealed, suffix.reason) == (1, None)
    q.seal(job, 4)
    assert suffix.reason == ""


def test_a_gap_above_is_filled_before(q: Queue) -> None:
    lower = q.ask("abcd", 2)
    whole = q.ask("abcd")
    above = q.taken()
    assert above.keys == run_of("ab")[0]
    assert q.take() is None
    q.seal(above, 2)
    q.seal(q.taken(), 2)
    assert (lower.reason, whole.reason, whole.n_sealed) == ("", "", 4)


def test_keys_that_name_each_other_as_parents_wait_for_no_end(q: Queue) -> None:
    first, second = entry_of("x"), entry_of("y")
    pairs = [("x", replace(first, parent=key_of("y"))), ("y", replace(second, parent=key_of("x")))]
    q.ask("k")
    above = q.taken()
    q.ask("kx")  # not to be made longer, as what it continues runs
    waiters = [
        q.queue.submit(NS, [key_of(path)], [entry], deadline_s=1.0, on_change=lambda: None)
        for path, entry in pairs
    ]
    q.seal(above, 1)
    while (job := q.take()) is not None:
        q.seal(job, len(job.keys))
        q.end(job)
    assert [waiter.reason for waiter in waiters] == ["", ""]
    assert len(q.queue) == 0 or q.queue.jobs() == [above]


def test_priority_goes_first_then_the_deadline(q: Queue) -> None:
    q.ask("a", wait_s=5.0)
    q.ask("b", wait_s=1.0)
    q.ask("c", wait_s=9.0, priority=1)
    assert [q.taken().keys[0] for _ in range(3)] == [key_of("c"), key_of("b"), key_of("a")]


def test_a_runner_has_no_more_than_its_concurrency() -> None:
    q = Queue(concurrency=2)
    for path in "abc":
        q.ask(path)
    job, _ = q.taken(), q.taken()
    assert q.take() is None
    q.seal(job, 1)
    q.end(job)
    assert q.take() is not None


def test_other_namespaces_are_not_its_business(q: Queue) -> None:
    q.ask("a")
    stranger = q.runners.add("s", [b"another"], 1)
    assert q.take(stranger) is None


def test_jobs_are_bounded() -> None:
    q = Queue(jobs_max=2)
    q.ask("a")
    running = q.taken()
    waiter = q.ask("abc")
    refused = q.ask("xyz")
    assert (waiter.reason, refused.reason) == (None, "busy")
    q.seal(running, 1)
    q.end(running)
    assert q.ask("xyz").reason is None


def test_what_is_too_many_cuts_only_the_end() -> None:
    q = Queue(jobs_max=1)
    q.ask("ab")
    job = q.taken()
    waiter = q.ask("abc")
    assert waiter.reason is None
    q.seal(job, 2)
    assert outcome(waiter) == (2, "busy")


@pytest.mark.parametrize(
    ("bound", "most"), [("JOB_BLOBS_MAX", 3), ("JOB_TOKENS_MAX", 3 * TOKENS), ("JOB_TOKENS_MAX", 1)]
)
def test_long_runs_are_several_jobs(
    bound: str, most: int, q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild_map, bound, most)
    waiters = [q.ask("abcd"), q.ask("abcdefgh")]
    sizes = []
    while (job := q.take()) is not None:
        sizes.append(len(job.keys))
        q.seal(job, len(job.keys))
        q.end(job)
    assert sizes == ([1] * 8 if most == 1 else [3, 3, 2])
    assert {waiter.reason for waiter in waiters} == {""}


def test_a_queued_job_that_nobody_wants_is_forgotten(q: Queue) -> None:
    first, second = q.ask("ab"), q.ask("ab")
    q.queue.leave(first)
    assert len(q.queue) == 1
    q.queue.leave(second)
    assert (len(q.queue), second.reason) == (0, "cancelled")


def test_cancelling_the_first_of_many_strands_nobody(q: Queue) -> None:
    first, *others = [q.ask("ab") for _ in range(8)]
    job = q.taken()
    q.queue.leave(first, cancelled=True)
    assert q.seal(job, 1) == 2
    q.seal(job, 2)
    assert {waiter.reason for waiter in others} == {""}


def test_when_the_last_has_cancelled_the_runner_may_stop(q: Queue) -> None:
    waiters = [q.ask("abc"), q.ask("abc")]
    job = q.taken()
    q.seal(job, 1)
    for waiter in waiters:
        q.queue.leave(waiter, cancelled=True)
    assert q.seal(job, 1) == 1


def test_whoever_runs_out_of_time_leaves_the_job_running(q: Queue) -> None:
    waiter = q.ask("abc")
    job = q.taken()
    q.queue.leave(waiter)
    assert q.seal(job, 1) == 3
    q.seal(job, 3)
    q.end(job)
    assert len(q.queue) == 0


def test_what_is_not_wanted_any_more_is_not_made(q: Queue) -> None:
    waiter, short = q.ask("abcd"), q.ask("ab")
    job = q.taken()
    q.queue.stop_at(waiter, 3)
    assert q.seal(job, 1) == 3
    again = q.ask("abcd")  # the runner has been told to stop
    q.seal(job, 3)
    assert (waiter.reason, short.reason, again.reason) == ("", "", None)
    q.end(job)
    last = q.taken()
    assert last.keys == [key_of("abcd")]
    q.seal(last, 1)
    assert again.reason == ""


def test_a_runner_that_fails_is_followed_by_another() -> None:
    q = Queue(runners=2)
    waiter = q.ask("abc")
    job = q.taken(q.all[0])
    q.seal(job, 1)
    q.end(job, "failed")
    assert waiter.reason is None
    assert q.take(q.all[0]) is None
    assert q.taken(q.all[1]) is job
    assert (job.base, job.keys[job.base :]) == (1, run_of("abc", 1)[0])
    assert q.seal(job, 2) == 2  # of those that it was given
    assert outcome(waiter) == (3, "")


def test_where_there_is_no_other_the_failure_is_told(q: Queue) -> None:
    waiter = q.ask("abc")
    q.end(q.taken(), "failed")
    assert waiter.reason == "failed"


def test_who_says_done_before_all_is_sealed_has_failed(q: Queue) -> None:
    waiter = q.ask("abc")
    job = q.taken()
    q.seal(job, 2)
    q.end(job)
    assert outcome(waiter) == (2, "incomplete")


def test_what_nobody_wants_any_more_cannot_fail(q: Queue) -> None:
    waiter = q.ask("abc")
    job = q.taken()
    q.queue.leave(waiter, cancelled=True)
    q.end(job, "failed")
    assert (len(q.queue), q.runner.able) == (0, True)


def test_what_is_sealed_is_known_before_the_runner_says_so(q: Queue) -> None:
    waiter = q.ask("abc")
    job = q.taken()
    q.queue.stop_at(waiter, 1)
    q.queue.sealed(job, 1)
    assert waiter.reason == ""
    assert len(job.keys) == 3  # the runner has not been told to stop
    assert q.seal(job, 1) == 1


def test_a_job_is_tried_a_few_times_only() -> None:
    q = Queue(runners=TRIES_MAX + 1)
    waiter = q.ask("a")
    for runner in q.all[:TRIES_MAX]:
        q.end(q.taken(runner), "failed")
    assert waiter.reason == "failed"


def test_a_runner_that_failed_rests(q: Queue) -> None:
    q.ask("a")
    q.end(q.taken(), "failed")
    q.ask("b")
    assert q.take() is None
    q.clock.advance(10.0)
    assert q.take() is not None


def test_a_silent_runner_is_late_and_its_slot_stays_taken() -> None:
    q = Queue(runners=2, concurrency=1)
    waiter = q.ask("ab")
    job = q.taken(q.all[0])
    assert q.pass_s(SILENT_S - 1.0) == []
    q.seal(job, 1)
    assert q.pass_s(SILENT_S - 1.0) == []
    assert q.pass_s(2.0) == [job]
    assert q.all[0].silent
    assert q.taken(q.all[1]) is job
    assert q.queue.progress(q.all[0], job.job_id, 2) == 0  # it woke up, and is told to stop
    assert not q.all[0].silent
    q.clock.advance(10.0)
    q.ask("x")
    assert q.take(q.all[0]) is None
    q.queue.end(q.all[0], job.job_id, "")
    assert q.take(q.all[0]) is not None
    q.seal(job, 1)
    assert waiter.reason == ""


def test_a_stall_of_the_daemon_makes_no_runner_late(q: Queue) -> None:
    q.ask("ab")
    job = q.taken()
    q.clock.advance(100.0)
    assert q.queue.tick() == []
    q.seal(job, 1)  # what it said meanwhile is heard only now
    assert q.pass_s(SILENT_S - 1.0) == []


def test_a_job_has_a_limit_whatever_its_runner_says(q: Queue) -> None:
    waiter = q.ask("ab")
    job = q.taken()
    for _ in range(int(LONG_S / SILENT_S) + 1):
        q.clock.advance(SILENT_S)
        q.seal(job, 1)
    q.queue.tick()
    assert waiter.reason == "late"


def test_a_runner_that_is_gone_gives_back_its_jobs() -> None:
    q = Queue(runners=2)
    waiter = q.ask("ab")
    q.taken(q.all[0])
    q.runners.remove(q.all[0])
    q.queue.runner_gone(q.all[0])
    q.taken(q.all[1])
    q.runners.remove(q.all[1])
    q.queue.runner_gone(q.all[1])
    assert waiter.reason == "runner_gone"


def test_without_runners_what_is_queued_ends(q: Queue) -> None:
    waiter = q.ask("ab")
    q.runners.remove(q.runner)
    q.queue.runner_gone(q.runner)
    assert (waiter.reason, len(q.queue)) == ("no_runner", 0)


def test_what_was_to_be_continued_is_made_first(q: Queue) -> None:
    waiter = q.ask("abcd", 2)
    job = q.taken()
    keys, entries = run_of("ab")
    assert q.queue.begin_further_up(job, keys, entries)
    assert q.taken() is job
    assert job.keys == run_of("abcd")[0]
    q.seal(job, 3)
    assert outcome(waiter) == (1, None)
    q.seal(job, 4)
    assert waiter.reason == ""


def test_what_another_job_makes_already_is_waited_for(q: Queue) -> None:
    q.ask("ab")
    above = q.taken()
    q.ask("abcd", 3)
    job = q.taken()
    assert q.queue.begin_further_up(job, *run_of("abc"))
    assert job.keys == run_of("abcd", 2)[0]
    assert q.take() is None
    q.seal(above, 2)
    assert q.taken() is job


def test_going_further_up_is_bounded(q: Queue) -> None:
    waiter = q.ask("abcdef", 5)
    path = "abcde"
    for _ in range(REMADE_MAX):
        job = q.taken()
        assert q.queue.begin_further_up(job, [key_of(path)], [entry_of(path)])
        path = path[:-1]
    job = q.taken()
    assert not q.queue.begin_further_up(job, [key_of(path)], [entry_of(path)])
    q.queue.drop(job, "nested")
    assert waiter.reason == "nested"


def test_what_follows_a_job_that_failed_fails_as_well(q: Queue) -> None:
    q.ask("ab")
    job = q.taken()
    longer, branch = q.ask("abcd"), q.ask("abx")
    q.end(job, "failed")
    assert (longer.reason, branch.reason, len(q.queue)) == ("failed", "failed", 0)


def test_hundreds_of_jobs_that_follow_each_other_end_together() -> None:
    q = Queue(jobs_max=10_000)
    path, waiters = "a", [q.ask("a")]
    job = q.taken()
    for _ in range(500):  # each leaves the one before in its middle
        waiters.append(q.ask(path + "xy", len(path)))
        path += "x"
        waiters.append(q.ask(path + "z", len(path)))
        path += "z"
    q.end(job, "failed")
    assert {waiter.reason for waiter in waiters} == {"failed"}
    assert len(q.queue) == 0


def test_after_a_stall_jobs_do_not_come_all_at_once() -> None:
    q = Queue(concurrency=256, jobs_max=1000)
    for n in range(200):
        q.ask(chr(0x100 + n), wait_s=1000.0)
    q.clock.advance(100.0)
    given = 0
    while q.take() is not None:
        given += 1
    assert given == BURST_JOBS
    q.clock.advance(10 / JOBS_PER_S)
    while q.take() is not None:
        given += 1
    assert given == BURST_JOBS + 10


def test_a_job_that_could_not_be_told_goes_back(q: Queue) -> None:
    q.ask("ab")
    job = q.taken()
    q.queue.put_back(job)
    assert q.runner.running == set()
    assert q.taken() is job


def test_all_are_told_of_changes(q: Queue) -> None:
    q.ask("ab")
    job = q.taken()
    before = q.told["ab"]
    q.seal(job, 1)
    assert q.told["ab"] == before + 1
    q.seal(job, 1)
    assert q.told["ab"] == before + 1


class TestTextBytes:
    """What jobs hold in memory is counted, and bounded."""

    ONE_BYTES = entry_of("a").memory_bytes

    def test_it_is_given_back_however_jobs_end(self, q: Queue) -> None:
        made, cut, dropped = q.ask("abcd"), q.ask("xyz"), q.ask("uv")
        assert q.queue.text_bytes == 9 * self.ONE_BYTES
        job = q.taken()
        q.seal(job, 4)
        q.end(job)
        assert (made.reason, q.queue.text_bytes) == ("", 5 * self.ONE_BYTES)
        q.queue.stop_at(cut, 1)
        job = q.taken()
        assert (len(job.keys), q.queue.text_bytes) == (1, 3 * self.ONE_BYTES)
        assert q.queue.begin_further_up(job, *run_of("w"))
        assert q.queue.text_bytes == 4 * self.ONE_BYTES
        q.queue.leave(cut, cancelled=True)
        q.queue.leave(dropped, cancelled=True)
        assert (len(q.queue), q.queue.text_bytes) == (0, 0)

    def test_with_too_much_of_it_there_are_no_new_jobs(
        self, q: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rebuild_queue, "TEXT_BYTES_MAX", 3 * self.ONE_BYTES)
        first = q.ask("abc")
        assert q.ask("xy").reason == "busy"
        longer = q.ask("abcde")  # it has its blobs that are made already
        job = q.taken()
        q.seal(job, 3)
        assert (outcome(first), outcome(longer)) == ((3, ""), (3, "busy"))
        q.end(job)
        assert q.ask("xy").reason is None

    def test_many_who_wait_for_one_job_hold_no_more_than_one(self, q: Queue) -> None:
        for _ in range(32):
            q.ask("abc")
        assert q.queue.text_bytes == 3 * self.ONE_BYTES
