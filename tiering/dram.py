"""The DRAM tier: extents of one arena.

Owns who has which range of the arena, and the reserve that keeps room for
loads. Which bytes stay and which go is decided elsewhere.
"""

from __future__ import annotations

from threading import Lock

import numpy as np

from blobstore.errors import Full, InvalidRequest, SizeMismatch
from blobstore.tiering.allocator import OffsetAllocator
from blobstore.tiering.arena import Arena
from blobstore.tiering.tier import Extent
from blobstore.units import format_size

_EMPTY = Extent(0, 0, 0)


class DramTier:
    """A Tier in shared memory. The arena stays the caller's, to close after the tier's last use.

    The staging reserve is a quota, not a place: puts leave `staging_bytes`
    free, loads may take everything, so that a full cache never blocks a load.
    Extents start on a page and own whole pages: see `padded`.
    """

    name = "dram"

    def __init__(self, arena: Arena, *, staging_bytes: int = 0) -> None:
        self._arena = arena
        self._lock = Lock()
        self._allocator = OffsetAllocator(arena.nbytes)
        self._live: dict[int, Extent] = {}
        if not 0 <= staging_bytes < self._allocator.capacity_bytes:
            raise InvalidRequest(
                f"a staging reserve of {staging_bytes} bytes does not fit an arena of "
                f"{self._allocator.capacity_bytes}"
            )
        self._staging_bytes = self._allocator.rounded(staging_bytes)

    @property
    def capacity_bytes(self) -> int:
        """The arena, in whole pages: what loads may fill."""
        return self._allocator.capacity_bytes

    @property
    def room_for_puts_bytes(self) -> int:
        """The arena less the staging reserve: what puts may fill."""
        return self._allocator.capacity_bytes - self._staging_bytes

    @property
    def staging_bytes(self) -> int:
        """The staging reserve."""
        return self._staging_bytes

    @property
    def used_bytes(self) -> int:
        """Taken, in whole pages."""
        return self._allocator.used_bytes

    @property
    def free_bytes(self) -> int:
        """Not taken, the staging reserve included."""
        return self._allocator.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest free run."""
        return self._allocator.largest_free_bytes

    @property
    def n_free_runs(self) -> int:
        """In how many pieces the free room lies."""
        return self._allocator.n_free_runs

    @property
    def fragmentation(self) -> float:
        """The share of the free room outside its longest run: 0 is one piece."""
        return self._allocator.fragmentation

    @property
    def n_extents(self) -> int:
        """Extents that take room."""
        return len(self._live)

    def free_runs(self) -> list[Extent]:
        """The free runs, longest possible each, in no order."""
        with self._lock:
            return [Extent(0, start, nbytes) for start, nbytes in self._allocator.free_runs()]

    def available_bytes(self, *, staging: bool = False) -> int:
        """What is free for puts, or for loads.

        Below zero where loads took the reserve: so much must go before the
        first byte of a put.
        """
        return self._allocator.free_bytes - (0 if staging else self._staging_bytes)

    def padded(self, nbytes: int) -> int:
        """What `nbytes` take up here: whole pages, all of which the extent's owner may use."""
        return self._allocator.rounded(nbytes)

    def allocate(self, nbytes: int, *, staging: bool = False) -> Extent:
        """As Tier.allocate; `staging` is for loads, which may use the reserve."""
        if nbytes == 0:
            return _EMPTY
        if nbytes < 0:
            raise InvalidRequest(f"cannot allocate {nbytes} bytes")
        with self._lock:
            offset = None
            if self._allocator.rounded(nbytes) <= self.available_bytes(staging=staging):
                offset = self._allocator.allocate(nbytes)
            if offset is None:
                raise self._full(nbytes, staging=staging)
            extent = self._live[offset] = Extent(0, offset, nbytes)
        return extent

    def free(self, extent: Extent, *, wipe: bool = False) -> None:
        """As Tier.free; with `wipe` the bytes are zero before anyone else can get them.

        Wiping takes as long as a copy; the tier stays usable meanwhile.
        """
        if extent == _EMPTY:
            return
        with self._lock:
            if self._live.get(extent.offset) != extent:
                raise InvalidRequest(f"{extent} is not allocated in {self.name}")
            del self._live[extent.offset]
        if wipe:
            self._arena.wipe(extent.offset, self.padded(extent.nbytes))
        with self._lock:
            self._allocator.free(extent.offset)

    def view(self, extent: Extent) -> memoryview:
        """The bytes of `extent` in place, writable; the caller keeps it allocated meanwhile."""
        start = self._start(extent, 0, extent.nbytes)
        return self._arena.view[start : start + extent.nbytes]

    def write(self, extent: Extent, start: int, data: memoryview) -> None:
        """As Tier.write."""
        offset = self._start(extent, start, data.nbytes)
        if data.nbytes:
            target = self._arena.array[offset : offset + data.nbytes]
            np.copyto(target, np.frombuffer(data, np.uint8))

    def read(self, extent: Extent, start: int, into: memoryview) -> None:
        """As Tier.read."""
        offset = self._start(extent, start, into.nbytes)
        if into.nbytes:
            source = self._arena.array[offset : offset + into.nbytes]
            np.copyto(np.frombuffer(into, np.uint8), source)

    def _start(self, extent: Extent, start: int, nbytes: int) -> int:
        """Where byte `start` of `extent` lies in the arena."""
        if not 0 <= start <= start + nbytes <= extent.nbytes:
            raise SizeMismatch(
                f"bytes {start} to {start + nbytes} are not in an extent of {extent.nbytes}"
            )
        if extent != _EMPTY and self._live.get(extent.offset) != extent:
            raise InvalidRequest(f"{extent} is not allocated in {self.name}")
        return extent.offset + start

    def _full(self, nbytes: int, *, staging: bool) -> Full:
        return Full(
            f"{self.name}: wanted {format_size(nbytes)}, free "
            f"{format_size(max(self.available_bytes(staging=staging), 0))} of "
            f"{format_size(self.capacity_bytes)}, longest run "
            f"{format_size(self.largest_free_bytes)}"
            + ("" if staging else f", {format_size(self._staging_bytes)} kept for loads")
        )
