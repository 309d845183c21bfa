from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from blobstore.errors import InvalidRequest, NewerFormat, StorageFailed
from blobstore.tiering.disk import Handle
from blobstore.tiering.placement import HEADER_BYTES, Placement, blocks_of
from blobstore.tiering.segments import Segments
from blobstore.tiering.tier import Extent
from blobstore.units import KIB, MIB
from tests.support.polling import poll_until
from tests.support.sim_disk import SimDisk

FOLDER = Path("/sim/segments")
FIRST = FOLDER / "00000001.seg"
STORE_ID = bytes(range(16))
SPARE_BYTES = 256 * KIB
NO_SPANS = np.empty((0, 3), np.int64)


def _segments(disk: SimDisk, *, store_id: bytes = STORE_ID, spans: object = NO_SPANS) -> Segments:
    placement = Placement(
        16 * MIB, segment_bytes=HEADER_BYTES + 4 * MIB, spare_bytes_max=SPARE_BYTES
    )
    segments = Segments(disk, FOLDER, store_id, placement)
    segments.scan()
    segments.adopt(np.array(spans, np.int64).reshape(-1, 3))
    return segments


def _data(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def _put(segments: Segments, data: bytes) -> Extent:
    extent = segments.allocate(len(data))
    segments.write(extent, 0, memoryview(data))
    return extent


def _get(segments: Segments, extent: Extent) -> bytes:
    into = bytearray(extent.nbytes)
    segments.read(extent, 0, memoryview(into))
    return bytes(into)


def _failing(*names: str, code: int = errno.EIO) -> Callable[[str, Path], None]:
    def before_step(name: str, path: Path) -> None:
        if name in names:
            raise OSError(code, os.strerror(code))

    return before_step


class _SlowReads(SimDisk):
    """Reads wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.reading = threading.Event()

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        self.reading.set()
        assert self.go.wait(10)
        super().preadv(handle, views, offset)


def test_bytes_stay_until_the_last_read_of_them_has_ended() -> None:
    disk = _SlowReads()
    segments = _segments(disk)
    data = _data(MIB)
    extent = _put(segments, data)
    disk.go.clear()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(_get(segments, extent)))
    reader.start()
    assert disk.reading.wait(10)
    segments.free(extent)
    assert segments.stats()["frees_waiting"] == 1
    # Nobody else gets the room meanwhile, nor a new reader the bytes.
    assert segments.allocate(MIB) != extent
    with pytest.raises(InvalidRequest):
        _get(segments, extent)
    with pytest.raises(InvalidRequest, match="freed already"):
        segments.free(extent)
    disk.go.set()
    reader.join()
    assert found == [data]
    poll_until(lambda: segments.stats()["frees_waiting"] == 0, 5)
    assert segments.stats()["live_bytes"] == MIB
    with pytest.raises(InvalidRequest):
        segments.free(extent)


def test_a_failed_read_ends_like_any_other() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = _put(segments, _data(MIB))
    disk.before_step = _failing("preadv")
    with pytest.raises(StorageFailed, match=r"cannot read .*00000001\.seg") as caught:
        _get(segments, extent)
    assert caught.value.errno == errno.EIO
    disk.before_step = _failing()
    assert _get(segments, extent) == _data(MIB)
    stats = segments.stats()
    assert (stats["read_errors"], stats["reads_in_flight"]) == (1, 0)
    segments.free(extent)
    assert segments.stats()["live_bytes"] == 0


def test_a_failed_write_is_typed_counted_and_can_be_repeated() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = segments.allocate(MIB)
    disk.before_step = _failing("pwritev")
    with pytest.raises(StorageFailed, match="cannot write"):
        segments.write(extent, 0, memoryview(_data(MIB)))
    disk.before_step = _failing()
    segments.write(extent, 0, memoryview(_data(MIB)))
    assert _get(segments, extent) == _data(MIB)
    assert segments.stats()["write_errors"] == 1


def test_a_segment_that_could_not_be_made_leaves_no_file() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = segments.allocate(MIB)
    disk.before_step = _failing("sync_dir")
    with pytest.raises(StorageFailed):
        segments.write(extent, 0, memoryview(_data(MIB)))
    assert disk.listdir(FOLDER) == []
    disk.before_step = _failing()
    segments.write(extent, 0, memoryview(_data(MIB)))
    assert _get(segments, extent) == _data(MIB)


def test_a_full_disk_gives_up_spare_blocks_first() -> None:
    disk = SimDisk(capacity_bytes=HEADER_BYTES + MIB)
    segments = _segments(disk)
    small = [_put(segments, _data(70_000, n)) for n in range(8)]
    for extent in small[::2]:
        segments.free(extent)
    assert segments.stats()["spare_bytes"] > 0
    kept = [_put(segments, _data(300_000, n)) for n in (20, 21)]  # too long for any spare run
    assert [_get(segments, extent) for extent in kept] == [_data(300_000, n) for n in (20, 21)]
    with pytest.raises(StorageFailed) as caught:
        _put(segments, _data(300_000))
    assert caught.value.errno == errno.ENOSPC
    disk.capacity_bytes *= 2
    assert _get(segments, _put(segments, _data(300_000))) == _data(300_000)


def test_what_cannot_be_punched_stays_in_the_accounts_until_it_can() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extents = [_put(segments, _data(MIB, n)) for n in range(3)]
    disk.before_step = _failing("punch", code=errno.EOPNOTSUPP)
    for extent in extents[:2]:
        segments.free(extent)
        segments.trim()
    stats = segments.stats()
    assert stats["punch_errors"] == 2
    assert stats["spare_bytes"] >= 2 * MIB
    disk.before_step = _failing()
    segments.trim()
    assert segments.stats()["spare_bytes"] <= SPARE_BYTES
    assert disk.allocated_total() <= MIB + SPARE_BYTES + HEADER_BYTES


def test_an_empty_segment_is_removed() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extents = [_put(segments, _data(2 * MIB, n)) for n in range(3)]
    assert sorted(disk.listdir(FOLDER)) == ["00000001.seg", "00000002.seg"]
    for extent in extents[:2]:
        segments.free(extent)
    segments.trim(0)
    assert disk.listdir(FOLDER) == ["00000002.seg"]
    assert _get(segments, extents[2]) == _data(2 * MIB, 2)


def test_room_is_prepared_once_and_ahead_of_the_writes() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    _put(segments, _data(8 * KIB))
    _put(segments, _data(8 * KIB))
    names = [name for name in disk.history if name in ("preallocate", "pwritev")]
    assert names == ["pwritev", "preallocate", "pwritev", "pwritev"]  # a header comes first


def test_a_disk_that_cannot_prepare_room_is_written_all_the_same() -> None:
    disk = SimDisk()
    disk.before_step = _failing("preallocate", code=errno.EOPNOTSUPP)
    segments = _segments(disk)
    assert _get(segments, _put(segments, _data(MIB))) == _data(MIB)


class _Treacherous(SimDisk):
    """Accepts the flag for direct I/O, and refuses the I/O."""

    def pwritev(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        if handle.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().pwritev(handle, views, offset)

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        if handle.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().preadv(handle, views, offset)


def test_a_fault_after_direct_io_was_refused_leaves_nothing_open() -> None:
    disk = _Treacherous()
    segments = _segments(disk)
    extent = segments.allocate(70_000)
    disk.before_step = _failing("pwritev")
    with pytest.raises(StorageFailed):
        segments.write(extent, 0, memoryview(_data(70_000)))
    assert disk.n_open == 0
    disk.before_step = _failing()
    segments.write(extent, 0, memoryview(_data(70_000)))
    assert disk.n_open == 1
    segments.close()
    assert disk.n_open == 0


def test_a_file_system_that_accepts_direct_io_and_refuses_it_is_used_through_the_cache() -> None:
    disk = _Treacherous()
    segments = _segments(disk)
    extent = _put(segments, _data(70_000))
    assert _get(segments, extent) == _data(70_000)
    assert segments.stats()["direct"] is False
    disk.restart("kept", 0)
    found = _segments(disk, spans=[(extent.place, extent.offset, extent.nbytes)])
    assert _get(found, extent) == _data(70_000)


def test_through_the_cache_everything_works_the_same() -> None:
    segments = _segments(SimDisk(direct=False))
    extents = [_put(segments, _data(size, size)) for size in (1, 70_001, MIB + 1)]
    assert [_get(segments, e) for e in extents] == [_data(e.nbytes, e.nbytes) for e in extents]


def test_found_segments_keep_their_extents_and_give_up_the_rest() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    kept, lost, other = (_put(segments, _data(MIB, n)) for n in range(3))
    alone = _put(segments, _data(3 * MIB, 4))
    segments.sync((kept, lost, other, alone))
    disk.restart("kept", 0)
    spans = [(e.place, e.offset, e.nbytes) for e in (kept, other)]
    found = _segments(disk, spans=spans)
    assert [_get(found, e) for e in (kept, other)] == [_data(MIB, 0), _data(MIB, 2)]
    assert disk.allocated_total() == HEADER_BYTES + 2 * MIB
    assert disk.listdir(FOLDER) == ["00000001.seg"]
    for extent in (lost, alone):
        with pytest.raises(InvalidRequest):
            _get(found, extent)
    assert _get(found, _put(found, _data(MIB, 9))) == _data(MIB, 9)


def _damage(disk: SimDisk, path: Path, offset: int, data: bytes) -> None:
    handle = disk.open(path, create=False, direct=False)
    disk.pwritev(handle, [memoryview(data)], offset)
    disk.close(handle)


def test_a_damaged_header_is_repaired_and_costs_nothing() -> None:
    disk = SimDisk()
    extent = _put(_segments(disk), _data(70_000))
    disk.restart("kept", 0)
    _damage(disk, FIRST, 9, b"\xff")
    spans = [(extent.place, extent.offset, extent.nbytes)]
    found = _segments(disk, spans=spans)
    assert _get(found, extent) == _data(70_000)
    assert found.stats()["headers_repaired"] == 1
    disk.restart("kept", 0)
    assert _segments(disk, spans=spans).stats()["headers_repaired"] == 0


def test_segments_of_another_store_are_not_ours() -> None:
    disk = SimDisk()
    _put(_segments(disk, store_id=bytes(16)), _data(70_000))
    disk.restart("kept", 0)
    found = _segments(disk)
    assert found.stats()["foreign_segments"] == 1
    assert disk.listdir(FOLDER) == []
    assert _get(found, _put(found, _data(70_000))) == _data(70_000)


def test_a_segment_of_a_later_format_stops_the_scan_and_stays() -> None:
    disk = SimDisk()
    _put(_segments(disk), _data(70_000))
    disk.restart("kept", 0)
    handle = disk.open(FIRST, create=False, direct=False)
    head = bytearray(40)
    disk.preadv(handle, [memoryview(head)], 0)
    head[8] = 2
    sealed = bytes(head) + xxh3_64_intdigest(bytes(head)).to_bytes(8, "little")
    _damage(disk, FIRST, 0, sealed)
    with pytest.raises(NewerFormat):
        _segments(disk)
    assert disk.listdir(FOLDER) == ["00000001.seg"]


def test_files_that_are_no_segments_are_left_alone() -> None:
    disk = SimDisk()
    for name in ("notes.txt", "1.seg", "00000000.seg"):
        disk.close(disk.open(FOLDER / name, create=True, direct=False))
    _segments(disk)
    assert sorted(disk.listdir(FOLDER)) == ["00000000.seg", "1.seg", "notes.txt"]


def test_parallel_writers_readers_and_frees_keep_bytes_apart() -> None:
    segments = _segments(SimDisk())
    faults: list[str] = []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        held: dict[Extent, bytes] = {}
        for step in range(40):
            if held and rng.random() < 0.5:
                extent = rng.choice(list(held))
                if _get(segments, extent) != held.pop(extent):
                    faults.append(f"{worker}: {extent}")
                segments.free(extent)
            else:
                data = _data(rng.choice((5000, 70_000, 200_000)), worker * 1000 + step)
                held[_put(segments, data)] = data
        for extent, data in held.items():
            if _get(segments, extent) != data:
                faults.append(f"{worker}: {extent}")
            segments.free(extent)
            segments.trim()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    stats = segments.stats()
    assert (stats["live_bytes"], stats["extents"], stats["reads_in_flight"]) == (0, 0, 0)
    assert blocks_of(stats["spare_bytes"]) <= SPARE_BYTES


def test_what_was_synced_is_not_synced_again() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    first, second = _put(segments, _data(MIB, 1)), _put(segments, _data(MIB, 2))
    syncs: list[Path] = []
    disk.before_step = lambda name, path: syncs.append(path) if name == "sync" else None
    segments.sync([first])
    segments.sync([first])
    assert syncs == [FIRST]
    segments.sync([first, second])
    assert syncs == [FIRST] * 2
    segments.write(first, 0, memoryview(_data(4096, 3)))
    segments.sync([first, second])
    assert syncs == [FIRST] * 3


def test_a_sync_that_fails_is_due_again() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = _put(segments, _data(MIB))
    disk.before_step = _failing("sync")
    with pytest.raises(StorageFailed):
        segments.sync([extent])
    syncs: list[Path] = []
    disk.before_step = lambda name, path: syncs.append(path) if name == "sync" else None
    segments.sync([extent])
    assert syncs == [FIRST]


def test_a_sync_during_a_write_does_not_cover_it() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = _put(segments, _data(MIB))
    segments.sync([extent])
    syncs: list[Path] = []

    def sync_meanwhile(name: str, path: Path) -> None:
        if name == "sync":
            syncs.append(path)
        if name == "pwritev" and not syncs:
            segments.sync([extent])

    disk.before_step = sync_meanwhile
    segments.write(extent, 0, memoryview(_data(4096, 1)))
    assert syncs == [FIRST]
    segments.sync([extent])
    assert syncs == [FIRST] * 2


def test_freed_room_is_used_again_before_it_is_punched() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extents = [_put(segments, _data(2 * MIB, n)) for n in range(7)]
    for extent in extents:
        segments.free(extent)
    again = [_put(segments, _data(2 * MIB, n)) for n in range(7)]
    assert [_get(segments, extent) for extent in again] == [_data(2 * MIB, n) for n in range(7)]
    assert segments.stats()["punches"] == 0
    assert disk.allocated_total() <= 16 * MIB


def test_what_is_freed_while_it_is_read_need_not_be_synced_any_more() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = _put(segments, _data(MIB))

    def free_meanwhile(name: str, path: Path) -> None:
        if name == "preadv":
            disk.before_step = lambda name, path: None
            segments.free(extent)

    disk.before_step = free_meanwhile
    assert _get(segments, extent) == _data(MIB)
    assert segments.stats()["extents"] == 0
    syncs: list[Path] = []
    disk.before_step = lambda name, path: syncs.append(path) if name == "sync" else None
    segments.sync([extent])
    assert syncs == []


def test_a_write_during_a_sync_is_not_covered_by_it() -> None:
    disk = SimDisk()
    segments = _segments(disk)
    extent = _put(segments, _data(MIB))
    syncs: list[Path] = []

    def write_meanwhile(name: str, path: Path) -> None:
        if name == "sync":
            syncs.append(path)
            if len(syncs) == 1:
                segments.write(extent, 0, memoryview(_data(4096, 1)))

    disk.before_step = write_meanwhile
    segments.sync([extent])
    segments.sync([extent])
    assert syncs == [FIRST] * 2
