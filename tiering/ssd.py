"""The SSD tier: a catalogue in LMDB, with payloads in segment files beside it.

A batch of blobs becomes durable in this order: `write` the data, then `commit`,
which syncs the segments and ends with one catalogue transaction. A blob leaves
in this order: `commit` its removal, then `free` its extent. A crash at any
point leaves whole blobs only, and recovery gives the rest back to the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blobstore.errors import NotEnough, SetupError
from blobstore.tiering.catalogue import Added, Catalogue, Named, Touched
from blobstore.tiering.directory import OwnedDirectory
from blobstore.tiering.disk import BLOCK_BYTES, Disk, PosixDisk
from blobstore.tiering.placement import Placement
from blobstore.tiering.recovery import survey
from blobstore.tiering.row import Row
from blobstore.tiering.segments import Segments
from blobstore.tiering.tier import Extent
from blobstore.units import GIB, KIB, MIB, format_size

__all__ = ["CAPACITY_BYTES_MIN", "INLINE_BYTES_MAX", "Row", "SsdTier"]

INLINE_BYTES_MAX = 64 * KIB
"""Payloads up to this size live inside the catalogue."""

CAPACITY_BYTES_MIN = 4 * MIB
"""Below this the catalogue would leave no room for blobs."""

_SEGMENTS_MAX = 256
"""Segments grow with the capacity, so that open files stay about this few."""


def _utc_now_s() -> float:
    return datetime.now(UTC).timestamp()


class SsdTier:
    """The open SSD tier of one data directory; made by `SsdTier.open`.

    Implements `Tier`. All methods may be called from any thread; all but
    `allocate`, `free`, `stats` and the properties block on the disk.
    """

    name = "ssd"

    def __init__(
        self,
        directory: OwnedDirectory,
        capacity_bytes: int,
        catalogue: Catalogue,
        segments: Segments,
        dropped: Mapping[str, int],
        wall_clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._catalogue = catalogue
        self._segments = segments
        self._dropped = dropped
        self._wall_clock = wall_clock
        self._counts = {"commits": 0, "dead_readers": 0}

    @classmethod
    def open(
        cls,
        directory: Path,
        capacity_bytes: int,
        *,
        disk: Disk | None = None,
        wall_clock: Callable[[], float] = _utc_now_s,
    ) -> SsdTier:
        """Own `directory`, make or read what is in it, and drop what cannot be believed.

        Raises DirectoryInUse, NewerFormat, NotEnough, or SetupError for a
        directory that cannot be used; nothing is then kept open. Rows that are
        dropped are counted in `stats`.
        """
        disk = disk or PosixDisk()
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise NotEnough(
                f"the SSD tier needs at least {format_size(CAPACITY_BYTES_MIN)}, "
                f"wanted were {format_size(capacity_bytes)}"
            )
        with ExitStack() as undo:
            owned = OwnedDirectory(directory, disk)
            undo.callback(owned.close)
            try:
                tier = _open_owned(owned, capacity_bytes, disk, wall_clock, undo)
            except OSError as error:
                raise SetupError(f"{directory} cannot be opened: {error}") from error
            undo.pop_all()
        return tier

    @property
    def capacity_bytes(self) -> int:
        """The hard limit of what the tier takes on the disk, catalogue included."""
        return self._capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What `allocate` can still hand out."""
        return self._segments.free_bytes

    @property
    def used_bytes(self) -> int:
        """Physical: extents in whole blocks, the catalogue, and the room kept for both.

        Exceeds the capacity only after one that was lowered between two openings.
        """
        return self._segments.taken_bytes + self._catalogue.granted_bytes

    def rows(self) -> Iterator[Row]:
        """All committed blobs, in no useful order; times of use are never in the future."""
        yield from self._catalogue.rows(self._wall_clock())
        self._catalogue.forget_pages()

    def namespaces(self) -> dict[bytes, bytes]:
        """The declared namespaces: id → canonical encoding."""
        return self._catalogue.namespaces()

    def declare(self, namespace: bytes, canonical: bytes) -> None:
        """Remember a namespace durably; again is free. Raises Full, StorageFailed."""
        self._catalogue.declare(namespace, canonical)

    def allocate(self, nbytes: int) -> Extent:
        """Set aside room in a segment; no I/O. Raises Full."""
        return self._segments.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        """Give an extent back, after the commit that removed its row; no I/O.

        Its bytes stay until the last read of it has ended. `trim` gives what is
        not used again to the file system.
        """
        self._segments.free(extent)

    def trim(self) -> None:
        """Punch holes where more was freed than is kept for the next writes; may take long."""
        self._segments.trim()

    def write(self, extent: Extent, start: int, data: memoryview) -> None:
        """As `Tier.write`; durable and visible only by `commit`."""
        self._segments.write(extent, start, data)

    def sync(self, extent: Extent) -> None:
        """Make what was written durable ahead of its commit, which then need not. Raises
        StorageFailed."""
        self._segments.sync([extent])

    def read(self, extent: Extent, start: int, into: memoryview) -> None:
        """As `Tier.read`."""
        self._segments.read(extent, start, into)

    def read_inline(self, namespace: bytes, key: bytes, into: memoryview) -> None:
        """Copy a payload that lies in the catalogue; StorageFailed if it is not there whole."""
        self._catalogue.read_inline(namespace, key, into)

    def commit(
        self, add: Sequence[Added], remove: Sequence[Named] = (), touch: Sequence[Touched] = ()
    ) -> None:
        """Make one batch durable: removals, additions, times of last use.

        `add` holds rows with their payload where that goes into the catalogue;
        extents were written before. A row of the same key is replaced; its
        extent stays the caller's, and its payload in the catalogue stays where
        none is given, unless the new row is a hole's. Raises Full if the catalogue cannot grow,
        StorageFailed if the disk refuses, InvalidRequest for rows the format
        cannot hold or of undeclared namespaces. No addition is then visible;
        the extents stay allocated, and the removals can be repeated.
        """
        self._segments.sync(row.extent for row, _ in add if row.extent is not None)
        self._catalogue.apply(add, remove, touch)
        self._counts["commits"] += 1

    def maintain(self) -> None:
        """What has to be done every minute or so: dead readers, and punches that failed."""
        self._counts["dead_readers"] += self._catalogue.clear_dead_readers()
        self._segments.trim()

    def physical_bytes(self) -> int:
        """What the file system says that the tier takes now; once trimmed, never above
        `used_bytes` by more than its own bookkeeping."""
        return self._segments.allocated_bytes() + self._catalogue.granted_bytes

    def stats(self) -> dict[str, Any]:
        """Sizes and counters by name."""
        return {
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "free_bytes": self.free_bytes,
            "catalogue_bytes": self._catalogue.granted_bytes,
            "catalogue_live_bytes": self._catalogue.live_bytes,
            "damaged_namespaces": self._catalogue.damaged_namespaces,
            "boots": self._catalogue.boots,
            "readers": self._catalogue.n_readers,
            **self._segments.stats(),
            **self._counts,
            "rows_dropped": dict(self._dropped),
        }

    def close(self) -> None:
        """Give spare room back to the file system and close; again is harmless.

        No other call may be in flight.
        """
        with ExitStack() as steps:
            steps.callback(self._directory.close)
            steps.callback(self._catalogue.close)
            steps.callback(self._segments.close)
            with suppress(OSError):
                self._segments.trim(0)


