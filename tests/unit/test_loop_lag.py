from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from blobstore.http.loop_lag import LoopLag
from tests.support.clock import FakeClock
from tests.support.polling import poll_until_async

INTERVAL_S = 0.05


class LateSleep:
    """Wakes as much too late as the list says, then never again."""

    def __init__(self, clock: FakeClock, late_s: Iterable[float]) -> None:
        self.clock = clock
        self.late_s = iter(late_s)
        self.over = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        late_s = next(self.late_s, None)
        if late_s is None:
            self.over.set()
            await asyncio.get_running_loop().create_future()
        else:
            self.clock.advance(seconds + late_s)


async def measured(late_s: Iterable[float], window: int = 100) -> LoopLag:
    clock = FakeClock()
    sleep = LateSleep(clock, late_s)
    lag = LoopLag(INTERVAL_S, window, clock=clock, sleep=sleep)
    lag.start()
    await sleep.over.wait()
    await lag.close()
    return lag


async def test_before_anything_was_measured_there_is_no_lag() -> None:
    lag = LoopLag()
    assert (lag.last_s, lag.max_s, lag.p99_s, lag.histogram.count) == (0.0, 0.0, 0.0, 0)


async def test_what_has_left_the_window_counts_no_more() -> None:
    lag = await measured([0.04, *[0.001] * 9, 0.002], window=10)
    assert lag.last_s == pytest.approx(0.002)
    assert lag.max_s == pytest.approx(0.002)
    assert lag.histogram.longest_s == pytest.approx(0.04)


async def test_p99_of_a_hundred_is_exceeded_by_one() -> None:
    lag = await measured([0.03] + [0.001] * 98 + [0.002], window=100)
    assert lag.max_s == pytest.approx(0.03)
    assert lag.p99_s == pytest.approx(0.002)
    assert lag.last_s == pytest.approx(0.002)


async def test_a_stall_counts_for_every_wake_that_it_swallowed() -> None:
    lag = await measured([0.0, 0.21, 0.0])
    assert lag.histogram.count == 7
    assert lag.max_s == pytest.approx(0.21)
    assert lag.histogram.sum_s == pytest.approx(0.01 + 0.06 + 0.11 + 0.16 + 0.21)


async def test_a_stall_of_a_day_costs_no_more_than_the_window() -> None:
    lag = await measured([86_400.0], window=50)
    assert lag.histogram.count == 50
    assert lag.max_s == pytest.approx(86_400.0)


async def test_a_wake_that_is_early_is_not_late() -> None:
    lag = await measured([-0.001])
    assert lag.last_s == 0.0


async def test_a_real_loop_that_is_held_up_is_seen_to_be() -> None:
    lag = LoopLag(0.001)
    lag.start()
    await poll_until_async(lambda: lag.histogram.count >= 3)
    end_s = asyncio.get_running_loop().time() + 0.1
    while asyncio.get_running_loop().time() < end_s:
        pass
    await poll_until_async(lambda: lag.max_s >= 0.05)
    await lag.close()
    await lag.close()
