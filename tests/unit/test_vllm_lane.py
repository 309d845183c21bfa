"""Background threads for what must not hold up the engine."""

from __future__ import annotations

import os
import threading

import pytest

from blobstore.clients.vllm.lane import Lane, launch_cores


def test_a_lane_runs_jobs_in_order_and_refuses_too_many() -> None:
    lane, go, ran = Lane("test", waiting_max=2), threading.Event(), list[int]()
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert go.wait(10.0)

    assert lane.post(first)
    assert begun.wait(10.0)
    assert [lane.post(lambda n=n: ran.append(n)) for n in range(3)] == [True, True, False]  # type: ignore[misc]
    assert not lane.close(0.0)
    assert not lane.post(lambda: None)
    go.set()
    assert lane.close(10.0)
    assert ran == [0, 1]


def test_a_job_that_raises_does_not_end_its_lane(caplog: pytest.LogCaptureFixture) -> None:
    lane, ran = Lane("test"), threading.Event()

    def fails() -> None:
        raise RuntimeError("no luck")

    lane.post(fails)
    lane.post(ran.set)
    assert ran.wait(10.0)
    assert "no luck" in caplog.text
    lane.close(5.0)


def test_threads_run_where_the_lane_is_spread_to() -> None:
    cores = os.sched_getaffinity(0)
    for wanted in ({min(cores)}, cores):
        lane, together, found = Lane("test", threads=2), threading.Barrier(2), list[set[int]]()

        def look(together: threading.Barrier = together, found: list[set[int]] = found) -> None:
            together.wait(10.0)  # so that each thread runs one
            found.append(os.sched_getaffinity(0))

        lane.spread(wanted)
        lane.post(look)
        lane.post(look)
        assert lane.close(10.0)
        assert found == [wanted, wanted]


def test_cores_that_there_are_not_leave_a_lane_where_it_is() -> None:
    lane, found = Lane("test"), list[set[int]]()
    lane.spread({1 << 14})
    lane.post(lambda: found.append(os.sched_getaffinity(0)))
    assert lane.close(10.0)
    assert found == [os.sched_getaffinity(0)]


def test_a_bound_thread_knows_the_cores_of_who_started_the_process() -> None:
    cores, found = os.sched_getaffinity(0), list[set[int]]()

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores)})  # this thread alone
        found.append(launch_cores())

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join(10.0)
    assert found == [{min(cores)} | os.sched_getaffinity(os.getppid())]
