"""Bytes on their way into DRAM, readable piece by piece before they are all there.

One shape for all sources: a load from SSD marks pieces as they pass their
digests, a writer marks parts as it seals them. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Fill:
    """Progress of one blob, in units that end at the offsets `ends`."""

    __slots__ = ("_ends", "_ready", "_waiters", "failure", "finished")

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._ready = bytearray(len(ends))
        self._waiters: list[asyncio.Future[None]] = []
        self.finished = False
        self.failure = ""
        """Why the bytes will not come; empty while they may."""

    def mark(self, first: int, last: int) -> None:
        """Units `first` to `last` (exclusive) are readable."""
        self._ready[first:last] = bytes((1,)) * (last - first)
        self._wake()

    def finish(self) -> None:
        """All bytes are readable."""
        self.finished = True
        self._wake()

    def fail(self, reason: str) -> None:
        """No more bytes will come; what was marked stays readable to those who wait for it."""
        self.failure = self.failure or reason
        self._wake()

    @property
    def ended(self) -> bool:
        """No more will happen: it has finished or failed."""
        return self.finished or bool(self.failure)

    def is_ready(self, start: int, end: int) -> bool:
        """Bytes `start` to `end` are readable."""
        if self.finished or start >= end:
            return True
        first = bisect_right(self._ends, start)
        last = bisect_left(self._ends, end) + 1
        return all(self._ready[first:last])

    async def wait(self, start: int, end: int) -> str:
        """Wait until the bytes are readable ("") or will not come (the reason).

        The caller bounds the wait; cancelling it is safe.
        """
        while not self.is_ready(start, end):
            if self.failure:
                return self.failure
            await self._wait_wake()
        return ""

    async def wait_end(self) -> None:
        """Wait until the fill has finished or failed; the caller bounds the wait."""
        while not self.ended:
            await self._wait_wake()

    async def _wait_wake(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
