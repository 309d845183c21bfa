"""Which bytes of which segment hold what, and how much of the disk that takes.

Pure bookkeeping, without I/O and not thread-safe: `Segments` holds the lock and
does to the files what is decided here. A run of bytes in a segment is *live*
(it belongs to an extent), *spare* (free, but with blocks of its own), or a *hole*
(free, and given back to the file system).

Room is found in this order: the shortest spare run that is long enough; the
frontier, a run of holes that is turned into spare room front to back, a chunk
at a time; the longest hole, if it makes a fair frontier; a new segment.
Overwriting spare blocks saves the file system both the freeing and the
allocating, which cost a full tier a third of its write rate (measured: 1.6 GB/s
punched, 2.7 GB/s overwritten). Blocks that are there before the write let
several writers into one file at once (ext4): 1.7 against 1.4 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from blobstore.errors import Full, InvalidRequest
from blobstore.tiering.disk import BLOCK_BYTES
from blobstore.tiering.free_runs import FreeRuns
from blobstore.tiering.tier import Extent
from blobstore.units import MIB, format_size

HEADER_BYTES = BLOCK_BYTES
"""At the start of every segment; extents lie behind it."""

NOWHERE = Extent(0, 0, 0)
"""The extent of an empty payload. Segments are numbered from 1."""

CHUNK_BYTES_MAX = 64 * MIB
"""Room that is made spare at once: asking for it holds up the writes in flight (ext4)."""

_FRONTIER_SHARE = 16
"""A hole shorter than this fraction of a segment is left for later: short runs scatter writes."""


Spans = npt.NDArray[np.int64]
"""Many extents: a line each of place, offset and size."""

Bytes = TypeVar("Bytes", int, npt.NDArray[np.int64])


def blocks_of(nbytes: Bytes) -> Bytes:
    """The bytes that `nbytes` take: whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class Placement:
    """The map of all segments.

    `segments` gives the size of each. Live bytes, spare ones (or the room kept
    for them, whichever is more) and those on their way to holes never exceed
    `limit_bytes` by way of `allocate` or `set_aside`. `unprepared` are runs that
    count as spare or live, and should get blocks before they are written.
    """

    def __init__(self, limit_bytes: int, *, segment_bytes: int, spare_bytes_max: int) -> None:
        self.limit_bytes = limit_bytes
        self.segments: dict[int, int] = {}
        self.live_bytes = 0
        self.unprepared: list[Extent] = []
        self._preparing: list[Extent] = []
        self._chunk_bytes = min(CHUNK_BYTES_MAX, blocks_of(spare_bytes_max // 4))
        self._spare_bytes_max = spare_bytes_max
        self._leaving_bytes = 0
        self._segment_bytes = segment_bytes
        self._live: dict[int, int] = {}  # by packed place and offset: size
        self._spare = FreeRuns()
        self._holes = FreeRuns()
        self._frontier = NOWHERE
        self._next_place = 1

    @property
    def taken_bytes(self) -> int:
        """Live bytes, and the room kept for spare ones and headers; not what is to be punched."""
        headers_bytes = self.idle_bytes - self._spare.total_bytes
        return self.live_bytes + max(self._spare_bytes_max, headers_bytes)

    @property
    def free_bytes(self) -> int:
        """What `allocate` can still hand out, spare runs too short for it once punched."""
        return max(0, self.limit_bytes - self.taken_bytes)

    @property
    def spare_bytes(self) -> int:
        """Free bytes whose blocks the file system does not have back."""
        return self._spare.total_bytes + self._leaving_bytes

    @property
    def idle_bytes(self) -> int:
        """What the segments take beyond live bytes."""
        return self.spare_bytes + HEADER_BYTES * len(self.segments)

    @property
    def n_extents(self) -> int:
        """Extents handed out and not returned."""
        return len(self._live)

    def adopt(self, sizes: Mapping[int, int], spans: Spans) -> list[Extent]:
        """Start with segments found on disk; returns the free runs, taken for holes.

        `spans` are disjoint, inside their segments, and sorted by place and offset.
        """
        place, offset, nbytes = spans.T
        ends = offset + blocks_of(nbytes)
        self.live_bytes += int((ends - offset).sum())
        places, firsts = np.unique(place, return_index=True)
        starts_at = np.roll(ends, 1)
        starts_at[firsts] = HEADER_BYTES
        gaps = np.flatnonzero(offset > starts_at)
        holes = [
            Extent(int(place[i]), int(starts_at[i]), int(offset[i] - starts_at[i])) for i in gaps
        ]
        lasts = [*(firsts[1:] - 1), len(spans) - 1]
        for number, last in zip(places.tolist(), lasts, strict=True) if len(spans) else ():
            end = int(ends[last])
            if end < sizes[number]:
                holes.append(Extent(number, end, sizes[number] - end))
        packed = map(_pack, place.tolist(), offset.tolist())
        self._live.update(zip(packed, nbytes.tolist(), strict=True))
        self.segments.update(sizes)
        self._holes = FreeRuns(holes)
        self._next_place = max(sizes, default=0) + 1
        return holes

    def set_aside(self, nbytes: int) -> bool:
        """Lower the limit by `nbytes` for good, if they are free."""
        if not self._fits(nbytes):
            return False
        self.limit_bytes -= nbytes
        return True

    def allocate(self, nbytes: int) -> Extent:
        """As `Tier.allocate`; the segment may not exist yet."""
        if nbytes < 0:
            raise InvalidRequest(f"an extent cannot have {nbytes} bytes")
        if nbytes == 0:
            return NOWHERE
        wanted = blocks_of(nbytes)
        run = self._room_for(wanted)
        extent = Extent(run.place, run.offset, nbytes)
        self._live[_pack(extent.place, extent.offset)] = nbytes
        self.live_bytes += wanted
        return extent

    def holds(self, extent: Extent) -> bool:
        """Whether `extent` is allocated here."""
        return self._live.get(_pack(extent.place, extent.offset)) == extent.nbytes

    def release(self, extent: Extent) -> None:
        """A live extent becomes spare; InvalidRequest if it is not live."""
        if not self.holds(extent):
            raise InvalidRequest(f"ssd: {extent} is not allocated")
        del self._live[_pack(extent.place, extent.offset)]
        run = Extent(extent.place, extent.offset, blocks_of(extent.nbytes))
        self.live_bytes -= run.nbytes
        self._spare.add(run)

    def surplus(self, keep_bytes: int | None = None) -> Extent | None:
        """A run to punch now, if the segments take more than `keep_bytes` beyond live bytes.

        By default that is the room kept for it. The caller reports the outcome
        by `punched` or `kept`.
        """
        kept_bytes = self._spare_bytes_max if keep_bytes is None else keep_bytes
        excess = self.idle_bytes - self._leaving_bytes - kept_bytes
        if excess <= 0 or not self._spare:
            return None
        run = self._spare.take_shortest(excess)
        if any(_overlap(run, other) for other in self._preparing):
            self._spare.add(run)
            return None
        self.unprepared = [other for other in self.unprepared if not _overlap(run, other)]
        self._leaving_bytes += run.nbytes
        return run

    def prepare(self) -> list[Extent]:
        """The runs that need blocks; none of them is punched until `prepared`."""
        runs, self.unprepared = self.unprepared, []
        self._preparing += runs
        return runs

    def prepared(self, run: Extent) -> None:
        """The run has its blocks, or will have to do without."""
        self._preparing.remove(run)

    def kept(self, run: Extent) -> None:
        """The run could not be punched: it stays spare."""
        self._leaving_bytes -= run.nbytes
        self._spare.add(run)

    def punched(self, run: Extent) -> bool:
        """The run is a hole now. True if its segment is empty and was taken off the map."""
        self._leaving_bytes -= run.nbytes
        hole = self._holes.add(run)
        whole = hole.nbytes == self.segments[run.place] - HEADER_BYTES
        if not whole or self._frontier.place == run.place:
            return False
        self._holes.remove(hole)
        del self.segments[run.place]
        return True

    def _room_for(self, nbytes: int) -> Extent:
        if nbytes <= self.free_bytes:
            run = self._spare.take(nbytes)
            if run is not None:
                return run
            if self._fits(nbytes):
                return self._advance(nbytes)
        raise Full(
            f"ssd: wanted {format_size(nbytes)}, free are {format_size(self.free_bytes)} "
            f"of {format_size(self.limit_bytes)}"
        )

    def _fits(self, nbytes: int) -> bool:
        """Whether the disk may give out so much more now."""
        kept_bytes = max(self._spare_bytes_max, self.idle_bytes)
        return self.live_bytes + kept_bytes + nbytes <= self.limit_bytes

    def _advance(self, nbytes: int) -> Extent:
        """Make the next chunk of the frontier spare, and take `nbytes` of that."""
        run = self._frontier
        if run.nbytes < nbytes:
            if run.nbytes:
                self._holes.add(run)
            fair = max(nbytes, self._segment_bytes // _FRONTIER_SHARE)
            run = self._holes.take_longest(fair) or self._extend(nbytes)
        room = max(0, self._spare_bytes_max - self.idle_bytes)
        length = min(max(nbytes, min(self._chunk_bytes, nbytes + room)), run.nbytes)
        chunk = Extent(run.place, run.offset, length)
        self._frontier = Extent(run.place, run.offset + length, run.nbytes - length)
        self.unprepared.append(chunk)
        self._spare.add(chunk)
        taken = self._spare.take(nbytes)
        assert taken is not None
        return taken

    def _extend(self, nbytes: int) -> Extent:
        place = self._next_place
        self._next_place += 1
        self.segments[place] = max(self._segment_bytes, HEADER_BYTES + nbytes)
        return Extent(place, HEADER_BYTES, self.segments[place] - HEADER_BYTES)


def _overlap(one: Extent, other: Extent) -> bool:
    return (
        one.place == other.place
        and one.offset < other.offset + other.nbytes
        and other.offset < one.offset + one.nbytes
    )


def _pack(place: int, offset: int) -> int:
    # One int instead of a tuple: a third of the memory per blob.
    return place << 56 | offset
