"""Fits beside the work: one at a time, seldom, and harmless when they fail."""

from __future__ import annotations

import os
import threading
import time

import pytest

from blobstore.tiering.training import Training
from tests.support.polling import poll_until


class _Gate:
    """A fit that takes until it is let through."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()

    def fit(self) -> str:
        self.started.set()
        self.may_end.wait()
        return threading.current_thread().name


def _collected(training: Training[str]) -> str:
    found: list[str] = []

    def collect() -> bool:
        result = training.collect()
        if result is not None:
            found.append(result)
        return bool(found)

    poll_until(collect)
    return found[0]


def test_a_fit_runs_on_another_thread_while_nobody_waits() -> None:
    training: Training[str] = Training()
    gate = _Gate()
    training.start(gate.fit, 0.0)
    gate.started.wait()
    assert training.collect() is None
    assert not training.may_start(1e9)
    gate.may_end.set()
    assert _collected(training).startswith("blobstore-fit")
    assert training.collect() is None
    assert training.n_fits == 1
    training.close()
    training.close()


def test_the_thread_yields_to_all_others_and_they_keep_their_priority() -> None:
    training: Training[int] = Training()
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    nice = training.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert nice == max(before, 5)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    training.close()


def test_a_fit_is_followed_by_a_pause_that_spreads_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 102.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    training: Training[str] = Training()
    training.start(lambda: "fit", 1000.0)
    assert _collected(training) == "fit"
    assert training.cpu_s == training.last_cpu_s == 2.0
    assert not training.may_start(1039.9)
    assert training.may_start(1040.0)
    training.close()


def test_a_pause_outlives_no_clock_that_jumps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 102.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    training: Training[str] = Training()
    training.start(lambda: "fit", 1e6)
    _collected(training)
    assert not training.may_start(5.0)
    assert training.may_start(45.0)
    training.close()


def test_a_fit_that_fails_is_logged_and_tried_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training: Training[str] = Training(inline=True)
    training.start(lambda: str(1 // 0), 0.0)
    assert training.collect() is None
    assert training.n_failed == 1
    assert training.n_fits == 0
    assert "a fit of the tiering model failed" in caplog.text
    assert not training.may_start(59.0)
    assert training.may_start(60.0)


def test_a_fit_that_fails_after_long_is_followed_by_its_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 110.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    training: Training[str] = Training()
    training.start(lambda: str(1 // 0), 1000.0)
    poll_until(lambda: training.collect() is None and training.n_failed == 1)
    assert training.cpu_s == 10.0
    assert not training.may_start(1199.9)
    assert training.may_start(1200.0)
    training.close()


def test_an_inline_fit_runs_at_once_and_without_a_pause() -> None:
    training: Training[str] = Training(inline=True)
    training.start(lambda: threading.current_thread().name, 0.0)
    assert training.collect() == threading.current_thread().name
    assert training.may_start(0.0)
    assert training.cpu_s >= 0
