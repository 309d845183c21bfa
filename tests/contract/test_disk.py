"""What every Disk does. A new one joins by a line in DISKS."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blobstore.tiering.disk import BLOCK_BYTES, Disk, Handle, PosixDisk
from tests.support.sim_disk import SimDisk

DISKS: dict[str, Callable[[], Disk]] = {"posix": PosixDisk, "sim": SimDisk}


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest) -> Disk:
    return DISKS[request.param]()


@contextmanager
def _opened(disk: Disk, path: Path, *, direct: bool = False) -> Iterator[Handle]:
    handle = disk.open(path, create=True, direct=direct)
    try:
        yield handle
    finally:
        disk.close(handle)


def _aligned(nbytes: int, fill: int = 0) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes([fill]) * nbytes
    return view


def _blocks(disk: Disk, handle: Handle, offset: int, n: int) -> bytes:
    into = _aligned(n * BLOCK_BYTES)
    disk.preadv(handle, [into], offset)
    return bytes(into)


@pytest.mark.parametrize("direct", [True, False])
def test_several_views_are_written_and_read_in_one_go(
    disk: Disk, tmp_path: Path, direct: bool
) -> None:
    with _opened(disk, tmp_path / "f", direct=direct) as handle:
        first, second = _aligned(2 * BLOCK_BYTES, 1), _aligned(BLOCK_BYTES, 2)
        disk.pwritev(handle, [first, second], BLOCK_BYTES)
        disk.sync(handle)
        into = _aligned(BLOCK_BYTES), _aligned(2 * BLOCK_BYTES)
        disk.preadv(handle, into, BLOCK_BYTES)
        assert b"".join(into) == bytes(first) + bytes(second)
        assert disk.size(handle) == 4 * BLOCK_BYTES
        assert _blocks(disk, handle, 0, 1) == bytes(BLOCK_BYTES)


def test_reading_past_the_end_is_an_error(disk: Disk, tmp_path: Path) -> None:
    with _opened(disk, tmp_path / "f") as handle:
        disk.truncate(handle, BLOCK_BYTES)
        with pytest.raises(OSError, match=r"\d|short"):
            disk.preadv(handle, [_aligned(2 * BLOCK_BYTES)], 0)


def test_opening_what_is_not_there_is_an_error(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open(tmp_path / "f", create=False, direct=True)


def test_a_punched_range_takes_no_room_and_reads_as_zeros(disk: Disk, tmp_path: Path) -> None:
    with _opened(disk, tmp_path / "f") as handle:
        disk.pwritev(handle, [_aligned(16 * BLOCK_BYTES, 7)], 0)
        disk.sync(handle)
        assert disk.allocated_bytes(handle) >= 16 * BLOCK_BYTES
        disk.punch(handle, 4 * BLOCK_BYTES, 8 * BLOCK_BYTES)
        assert disk.allocated_bytes(handle) <= 9 * BLOCK_BYTES  # a file system may add a block
        assert disk.size(handle) == 16 * BLOCK_BYTES
        data = _blocks(disk, handle, 0, 16)
        kept = b"\7" * 4 * BLOCK_BYTES
        assert data == kept + bytes(8 * BLOCK_BYTES) + kept


def test_room_asked_for_ahead_keeps_what_is_there(disk: Disk, tmp_path: Path) -> None:
    with _opened(disk, tmp_path / "f") as handle:
        disk.truncate(handle, 64 * BLOCK_BYTES)
        disk.pwritev(handle, [_aligned(BLOCK_BYTES, 7)], 0)
        assert disk.allocated_bytes(handle) < 16 * BLOCK_BYTES
        disk.preallocate(handle, 0, 16 * BLOCK_BYTES)
        assert disk.allocated_bytes(handle) >= 16 * BLOCK_BYTES
        assert disk.size(handle) == 64 * BLOCK_BYTES
        assert _blocks(disk, handle, 0, 2) == b"\7" * BLOCK_BYTES + bytes(BLOCK_BYTES)


def test_truncation_cuts(disk: Disk, tmp_path: Path) -> None:
    with _opened(disk, tmp_path / "f") as handle:
        disk.pwritev(handle, [_aligned(4 * BLOCK_BYTES, 7)], 0)
        disk.truncate(handle, BLOCK_BYTES)
        assert disk.size(handle) == BLOCK_BYTES
        assert disk.allocated_bytes(handle) <= 2 * BLOCK_BYTES


def test_names_come_and_go(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    disk.mkdir(folder)
    disk.mkdir(folder)
    for name in ("x", "y"):
        with _opened(disk, folder / name):
            pass
    disk.sync_dir(folder)
    assert sorted(disk.listdir(folder)) == ["x", "y"]
    disk.unlink(folder / "x")
    disk.unlink(folder / "x")
    assert disk.listdir(folder) == ["y"]


def test_the_file_system_says_what_it_is_and_has(disk: Disk, tmp_path: Path) -> None:
    assert disk.free_bytes(tmp_path) > 0
    assert disk.fs_type(tmp_path) > 0
