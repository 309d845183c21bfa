"""Bringing blobs from SSD into DRAM: one load per blob, whoever asks.

Reads go straight into the arena in megabyte steps on worker threads, and every
piece is checked against its digest before anyone may see it. A load belongs to
the store, not to the caller that started it: cancelling the caller strands
nobody. What is loaded ahead of its use keeps to a budget, and out of the room
that is kept for loads which somebody waits for. The copy on SSD stays. Used on
the event loop only, but for the methods marked as work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from blobstore.counters import Counters
from blobstore.digest import PIECE_BYTES, first_bad_piece, payload_digest
from blobstore.errors import Corrupt
from blobstore.estimates import FetchEstimate
from blobstore.fill import Fill
from blobstore.index import Record
from blobstore.rate import Rate
from blobstore.residency import Residency
from blobstore.stories import Stories
from blobstore.tiering.budget import Budget
from blobstore.tiering.ssd import SsdTier
from blobstore.tiering.tier import Extent

log = logging.getLogger(__name__)

STEP_BYTES = 8 * PIECE_BYTES
"""One read: long enough that the cost of handing it to a thread does not show."""

STREAM_STEP_BYTES = 2 * PIECE_BYTES
"""Read and checked at a time; one step of a load that somebody follows layer by layer."""

PACE_BURST_BYTES = STREAM_STEP_BYTES
"""Read at once by paced loads, after a rest."""

PACE_S_MIN = 0.001
"""A paced load sleeps at least so long: rounding must not make it spin."""


@dataclass(slots=True)
class _Load:
    record: Record
    place: Extent | bool
    fill: Fill
    why: str
    """The reason, for counters, why it is loaded."""
    steps_left: int = 0
    failure: str = ""


class Loader:
    """Loads from one SSD tier into the arena."""

    def __init__(
        self,
        ssd: SsdTier,
        arena: memoryview,
        residency: Residency,
        counters: Counters,
        pool: Executor,
        lanes: int,
        on_corrupt: Callable[[Record], None],
        save: Callable[[Record], None],
        clock: Callable[[], float],
        stories: Stories,
        estimate: FetchEstimate,
        promote_rate: int,
        fetch_rate: int = 0,
    ) -> None:
        self._ssd = ssd
        self._arena = arena
        self._residency = residency
        self._counters = counters
        self._stories = stories
        self._pool = pool
        self._lanes = lanes
        self._on_corrupt = on_corrupt
        self._save = save
        self._clock = clock
        self._estimate = estimate
        self._ahead = Budget.per_second(promote_rate or None)
        self._pace = Budget(fetch_rate or None, PACE_BURST_BYTES)
        self._rate = Rate(clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: dict[int, int] = {}
        """Bytes still to be read, of each run of loads that was begun at once."""
        self._next_run = 1

    def begin(self, records: Sequence[Record], *, stream: bool) -> int:
        """Start to load blobs that are on SSD alone; how many leading ones found room.

        None may have an extent already: whoever reads its bytes must not see them change.
        The caller keeps all of them pinned during this call; each load then holds its
        own pin until it has ended. Follow `record.fill`.
        """
        n = len(records)
        if not self._take(records, loading=True):
            n = 0
            while n < len(records) and self._take(records[n : n + 1], loading=True):
                n += 1
        self._start(records[:n], "get", stream=stream)
        return n

    def begin_ahead(self, records: Iterable[Record], make_room: Callable[[Record], bool]) -> int:
        """As `begin`, for what nobody waits for yet: within the budget, and as puts get room.

        `make_room` may let go of something for a record, and says whether it did; `records`
        may end sooner then.
        """
        taken = []
        for record in records:
            if not self._take_ahead(record, make_room):
                break
            taken.append(record)
        self._start(taken, "prefetch", stream=False)
        return len(taken)

    def estimate_s(self, nbytes: int) -> float:
        """How long a load of so much would take if it began now."""
        return self._estimate.seconds(nbytes, self._queued_bytes(nbytes))

    def stats(self) -> dict[str, Any]:
        """Gauges by name."""
        return {"promote_bytes_per_s": self._rate.per_s(), "loads": len(self._tasks)}

    async def close(self) -> None:
        """Wait for the loads in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _queued_bytes(self, nbytes: int) -> int:
        """What is read for others until `nbytes` more are: all share the disk alike."""
        return sum(min(left, nbytes) for left in self._left.values())

    def _take(self, records: Sequence[Record], *, loading: bool) -> bool:
        # Bytes that were put aside, or of a load that failed, may still be under a lease.
        assert all(record.dram is None for record in records)
        return self._residency.take(records, loading=loading)

    def _take_ahead(self, record: Record, make_room: Callable[[Record], bool]) -> bool:
        """Take the budget and the room to load one blob."""
        why = ""
        if not self._ahead.take(record.nbytes, self._clock()):
            why = "budget"
        else:
            while not self._take([record], loading=False):
                if not make_room(record):
                    self._ahead.give_back(record.nbytes)
                    why = "no_room"
                    break
        if why:
            self._counters.refused("dram", why, record)
            self._stories.note(record, "refused dram", why)
        return not why

    def _start(self, records: Sequence[Record], why: str, *, stream: bool) -> None:
        loads = [self._open(record, why) for record in records]
        if loads:
            task = asyncio.get_running_loop().create_task(self._run(loads, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _open(self, record: Record, why: str) -> _Load:
        ends = [*range(PIECE_BYTES, record.nbytes, PIECE_BYTES), record.nbytes]
        record.fill = Fill(ends if record.nbytes else [])
        self._residency.pin(record)
        return _Load(record, record.ssd, record.fill, why)

    async def _run(self, loads: Sequence[_Load], stream: bool) -> None:
        started_s = self._clock()
        nbytes = sum(load.record.nbytes for load in loads)
        queued_bytes = self._queued_bytes(nbytes)
        run, self._next_run = self._next_run, self._next_run + 1
        self._left[run] = nbytes
        steps = list(_plan(loads, stream))
        for load, _, _ in steps:
            load.steps_left += 1
        queue = iter(steps)
        lanes = range(min(self._lanes, len(steps)))
        try:
            await asyncio.gather(*(self._lane(run, queue) for _ in lanes))
        finally:
            del self._left[run]
        if not any(load.failure for load in loads):
            self._estimate.note(nbytes, queued_bytes, self._clock() - started_s)

    async def _lane(self, run: int, queue: Iterator[tuple[_Load, int, int]]) -> None:
        for load, start, end in queue:
            await self._paced(load, end - start)
            if load.record.gone:
                self._fail(load, "dropped")
            if not load.failure:
                await self._step(load, start, end)
            self._left[run] -= end - start
            load.steps_left -= 1
            if load.steps_left == 0:
                self._end(load)

    async def _paced(self, load: _Load, nbytes: int) -> None:
        """Wait until so much may be read for a load, unless nobody wants it any more."""
        while not load.record.gone:
            if self._pace.take(nbytes, self._clock()):
                return
            await asyncio.sleep(max(self._pace.wait_s(nbytes, self._clock()), PACE_S_MIN))

    async def _step(self, load: _Load, start: int, end: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._pool, self._read, load, start, end)
        except Corrupt:
            self._fail(load, "corrupt")
        except Exception as error:
            if load.record.ssd == load.place:  # else it was dropped, and its extent freed
                log.warning("a load failed: %s", str(error))  # a handler may keep its arguments
                self._counters.ssd_errors += 1
            self._fail(load, "io_error")
        else:
            load.fill.mark(start // PIECE_BYTES, -(-end // PIECE_BYTES))

    def _read(self, load: _Load, start: int, end: int) -> None:
        """Read and check one step (work). Raises Corrupt or StorageFailed."""
        record = load.record
        assert record.dram is not None
        # Read and checked in turns, so that one lane's disk works while another's processor does.
        for at in range(start, max(end, start + 1), STREAM_STEP_BYTES):
            until = min(at + STREAM_STEP_BYTES, end)
            into = self._arena[record.dram.offset + at : record.dram.offset + until]
            self._read_unit(load, at, into)
        if payload_digest(record.nbytes, record.pieces) != record.digest:
            raise Corrupt(f"blob {record.key.hex()[:12]}: piece digests contradict the payload's")

    def _read_unit(self, load: _Load, at: int, into: memoryview) -> None:
        record = load.record
        for _ in range(2):  # a second read tells a fault on the way from one on the disk
            if isinstance(load.place, Extent):
                self._ssd.read(load.place, at, into)
            else:
                self._ssd.read_inline(record.ns.id, record.key, into)
            if first_bad_piece(into, at // PIECE_BYTES, record.pieces) is None:
                return
        raise Corrupt(f"blob {record.key.hex()[:12]} on ssd fails its digest")

    def _fail(self, load: _Load, reason: str) -> None:
        load.failure = load.failure or reason
        load.fill.fail(reason)

    def _end(self, load: _Load) -> None:
        """All steps of a load are over: show the blob, or take back the room."""
        record = load.record
        record.fill = None
        if load.failure:
            if load.failure == "corrupt" and record.ssd == load.place:
                self._on_corrupt(record)
        elif not record.gone:
            self._residency.show(record)
            self._counters.loaded_blobs += 1
            self._counters.loaded_bytes += record.nbytes
            self._counters.moved("ssd>dram", load.why, record)
            self._stories.note(record, "ssd>dram", load.why)
            self._rate.note(record.nbytes)
            load.fill.finish()
            if record.ssd is False:  # put aside by somebody else meanwhile
                self._save(record)
        else:
            load.fill.fail("dropped")
        self._residency.unpin(record)


def _plan(loads: Sequence[_Load], stream: bool) -> Iterator[tuple[_Load, int, int]]:
    """The steps of all loads: blob after blob, or by layers across blobs when streamed."""
    per_load = [[(load, *step) for step in _steps(load.record, stream)] for load in loads]
    if not stream:
        for steps in per_load:
            yield from steps
        return
    for turn in zip_longest(*per_load):
        yield from (step for step in turn if step is not None)


def _steps(record: Record, stream: bool) -> Iterator[tuple[int, int]]:
    """Byte ranges that end on piece borders; when streamed the first holds just the first part."""
    start, step = 0, STREAM_STEP_BYTES if stream else STEP_BYTES
    if stream:
        first_part = record.ns.layout.parts(record.tokens)[0].nbytes
        start = min(-(-first_part // PIECE_BYTES) * PIECE_BYTES, record.nbytes)
        if start:
            yield 0, start
    if record.nbytes == 0:
        yield 0, 0
    while start < record.nbytes:
        yield start, min(start + step, record.nbytes)
        start += step
