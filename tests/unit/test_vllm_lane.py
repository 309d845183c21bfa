"""Background threads for what must not hold up the engine."""

from __future__ import annotations

import threading

import pytest

from blobstore.clients.vllm.lane import Lane


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
