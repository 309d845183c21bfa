"""Looking for blobs whose going makes one run of free room, a few at a time.

Where free room lies in pieces, what lies between them must go, and the coldest of that may
be far down the order: too far to be looked for while others wait. Nothing changes until
enough was found; what has changed meanwhile is looked for anew. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from blobstore.index import Record
from blobstore.tiering.free_runs import FreeRuns
from blobstore.tiering.tier import Extent

SLICE = 64
"""Blobs looked at between two turns of the loop: a millisecond or less."""

TRIES = 3
"""Of what was found something may have become wanted by then."""

PAUSE_S = 0.5
"""After a search that found nothing."""


class RunSearch:
    """One search at a time; who wants room tries again when `on_end` is called.

    Args:
        free_runs: the free room, in pieces.
        coldest: blobs in the order in which they would leave, each after what continues it.
        waits: a blob may not go before it has been decided about.
        padded: what so many bytes take up.
        expel: lets all of them go, in this order, or none; whether they went.
        clock: of the store.
    """

    def __init__(
        self,
        free_runs: Callable[[], Iterable[Extent]],
        coldest: Callable[[], Iterator[Record]],
        waits: Callable[[Record], bool],
        padded: Callable[[int], int],
        expel: Callable[[Sequence[Record]], bool],
        on_end: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._free_runs = free_runs
        self._coldest = coldest
        self._waits = waits
        self._padded = padded
        self._expel = expel
        self._on_end = on_end
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._taken: set[int] = set()
        self._again_s = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """It is looking."""
        return self._task is not None

    def begin(self, nbytes: int) -> None:
        """Look for a run of `nbytes`; not at once if a search has just been in vain."""
        loop, left_s = asyncio.get_running_loop(), self._again_s - self._clock()
        if self._task is not None or self._timer is not None:
            return
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._pause_over)
        else:
            self._task = loop.create_task(self._run(nbytes))

    def taken(self, offset: int) -> None:
        """An extent that starts there was taken: what a search has seen of it does not hold."""
        if self._task is not None:
            self._taken.add(offset)

    async def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _pause_over(self) -> None:
        self._timer = None
        self._on_end()

    async def _run(self, nbytes: int) -> None:
        found = False
        try:
            for _ in range(TRIES):
                self._taken.clear()
                needed = await self._search(nbytes)
                found = bool(needed) and self._expel(needed)
                if found or not needed:
                    return
        finally:
            self._task = None
            if not found:
                self._again_s = self._clock() + PAUSE_S
            self._on_end()

    async def _search(self, nbytes: int) -> list[Record]:
        """Blobs that, with the free room between them, make one run, in order; [] if none do."""
        runs = FreeRuns(self._free_runs())
        chosen: dict[Record, None] = {}
        kept: set[Record | None] = set()
        for n, record in enumerate(self._coldest(), 1):
            if n % SLICE == 0:
                await asyncio.sleep(0)
            extent = record.dram
            if record in chosen or extent is None or not record.packed:
                continue
            if record in kept or self._waits(record) or extent.offset in self._taken:
                kept.add(record.parent)
                continue
            chosen[record] = None
            if not record.nbytes:
                continue
            run = runs.add(Extent(0, extent.offset, self._padded(record.nbytes)))
            if run.nbytes >= nbytes:
                return only_needed([each for each in chosen if each.dram is not None], run)
        return []


def only_needed(chosen: Sequence[Record], run: Extent) -> list[Record]:
    """Those of `chosen` in `run`, and what continues them, which comes before them."""
    needed: set[Record] = set()
    for record in reversed(chosen):  # ancestors come before what continues them
        assert record.dram is not None
        inside = run.offset <= record.dram.offset < run.offset + run.nbytes
        if (inside and record.nbytes) or record.parent in needed:
            needed.add(record)
    return [record for record in chosen if record in needed]
