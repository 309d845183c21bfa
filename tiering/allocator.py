"""Which byte ranges of a fixed space are taken: accounts only, no memory.

Best fit over exact size classes: free runs are filed by their length, the
lengths are kept sorted, and a request takes a run of the shortest length that
holds it. So an allocation fails only when no run fits. Neighbours always merge.

m distinct lengths need a space of m(m+1)/2 granules, which bounds the sorted
list at 5,800 entries for 64 GiB however many runs there are: searching and
shifting it costs about a microsecond, and steady sizes hardly touch it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from blobstore.errors import InvalidRequest

GRANULE_BYTES = 4096
"""A page, and the alignment that O_DIRECT asks for."""


class OffsetAllocator:
    """Hands out granule-aligned ranges of `capacity_bytes`, rounded down to granules.

    Not thread-safe: the owner locks.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int = GRANULE_BYTES) -> None:
        if granule_bytes < 1 or granule_bytes & (granule_bytes - 1):
            raise InvalidRequest(f"a granule must be a power of two, found {granule_bytes}")
        self._granule_bytes = granule_bytes
        self._capacity_bytes = self._free_bytes = capacity_bytes & -granule_bytes
        self._taken: dict[int, int] = {}
        # Free runs by length, by start and by end; the last run filed is the
        # first one reused, while its pages are still in the caches.
        self._lengths: list[int] = []
        self._starts: dict[int, dict[int, None]] = {}
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        if self._free_bytes:
            self._file(0, self._free_bytes)

    @property
    def capacity_bytes(self) -> int:
        """All of the space, in whole granules."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Taken, rounded up to granules."""
        return self._capacity_bytes - self._free_bytes

    @property
    def free_bytes(self) -> int:
        """Not taken, in however many runs."""
        return self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest request that would be granted now."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def n_free_runs(self) -> int:
        """In how many pieces the free room lies."""
        return len(self._length_at)

    @property
    def fragmentation(self) -> float:
        """The share of the free room outside its longest run: 0 is one piece."""
        return 1 - self.largest_free_bytes / self._free_bytes if self._free_bytes else 0.0

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Offset and length of every free run, in no order."""
        return iter(self._length_at.items())

    def rounded(self, nbytes: int) -> int:
        """What `nbytes` take up."""
        return (nbytes + self._granule_bytes - 1) & -self._granule_bytes

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `nbytes` that are now taken; None when no run fits.

        Raises InvalidRequest unless `nbytes` is positive: an empty range has no
        offset of its own that could be freed.
        """
        if nbytes < 1:
            raise InvalidRequest(f"cannot allocate {nbytes} bytes")
        wanted = (nbytes + self._granule_bytes - 1) & -self._granule_bytes
        at = bisect_left(self._lengths, wanted)
        if at == len(self._lengths):
            return None
        length = self._lengths[at]
        start = self._take_one(length)
        if length > wanted:
            self._file(start + wanted, length - wanted)
        self._taken[start] = wanted
        self._free_bytes -= wanted
        return start

    def free(self, offset: int) -> int:
        """Give back the range that starts at `offset`; returns its rounded size.

        Raises InvalidRequest, with nothing changed, unless one starts there.
        """
        nbytes = self.size_of(offset)
        del self._taken[offset]
        self._free_bytes += nbytes
        start, end = offset, offset + nbytes
        before = self._start_before.get(start)
        if before is not None:
            self._unfile(before, start - before)
            start = before
        after = self._length_at.get(end)
        if after is not None:
            self._unfile(end, after)
            end += after
        self._file(start, end - start)
        return nbytes

    def size_of(self, offset: int) -> int:
        """The rounded size of the range that starts at `offset`; raises as `free` does."""
        try:
            return self._taken[offset]
        except KeyError:
            raise InvalidRequest(f"nothing is allocated at offset {offset}") from None

    def _file(self, start: int, length: int) -> None:
        starts = self._starts.get(length)
        if starts is None:
            self._starts[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None
        self._length_at[start] = length
        self._start_before[start + length] = start

    def _take_one(self, length: int) -> int:
        # popitem, not the last key and del: it leaves no dead entries to walk past.
        starts = self._starts[length]
        start, _ = starts.popitem()
        self._forget(start, length, starts)
        return start

    def _unfile(self, start: int, length: int) -> None:
        starts = self._starts[length]
        del starts[start]
        self._forget(start, length, starts)

    def _forget(self, start: int, length: int, starts: dict[int, None]) -> None:
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        del self._length_at[start]
        del self._start_before[start + length]