def _open_owned(
    owned: OwnedDirectory,
    capacity_bytes: int,
    disk: Disk,
    wall_clock: Callable[[], float],
    undo: ExitStack,
) -> SsdTier:
    segments_path, catalogue_path = owned.path / "segments", owned.path / "catalogue"
    disk.mkdir(segments_path)
    catalogue_path.mkdir(mode=0o700, exist_ok=True)
    disk.sync_dir(owned.path)
    reserve_bytes = min(max(capacity_bytes // 64, 256 * KIB), 4 * MIB)
    catalogue = Catalogue(catalogue_path, disk, reserve_bytes)
    undo.callback(catalogue.close)
    placement = Placement(
        capacity_bytes,
        segment_bytes=max(GIB, capacity_bytes // _SEGMENTS_MAX // GIB * GIB),
        spare_bytes_max=min(capacity_bytes // 16, 256 * MIB) // BLOCK_BYTES * BLOCK_BYTES,
    )
    segments = Segments(disk, segments_path, catalogue.store_id, placement)
    undo.callback(segments.close)
    findings = survey(catalogue, segments.scan())
    catalogue.discard(findings.dropped)
    segments.adopt(findings.spans)
    placement.limit_bytes -= catalogue.granted_bytes
    catalogue.share_room(segments.set_aside, lambda: segments.trim(0))
    tier = SsdTier(owned, capacity_bytes, catalogue, segments, findings.reasons, wall_clock)
    tier.maintain()
    return tier
