from __future__ import annotations

import asyncio

import pytest

from blobstore.fill import Fill


def test_nothing_is_ready_at_first_but_empty_ranges() -> None:
    fill = Fill([10, 20, 30])
    assert not fill.is_ready(0, 1)
    assert not fill.is_ready(0, 30)
    assert fill.is_ready(5, 5)


@pytest.mark.parametrize(
    ("start", "end", "ready"),
    [
        (10, 20, True),
        (11, 12, True),
        (9, 20, False),
        (10, 21, False),
        (0, 30, False),
        (20, 20, True),
    ],
)
def test_a_marked_unit_is_ready_to_its_very_ends(start: int, end: int, ready: bool) -> None:
    fill = Fill([10, 20, 30])
    fill.mark(1, 2)
    assert fill.is_ready(start, end) is ready


def test_units_may_come_in_any_order_and_twice() -> None:
    fill = Fill([10, 20, 30])
    for unit in (2, 0, 2, 1):
        fill.mark(unit, unit + 1)
    assert fill.is_ready(0, 30)
    assert not fill.ended


def test_empty_units_do_not_hide_their_neighbours() -> None:
    fill = Fill([0, 10, 10, 20])
    fill.mark(1, 2)
    assert fill.is_ready(0, 10)
    assert not fill.is_ready(0, 11)


async def test_a_waiter_gets_its_range_before_the_rest_has_come() -> None:
    fill = Fill([10, 20])
    waiting = asyncio.create_task(fill.wait(0, 10))
    await asyncio.sleep(0)
    fill.mark(1, 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    fill.mark(0, 1)
    assert await waiting == ""


async def test_a_failure_is_told_to_those_whose_range_has_not_come() -> None:
    fill = Fill([10, 20])
    fill.mark(0, 1)
    waiting = asyncio.create_task(fill.wait(0, 20))
    await asyncio.sleep(0)
    fill.fail("io_error")
    assert await waiting == "io_error"
    assert await fill.wait(0, 10) == ""


async def test_the_first_failure_is_the_one_that_is_told() -> None:
    fill = Fill([10])
    fill.fail("corrupt")
    fill.fail("dropped")
    assert fill.failure == "corrupt"
    assert fill.ended


async def test_finished_means_every_byte() -> None:
    fill = Fill([10, 20])
    waiting = asyncio.create_task(fill.wait_end())
    await asyncio.sleep(0)
    fill.finish()
    await waiting
    assert fill.is_ready(0, 20)


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    fill = Fill([10])
    waiting = asyncio.create_task(fill.wait(0, 10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert fill._waiters == []
    fill.mark(0, 1)
