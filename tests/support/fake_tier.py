"""A Tier that is easy to inspect and to break."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Literal

from blobstore.errors import Full, InvalidRequest, SizeMismatch
from blobstore.tiering.tier import Extent

_EMPTY = Extent(0, 0, 0)


def _nothing(operation: Literal["write", "read"], extent: Extent) -> None:
    pass


class FakeTier:
    """Every extent is a bytearray of its own at an offset that is never used again.

    So a stale extent is always noticed. `before_io` runs before each write and
    read, on the caller's thread: it may raise, or block.
    """

    def __init__(self, capacity_bytes: int, name: str = "fake") -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.before_io: Callable[[Literal["write", "read"], Extent], None] = _nothing
        self.contents: dict[Extent, bytearray] = {}
        self._lock = Lock()
        self._next_offset = 0

    @property
    def used_bytes(self) -> int:
        return sum(extent.nbytes for extent in list(self.contents))

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def allocate(self, nbytes: int) -> Extent:
        if nbytes == 0:
            return _EMPTY
        if nbytes < 0:
            raise InvalidRequest(f"cannot allocate {nbytes} bytes")
        with self._lock:
            if nbytes > self.free_bytes:
                raise Full(f"{self.name}: wanted {nbytes}, free {self.free_bytes}")
            extent = Extent(0, self._next_offset, nbytes)
            self._next_offset += nbytes
            self.contents[extent] = bytearray(b"\xee" * nbytes)
        return extent

    def free(self, extent: Extent) -> None:
        if extent == _EMPTY:
            return
        with self._lock:
            self._held(extent)
            del self.contents[extent]

    def write(self, extent: Extent, start: int, data: memoryview) -> None:
        held = self._range(extent, start, data.nbytes)
        self.before_io("write", extent)
        held[start : start + data.nbytes] = data

    def read(self, extent: Extent, start: int, into: memoryview) -> None:
        held = self._range(extent, start, into.nbytes)
        self.before_io("read", extent)
        into[:] = held[start : start + into.nbytes]

    def _range(self, extent: Extent, start: int, nbytes: int) -> bytearray:
        if not 0 <= start <= start + nbytes <= extent.nbytes:
            raise SizeMismatch(f"{start}+{nbytes} is outside an extent of {extent.nbytes}")
        return bytearray() if extent == _EMPTY else self._held(extent)

    def _held(self, extent: Extent) -> bytearray:
        try:
            return self.contents[extent]
        except KeyError:
            raise InvalidRequest(f"{extent} is not allocated in {self.name}") from None
