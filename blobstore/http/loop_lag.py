"""How late the event loop wakes: what a request waits before anything is done for it.

A loop that stood still for a second missed twenty wakes, and each would have been late:
they are counted as such, so that the p99 is that of requests which come at any moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from blobstore.latencies import Histogram

INTERVAL_S = 0.05
"""Twenty wakes a second cost about a thousandth of a core."""
WINDOW = 1200
"""Wakes that `max_s` and `p99_s` look back on: a minute."""


class LoopLag:
    """Sleeps again and again and measures how much later than asked it was woken."""

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        window: int = WINDOW,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._window = window
        self._recent: deque[float] = deque(maxlen=window)
        self._task: asyncio.Task[None] | None = None
        self.histogram = Histogram()
        """All wakes since the start."""

    @property
    def last_s(self) -> float:
        """How late the last wake was."""
        return self._recent[-1] if self._recent else 0.0

    @property
    def max_s(self) -> float:
        """The latest wake of the window."""
        return max(self._recent, default=0.0)

    @property
    def p99_s(self) -> float:
        """What 99 of 100 wakes of the window did not exceed."""
        ordered = sorted(self._recent)
        return ordered[max(-(-len(ordered) * 99 // 100) - 1, 0)] if ordered else 0.0

    def start(self) -> None:
        """Begin to measure, on the running loop."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._measure_forever())

    async def close(self) -> None:
        """Stop; what was measured stays readable. Again is harmless."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _measure_forever(self) -> None:
        while True:
            due_s = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            self._note(max(self._clock() - due_s, 0.0))

    def _note(self, late_s: float) -> None:
        missed = min(int(late_s / self._interval_s), self._window - 1)
        for number in range(missed, -1, -1):  # the latest last
            one_s = late_s - number * self._interval_s
            self._recent.append(one_s)
            self.histogram.add(one_s)
