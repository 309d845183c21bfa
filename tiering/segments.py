"""Payloads in segment files: large, sparse, 4 KiB aligned, written around the page cache.

Owns the files under one directory, their handles, and the reads in flight. What
lies where is `Placement`'s affair, what it means is the catalogue's. The lock
is held for bookkeeping only, never while the disk works.
"""

from __future__ import annotations

import errno
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from blobstore.errors import InvalidRequest, SizeMismatch
from blobstore.tiering import transfer
from blobstore.tiering.disk import BLOCK_BYTES, Disk, Handle, storage_failed
from blobstore.tiering.placement import HEADER_BYTES, Placement, Spans, blocks_of
from blobstore.tiering.segment_header import Owner, encode_header, owner_of
from blobstore.tiering.tier import Extent

_NAME = re.compile(r"(\d{8,})\.seg")
EVENTS = (
    "punches",
    "punch_errors",
    "read_errors",
    "write_errors",
    "sync_errors",
    "headers_repaired",
    "foreign_segments",
)
"""What `Segments.stats` counts."""

SLACK_BYTES = 64 * 1024
"""What a file may take beyond its live bytes before its holes are punched again: extent trees."""


class Segments:
    """The segment files of one store. Any thread may call any method."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, placement: Placement) -> None:
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        self._placement = placement
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self._patching = threading.Lock()
        self._handles: dict[int, Handle] = {}
        self._found: dict[int, int] = {}
        self._reads: Counter[Extent] = Counter()
        self._doomed: set[Extent] = set()
        self._counts: Counter[str] = Counter()
        self._unsynced: dict[Extent, int] = {}
        """Extents that were written since they were synced last, and the number of that write."""
        self._writes = 0

    def scan(self) -> dict[int, int]:
        """Open the segment files that are there; number → size.

        Files of another store are unlinked; a damaged header is written anew,
        since payloads have digests of their own. Raises OSError, and
        NewerFormat with nothing changed but headers.
        """
        for name in sorted(self._disk.listdir(self._directory)):
            match = _NAME.fullmatch(name)
            if match is None or int(match[1]) == 0:
                continue
            place = int(match[1])
            handle, nbytes = self._look_at(place)
            if handle is None:
                self._disk.unlink(self._path(place))
            else:
                self._handles[place] = handle
                self._found[place] = nbytes
        return dict(self._found)

    def adopt(self, spans: Spans) -> None:
        """Start with the extents that are in use; everything else is given back to the disk.

        Call once, after `scan`. `spans` are disjoint, inside their files and
        sorted by place and offset.
        """
        places, which = np.unique(spans[:, 0], return_inverse=True)
        live = np.zeros(len(places), np.int64)
        np.add.at(live, which, blocks_of(spans[:, 2]))
        used = dict(zip(places.tolist(), live.tolist(), strict=True))
        for place in self._found.keys() - used.keys():
            self._remove(place)
        sizes = {place: self._found[place] // BLOCK_BYTES * BLOCK_BYTES for place in used}
        holes = self._placement.adopt(sizes, spans)
        crowded = {
            place
            for place, nbytes in used.items()
            if self._disk.allocated_bytes(self._handles[place])
            > nbytes + HEADER_BYTES + SLACK_BYTES
        }
        for hole in holes:
            if hole.place in crowded:
                self._disk.punch(self._handles[hole.place], hole.offset, hole.nbytes)

    def allocate(self, nbytes: int) -> Extent:
        """As `Tier.allocate`."""
        with self._lock:
            return self._placement.allocate(nbytes)

    def set_aside(self, nbytes: int) -> bool:
        """Lower the room for extents by `nbytes` for good, if they are free."""
        with self._lock:
            return self._placement.set_aside(nbytes)

    def free(self, extent: Extent) -> None:
        """Give `extent` back, at once or when the last read of it ends; no I/O.

        Raises InvalidRequest, with nothing changed, if it is not allocated.
        """
        if extent.nbytes == 0:
            return
        with self._lock:
            if self._reads[extent]:
                if extent in self._doomed:
                    raise InvalidRequest(f"ssd: {extent} is freed already")
                self._doomed.add(extent)
                return
            del self._reads[extent]
            self._release(extent)

    def trim(self, keep_bytes: int | None = None) -> None:
        """Punch what is spare beyond `keep_bytes` (by default the room kept for it)."""
        while True:
            with self._lock:
                run = self._placement.surplus(keep_bytes)
                handle = self._handles.get(run.place) if run is not None else None
            if run is None:
                return
            try:
                if handle is not None:
                    self._disk.punch(handle, run.offset, run.nbytes)
            except OSError:
                with self._lock:
                    self._counts["punch_errors"] += 1
                    self._placement.kept(run)
                return  # it stays in the accounts; the next free tries again
            with self._lock:
                self._counts["punches"] += 1
                if not self._placement.punched(run):
                    continue
            self._remove(run.place)

    def write(self, extent: Extent, start: int, data: memoryview) -> None:
        """As `Tier.write`; fastest where `start` and the address are multiples of 4 KiB.

        A full disk gives up its spare blocks before this raises StorageFailed (ENOSPC).
        """
        data = _checked(extent, start, data)
        if not data.nbytes:
            return
        self._mark_unsynced(extent)
        try:
            try:
                self._write(extent, start, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.trim(0)
                self._write(extent, start, data)
        except OSError as error:
            self._count("write_errors")
            raise storage_failed(error, "write", self._path(extent.place)) from error
        self._mark_unsynced(extent)  # a sync meanwhile did not cover all of it

    def read(self, extent: Extent, start: int, into: memoryview) -> None:
        """As `Tier.read`; fastest where `start` and the address are multiples of 4 KiB.

        The extent's bytes stay until this returns, even if it is freed meanwhile.
        """
        into = _checked(extent, start, into)
        if not into.nbytes:
            return
        with self._lock:
            if not self._placement.holds(extent) or extent in self._doomed:
                raise InvalidRequest(f"ssd: {extent} is not allocated")
            self._reads[extent] += 1
        try:
            self._read(extent, start, into)
        except OSError as error:
            self._count("read_errors")
            raise storage_failed(error, "read", self._path(extent.place)) from error
        finally:
            self._end_read(extent)

    def sync(self, extents: Iterable[Extent]) -> None:
        """Make what was written to `extents` durable; again is free. Raises StorageFailed."""
        with self._lock:
            due = {extent: self._unsynced[extent] for extent in extents if extent in self._unsynced}
        for place in sorted({extent.place for extent in due}):
            try:
                self._disk.sync(self._handle(place))
            except OSError as error:
                self._count("sync_errors")
                raise storage_failed(error, "sync", self._path(place)) from error
        with self._lock:
            for extent, write in due.items():
                if self._unsynced.get(extent) == write:
                    del self._unsynced[extent]

    @property
    def free_bytes(self) -> int:
        """What `allocate` can still hand out."""
        with self._lock:
            return self._placement.free_bytes

    @property
    def taken_bytes(self) -> int:
        """Extents in whole blocks, and the room kept for spare ones."""
        with self._lock:
            return self._placement.taken_bytes

    def stats(self) -> dict[str, int | bool]:
        """Sizes, and counts of what went wrong or was repaired."""
        with self._lock:
            handles = self._handles.values()
            return {
                "live_bytes": self._placement.live_bytes,
                "spare_bytes": self._placement.spare_bytes,
                "extents": self._placement.n_extents,
                "segments": len(self._placement.segments),
                "direct": all(handle.direct for handle in handles),
                "reads_in_flight": self._reads.total(),
                "frees_waiting": len(self._doomed),
                **{name: self._counts[name] for name in EVENTS},
            }

    def allocated_bytes(self) -> int:
        """What the files take on the disk."""
        with self._lock:
            handles = list(self._handles.values())
        return sum(self._disk.allocated_bytes(handle) for handle in handles)

    def close(self) -> None:
        """Close all files; nothing is synced. No other call may be in flight."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            self._disk.close(handle)

    def _release(self, extent: Extent) -> None:
        self._placement.release(extent)
        self._unsynced.pop(extent, None)

    def _mark_unsynced(self, extent: Extent) -> None:
        with self._lock:
            self._writes += 1
            self._unsynced[extent] = self._writes

    def _write(self, extent: Extent, start: int, data: memoryview) -> None:
        if self._placement.unprepared:
            self._prepare()
        handle = self._handle(extent.place)
        end = start + data.nbytes
        if start % BLOCK_BYTES or (end % BLOCK_BYTES and end != extent.nbytes):
            self._patch(handle, extent.offset + start, data)
        else:
            transfer.write(self._disk, handle, extent.offset + start, data)

    def _prepare(self) -> None:
        """Get blocks for the room handed out last; without them writes only take longer."""
        with self._lock:
            runs = self._placement.prepare()
        for run in runs:
            try:
                with suppress(OSError):
                    self._disk.preallocate(self._handle(run.place), run.offset, run.nbytes)
            finally:
                with self._lock:
                    self._placement.prepared(run)

    def _patch(self, handle: Handle, offset: int, data: memoryview) -> None:
        """Write what shares its first or last block with other bytes."""
        first = offset - offset % BLOCK_BYTES
        with self._patching:
            blocks = memoryview(bytearray(blocks_of(offset + data.nbytes - first)))
            transfer.read(self._disk, handle, first, blocks)
            blocks[offset - first : offset - first + data.nbytes] = data
            transfer.write(self._disk, handle, first, blocks)

    def _read(self, extent: Extent, start: int, into: memoryview) -> None:
        handle = self._handle(extent.place)
        offset = extent.offset + start
        before = offset % BLOCK_BYTES
        if not before:
            transfer.read(self._disk, handle, offset, into)
            return
        blocks = memoryview(bytearray(before + into.nbytes))
        transfer.read(self._disk, handle, offset - before, blocks)
        into[:] = blocks[before:]

    def _end_read(self, extent: Extent) -> None:
        with self._lock:
            self._reads[extent] -= 1
            if self._reads[extent]:
                return
            del self._reads[extent]
            if extent not in self._doomed:
                return
            self._doomed.discard(extent)
            self._release(extent)

    def _handle(self, place: int) -> Handle:
        handle = self._handles.get(place)
        if handle is not None:
            return handle
        with self._creating:
            handle = self._handles.get(place)
            if handle is None:
                handle = self._create(place)
                self._handles[place] = handle
        return handle

    def _create(self, place: int) -> Handle:
        """A new segment whose name and header last before anything is committed in it."""
        path = self._path(place)
        handle = self._disk.open(path, create=True, direct=True)
        try:
            nbytes = self._placement.segments[place]
            self._disk.truncate(handle, nbytes)
            header = self._header(place, nbytes)
            handle = self._first_io(handle, lambda h: transfer.write(self._disk, h, 0, header))
            self._disk.sync(handle)
            self._disk.sync_dir(self._directory)
        except OSError:
            self._disk.close(handle)
            with suppress(OSError):
                self._disk.unlink(path)
            raise
        return handle

    def _first_io(self, handle: Handle, move: Callable[[Handle], None]) -> Handle:
        """Do `move`; the handle to use from now on. `handle` stays open if this raises."""
        try:
            move(handle)
        except OSError as error:
            if error.errno != errno.EINVAL or not handle.direct:
                raise
        else:
            return handle
        # Some file systems accept the flag for direct I/O and refuse the I/O.
        buffered = self._disk.open(handle.path, create=False, direct=False)
        try:
            move(buffered)
        except BaseException:
            self._disk.close(buffered)
            raise
        self._disk.close(handle)
        return buffered

    def _look_at(self, place: int) -> tuple[Handle | None, int]:
        """The handle of a file that was found, or None if it is not ours; and its size."""
        handle = self._disk.open(self._path(place), create=False, direct=True)
        nbytes = self._disk.size(handle)
        if nbytes < HEADER_BYTES:
            self._disk.close(handle)
            return None, nbytes
        block = bytearray(HEADER_BYTES)
        try:
            into = memoryview(block)
            handle = self._first_io(handle, lambda h: transfer.read(self._disk, h, 0, into))
            owner = owner_of(bytes(block), place, self._store_id)
            if owner is Owner.DAMAGED:
                self._counts["headers_repaired"] += 1
                transfer.write(self._disk, handle, 0, self._header(place, nbytes))
        except BaseException:
            self._disk.close(handle)
            raise
        if owner is Owner.FOREIGN:
            self._counts["foreign_segments"] += 1
            self._disk.close(handle)
            return None, nbytes
        return handle, nbytes

    def _remove(self, place: int) -> None:
        """Close and unlink a segment that holds nothing; it may come back after a crash."""
        with self._lock:
            handle = self._handles.pop(place, None)
        if handle is not None:
            self._disk.close(handle)
            with suppress(OSError):
                self._disk.unlink(self._path(place))

    def _header(self, place: int, nbytes: int) -> memoryview:
        return memoryview(encode_header(place, nbytes, self._store_id).ljust(HEADER_BYTES, b"\0"))

    def _path(self, place: int) -> Path:
        return self._directory / f"{place:08d}.seg"

    def _count(self, event: str) -> None:
        with self._lock:
            self._counts[event] += 1


def _checked(extent: Extent, start: int, view: memoryview) -> memoryview:
    view = view.cast("B")
    if start < 0 or start + view.nbytes > extent.nbytes:
        raise SizeMismatch(
            f"ssd: bytes {start} to {start + view.nbytes} of an extent of {extent.nbytes}"
        )
    return view
