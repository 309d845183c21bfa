"""Jobs of a tier: each ends, and is told of once, whatever happens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest

from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.request_params import RequestParams
from blobstore.clients.vllm.tier_chunks import Chunk
from blobstore.clients.vllm.tier_jobs import JOBS_MAX, LOAD_THREADS, LOOKUPS_MAX, Finished, TierJobs
from tests.support.polling import poll_until

JOIN_S = 20.0
CHUNKS = [Chunk(bytes([n]) * 36, n) for n in range(3)]
KEYS = tuple(chunk.key for chunk in CHUNKS)
NO_PARAMS = RequestParams()


class SlowStore:
    """Does what it is asked when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lookup_gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.done: Sequence[bytes] = KEYS
        self.stopping = False
        self.error: Exception | None = None

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        self._wait(self.lookup_gate)
        return [True] * len(keys)

    def load(self, chunks: Sequence[Chunk], params: RequestParams) -> Sequence[bytes]:
        if self.stopping:
            return []
        self._wait(self.gate)
        return self.done

    save = load

    def _wait(self, gate: threading.Event) -> None:
        self.entered.release()
        assert gate.wait(JOIN_S)
        if self.error is not None:
            raise self.error


class Bench:
    """Jobs over a slow store."""

    def __init__(self) -> None:
        self.store = SlowStore()
        self.recorder = Recorder()
        self.answers: list[tuple[list[bytes], Sequence[bool]]] = []
        self.jobs = TierJobs(
            self.store,  # type: ignore[arg-type]
            self.recorder,
            lambda keys, held: self.answers.append((keys, held)),
        )

    def ended(self, n: int) -> list[Finished]:
        ended: list[Finished] = []

        def all_there() -> bool:
            ended.extend(self.jobs.finished())
            return len(ended) >= n

        poll_until(all_there, JOIN_S)
        assert len(ended) == n
        return sorted(ended, key=lambda finished: finished.job_id)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.store.gate.set()
    bench.store.lookup_gate.set()
    assert bench.jobs.close(JOIN_S)


def test_jobs_are_told_of_when_they_have_ended(bench: Bench) -> None:
    bench.jobs.load(1, CHUNKS, NO_PARAMS)
    bench.jobs.save(2, CHUNKS, NO_PARAMS)
    assert bench.jobs.finished() == []
    bench.store.gate.set()
    load, save = bench.ended(2)
    assert (load.job_id, load.is_load, load.done, load.failed) == (1, True, KEYS, ())
    assert (save.job_id, save.is_load, save.done, save.failed) == (2, False, KEYS, ())


def test_what_could_not_be_had_is_named(bench: Bench) -> None:
    bench.store.done = KEYS[1:]
    bench.store.gate.set()
    bench.jobs.load(1, CHUNKS, NO_PARAMS)
    (load,) = bench.ended(1)
    assert load.done == KEYS[1:]
    assert load.failed == KEYS[:1]


def test_questions_are_answered_beside_long_loads_and_saves(bench: Bench) -> None:
    for job_id in range(LOAD_THREADS):
        bench.jobs.load(job_id, CHUNKS, NO_PARAMS)
    bench.jobs.save(9, CHUNKS, NO_PARAMS)
    bench.store.lookup_gate.set()
    assert bench.jobs.ask([KEYS[0]])
    poll_until(lambda: bench.answers, JOIN_S)
    assert bench.answers == [([KEYS[0]], [True])]


def test_what_should_not_be_stored_ends_at_once(bench: Bench) -> None:
    bench.jobs.save(1, CHUNKS, RequestParams(no_store=True))
    (save,) = bench.ended(1)
    assert save.done == KEYS
    assert not bench.store.entered.acquire(blocking=False)


def test_a_fault_of_ours_ends_the_job_as_failed(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.error = RuntimeError("a fault of ours")
    bench.store.gate.set()
    with caplog.at_level(logging.ERROR):
        bench.jobs.load(1, CHUNKS, NO_PARAMS)
        (load,) = bench.ended(1)
        poll_until(lambda: "a fault of ours" in caplog.text, JOIN_S)
    assert load.failed == KEYS
    bench.store.error = None
    bench.jobs.load(2, CHUNKS, NO_PARAMS)
    assert bench.ended(1)[0].done == KEYS


def test_queues_are_bounded_and_what_is_refused_fails_at_once(bench: Bench) -> None:
    for job_id in range(LOAD_THREADS):
        bench.jobs.load(job_id, CHUNKS, NO_PARAMS)
    for _ in range(LOAD_THREADS):
        assert bench.store.entered.acquire(timeout=JOIN_S)
    for job_id in range(LOAD_THREADS, LOAD_THREADS + JOBS_MAX):
        bench.jobs.load(job_id, CHUNKS, NO_PARAMS)
    assert bench.jobs.finished() == []
    bench.jobs.load(999, CHUNKS, NO_PARAMS)
    (refused,) = bench.jobs.finished()
    assert refused == Finished(999, True, (), KEYS, 0.0)
    assert bench.recorder.take() == {"misses": {"busy": 3}}
    assert bench.jobs.ask([KEYS[0]])
    assert bench.store.entered.acquire(timeout=JOIN_S)
    assert [bench.jobs.ask([KEYS[0]]) for _ in range(LOOKUPS_MAX)] == [True] * LOOKUPS_MAX
    assert not bench.jobs.ask([KEYS[0]])
    bench.store.gate.set()
    assert len(bench.ended(LOAD_THREADS + JOBS_MAX)) == LOAD_THREADS + JOBS_MAX


def test_drained_is_when_nothing_touches_the_rows_and_what_waits_has_failed(bench: Bench) -> None:
    bench.jobs.save(1, CHUNKS, NO_PARAMS)
    assert bench.store.entered.acquire(timeout=JOIN_S)
    bench.jobs.save(2, CHUNKS, NO_PARAMS)
    drained = threading.Thread(target=bench.jobs.drain, args=[JOIN_S])
    drained.start()
    poll_until(lambda: bench.store.stopping, JOIN_S)
    assert drained.is_alive()
    bench.store.gate.set()
    drained.join(JOIN_S)
    assert not drained.is_alive()
    one, two = bench.ended(2)
    assert (one.done, two.failed) == (KEYS, KEYS)
    bench.jobs.save(3, CHUNKS, NO_PARAMS)
    assert bench.ended(1)[0].done == KEYS


def test_nothing_to_drain_is_no_wait(bench: Bench) -> None:
    assert bench.jobs.drain(0.0) == 0
    assert bench.jobs.finished() == []


def test_what_does_not_end_is_not_waited_for_for_ever(bench: Bench) -> None:
    bench.jobs.save(1, CHUNKS, NO_PARAMS)
    bench.jobs.load(2, CHUNKS, NO_PARAMS)
    for _ in range(2):
        assert bench.store.entered.acquire(timeout=JOIN_S)
    assert bench.jobs.drain(0.0) == 2
    assert not bench.store.stopping
    bench.store.gate.set()
    assert [job.done for job in bench.ended(2)] == [KEYS, KEYS]
