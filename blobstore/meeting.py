"""One run of blobs from two sides: a runner makes them from the front, loads come from the back.

A load is begun only if it is expected to be over before the runner would have made the
same blob, so that the faster side is never kept waiting for the slower one. Used on the
event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from blobstore.index import Record
from blobstore.loader import Loader
from blobstore.units import MIB
from blobstore.wanted import Wanted

if TYPE_CHECKING:
    from blobstore.rebuild_wait import Wait

SHARE = 8
"""Of what lies between the two sides this part is loaded at once, at least a blob."""

BATCH_BYTES_MAX = 32 * MIB

OVERDUE = 2.0
"""Times what a blob takes the runner, after which it is not counted on any more."""

LOOK_S = 0.05
"""At the latest after so long it is looked anew at how both sides do."""


class Meeting:
    """Brings `records`, which are on SSD alone, back from both ends.

    `made_in_s` is what one blob is estimated to take the runner, None if that is not known.
    """

    def __init__(
        self,
        records: Sequence[Record],
        wanted: Wanted,
        waiting: Wait,
        loader: Loader,
        clock: Callable[[], float],
        made_in_s: float | None,
    ) -> None:
        self._records = records
        self._wanted = wanted
        self._waiting = waiting
        self._loader = loader
        self._clock = clock
        self._made_in_s = made_in_s
        self._front = 0
        """All before are readable."""
        self._back = len(records)
        """All from here on are readable, or being loaded."""
        self._last_made_s = clock()
        self._loads: asyncio.Task[None] | None = None

    async def met(self, deadline_s: float) -> None:
        """Return when all are readable, or on their way and no more can be done, or time is up."""
        try:
            while (left_s := deadline_s - self._clock()) > 0:
                self._advance()
                if self._over():
                    return
                if self._waiting.ended.done() and self._waiting.ended.result():
                    self._load(self._front, self._back)
                    return
                if self._loads is None:
                    self._load_some()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.change(), min(left_s, LOOK_S))
        finally:
            if self._loads is not None:
                self._loads.cancel()

    def _over(self) -> bool:
        """All are readable, or what is not was dropped, or its load failed."""
        if self._front == len(self._records) or not self._records[self._front].held:
            return True
        return self._loads is None and self._front >= self._back

    def _advance(self) -> None:
        """See how far both sides have come."""
        if self._loads is not None and self._loads.done():
            self._loads = None
            self._waiting.stop_at(self._back)
        front = self._front
        while front < len(self._records) and self._records[front].readable:
            front += 1
        made = min(front, self._back) - self._front
        if made > 0:
            now_s = self._clock()
            self._made_in_s = (now_s - self._last_made_s) / made
            self._last_made_s = now_s
        self._front = front

    def _load_some(self) -> None:
        """Begin the next load from the back, if that is of use."""
        gap = self._back - self._front
        if gap <= 0:
            return
        nbytes = self._records[self._back - 1].nbytes
        n = max(1, min(gap // SHARE, BATCH_BYTES_MAX // max(nbytes, 1)))
        if self._loader.estimate_s(n * nbytes) < self._made_after_s(gap - n + 1):
            self._load(self._back - n, self._back)

    def _made_after_s(self, n: int) -> float:
        """When the runner will have made the next `n` blobs, from now."""
        since_s = self._clock() - self._last_made_s
        if self._made_in_s is None or since_s > OVERDUE * self._made_in_s:
            return float("inf")
        return n * self._made_in_s - since_s

    def _load(self, first: int, end: int) -> None:
        """Begin to load these; what finds no room is left to the runner."""
        cold = [record for record in self._records[first:end] if record.cold]
        n = self._loader.begin(cold, stream=False) if cold else 0
        fills = [fill for record in self._records[first:end] if (fill := record.fill) is not None]
        if n < len(cold) or not fills:
            return
        self._back = first

        async def ended() -> None:
            for fill in fills:
                await fill.wait_end()
            self._wanted.wake()

        self._loads = asyncio.get_running_loop().create_task(ended())
