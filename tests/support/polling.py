"""Waiting for a state instead of sleeping for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERVAL_S = 0.002


def wait_s(seconds: float) -> None:
    """Let time pass, where the passing of time is what is tested (a random moment, idleness)."""
    time.sleep(seconds)


def poll_until(condition: Callable[[], T], deadline_s: float = 5.0, what: str = "") -> T:
    """The first true value of `condition`; AssertionError if none comes in `deadline_s`.

    `condition` is always asked once more at the deadline.
    """
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, _complaint(condition, deadline_s, what)
        time.sleep(INTERVAL_S)
    return value


async def poll_until_async(
    condition: Callable[[], T], deadline_s: float = 5.0, what: str = ""
) -> T:
    """`poll_until` for a condition that the running loop must bring about."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, _complaint(condition, deadline_s, what)
        await asyncio.sleep(INTERVAL_S)
    return value


def _complaint(condition: Callable[[], object], deadline_s: float, what: str) -> str:
    return f"not within {deadline_s} s: {what or getattr(condition, '__qualname__', condition)}"
