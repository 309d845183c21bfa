"""Waiting for something scarce: first come, first served, each until its deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from blobstore.errors import Busy


class Turns:
    """A queue in which only the first may try. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float], waiting_max: int) -> None:
        self._clock = clock
        self._waiting_max = waiting_max
        self._queue: deque[_Turn] = deque()
        self.waited = 0
        """How many have had to wait so far."""

    def __len__(self) -> int:
        return len(self._queue)

    async def wait(self, attempt: Callable[[], bool], deadline_s: float) -> bool:
        """Try at once unless others wait, then whenever it is one's turn; False: time is up.

        Raises Busy if too many wait already. Cancelling it is safe.
        """
        if not self._queue and attempt():
            return True
        if deadline_s <= self._clock():
            return False
        if len(self._queue) >= self._waiting_max:
            raise Busy(f"{len(self._queue)} wait for room already, the most that may")
        turn = _Turn()
        self._queue.append(turn)
        self.waited += 1
        try:
            while (remaining_s := deadline_s - self._clock()) > 0:
                await turn.sleep(remaining_s)
                if self._queue[0] is turn and attempt():
                    return True
            return False
        finally:
            self._queue.remove(turn)
            self.notify()

    def notify(self) -> None:
        """Something may have come: let the first who waits try."""
        if self._queue:
            self._queue[0].wake()


class _Turn:
    __slots__ = ("_woken",)

    def __init__(self) -> None:
        self._woken: asyncio.Future[None] | None = None

    async def sleep(self, timeout_s: float) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._woken], timeout=timeout_s)

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
