"""The simulated disk forgets what a real one may forget, and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from blobstore.tiering.disk import BLOCK_BYTES, Handle
from tests.support.sim_disk import PowerLost, SimDisk, Survival

FOLDER = Path("/sim")
OLD, NEW = b"o" * BLOCK_BYTES, b"n" * BLOCK_BYTES


def _durable_file(disk: SimDisk, content: bytes) -> Handle:
    handle = disk.open(FOLDER / "f", create=True, direct=False)
    disk.pwritev(handle, [memoryview(content)], 0)
    disk.sync(handle)
    disk.sync_dir(FOLDER)
    return handle


def _after(disk: SimDisk, survival: Survival, seed: int = 0) -> bytes:
    disk.restart(survival, seed)
    handle = disk.open(FOLDER / "f", create=False, direct=False)
    into = bytearray(disk.size(handle))
    disk.preadv(handle, [memoryview(into)], 0)
    disk.close(handle)
    return bytes(into)


@pytest.mark.parametrize(("survival", "expected"), [("dropped", OLD), ("kept", NEW)])
def test_unsynced_bytes_are_dropped_or_kept(survival: Survival, expected: bytes) -> None:
    disk = SimDisk()
    disk.pwritev(_durable_file(disk, OLD), [memoryview(NEW)], 0)
    assert _after(disk, survival) == expected


def test_unsynced_bytes_are_torn_by_sectors() -> None:
    seen = set()
    for seed in range(20):
        disk = SimDisk()
        disk.pwritev(_durable_file(disk, OLD), [memoryview(NEW)], 0)
        after = _after(disk, "torn", seed)
        sectors = {after[i : i + 512] for i in range(0, BLOCK_BYTES, 512)}
        assert sectors <= {b"o" * 512, b"n" * 512}
        seen.add(len(sectors))
    assert seen == {1, 2}


def test_unsynced_writes_survive_in_any_order() -> None:
    last = set()
    for seed in range(20):
        disk = SimDisk()
        handle = _durable_file(disk, OLD)
        for data in (b"1" * 512, b"2" * 512):
            disk.pwritev(handle, [memoryview(data)], 0)
        last.add(_after(disk, "torn", seed)[:1])
    assert last == {b"o", b"1", b"2"}


def test_synced_bytes_survive_everything() -> None:
    for survival in ("dropped", "kept", "torn"):
        disk = SimDisk()
        _durable_file(disk, NEW)
        assert _after(disk, survival) == NEW


def test_a_name_survives_once_its_directory_is_synced() -> None:
    disk = SimDisk()
    handle = disk.open(FOLDER / "f", create=True, direct=False)
    disk.sync(handle)
    disk.restart("dropped", 0)
    assert disk.listdir(FOLDER) == []
    _durable_file(disk, NEW)
    disk.unlink(FOLDER / "f")
    disk.restart("dropped", 0)
    assert disk.listdir(FOLDER) == ["f"]


def test_power_is_cut_at_the_step_asked_for_and_stays_off() -> None:
    disk = SimDisk()
    handle = _durable_file(disk, OLD)
    disk.cut_at = disk.steps + 1
    disk.sync(handle)
    with pytest.raises(PowerLost):
        disk.sync(handle)
    with pytest.raises(PowerLost):
        disk.size(disk.open(FOLDER / "f", create=False, direct=False))
    assert _after(disk, "dropped") == OLD


def test_room_ends() -> None:
    disk = SimDisk(2 * BLOCK_BYTES)
    handle = disk.open(FOLDER / "f", create=True, direct=False)
    disk.pwritev(handle, [memoryview(OLD)], 0)
    disk.pwritev(handle, [memoryview(NEW)], 0)
    with pytest.raises(OSError, match="No space") as caught:
        disk.pwritev(handle, [memoryview(NEW * 2)], BLOCK_BYTES)
    assert caught.value.errno == errno.ENOSPC
    disk.punch(handle, 0, BLOCK_BYTES)
    disk.pwritev(handle, [memoryview(NEW * 2)], BLOCK_BYTES)


def test_direct_io_must_be_aligned() -> None:
    disk = SimDisk()
    handle = disk.open(FOLDER / "f", create=True, direct=True)
    for view in (memoryview(bytes(100)), memoryview(bytearray(BLOCK_BYTES + 1))[1:]):
        with pytest.raises(OSError, match="aligned"):
            disk.pwritev(handle, [view], 0)
