"""The seam between places that hold bytes and the service that decides what they hold.

A tier hands out extents and moves bytes in and out of them. It knows no keys,
no blobs and no order of eviction: who owns an extent, and when it goes, is the
caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous run of bytes in a tier.

    `place` is the segment number on SSD and 0 in an arena; `nbytes` is the size
    asked for, while the tier may have set aside a little more.
    """

    place: int
    offset: int
    nbytes: int


class Tier(Protocol):
    """Bytes in one kind of memory. All methods may be called from any thread.

    `allocate` and `free` only keep accounts and return at once; `write` and
    `read` block and belong on worker threads, where they release the GIL for a
    megabyte or more at a time. The caller keeps an extent allocated, and its
    buffer alive, for as long as a `write` or `read` of it runs.
    """

    @property
    def name(self) -> str:
        """Short name used in messages, counters and placements: `dram`, `ssd`."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The hard limit of `used_bytes`."""
        ...

    @property
    def used_bytes(self) -> int:
        """Room taken, with the tier's own rounding and overhead."""
        ...

    @property
    def free_bytes(self) -> int:
        """`capacity_bytes` less `used_bytes`; it need not be in one piece."""
        ...

    def allocate(self, nbytes: int) -> Extent:
        """Set aside `nbytes`; what they contain is undefined. 0 bytes take no room.

        Raises Full, with nothing taken, when no run of free room is long
        enough, and InvalidRequest for a negative size.
        """
        ...

    def free(self, extent: Extent) -> None:
        """Give `extent` back; its room may be handed out again at once.

        Raises InvalidRequest, with nothing changed, for an extent that is not
        allocated here: freeing twice is a fault of the caller.
        """
        ...

    def write(self, extent: Extent, start: int, data: memoryview) -> None:
        """Copy `data` to byte `start` of `extent`.

        Raises SizeMismatch, before a byte moves, where it would pass the
        extent's end, and StorageFailed where the medium refuses; the written
        range is then undefined and the extent stays allocated.
        """
        ...

    def read(self, extent: Extent, start: int, into: memoryview) -> None:
        """Fill `into` from byte `start` of `extent`, wholly or not at all.

        Raises as `write` does; `into` is then undefined.
        """
        ...
