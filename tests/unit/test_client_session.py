"""The arena in a client's process: mapped once, populated, and gone with the last view."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import mapping as mapping_module
from blobstore.clients.mapping import Bytes, Mapping
from blobstore.clients.session import Session
from blobstore.protocol import Welcome
from tests.support.polling import poll_until

NBYTES = 4 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[int]:
    fd = os.memfd_create("arena-under-test", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, NBYTES)
    os.pwrite(fd, b"\x05", 3 * PAGE)
    yield fd
    os.close(fd)


def read_only(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def extent_of(session: Session, offset: int, nbytes: int) -> Bytes:
    array = session.extent(offset, nbytes)
    assert array is not None
    return array


def session(fd: int, background_bytes: int = 1 << 30) -> Session:
    welcome = Welcome(1, 7, NBYTES, 8 << 20, 1 << 20)
    return Session(welcome, read_only(fd), os.dup(fd), background_bytes)


def mapped() -> list[str]:
    """Permissions of the arena's mappings in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if "arena-under-test" in line)


def resident_bytes(array: Bytes) -> int:
    """How much of a mapping has page table entries in this process."""
    start = f"{array.ctypes.data:x}-"
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(start):
            found = True
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


class Lease:
    disowned = False

    def disown(self) -> None:
        self.disowned = True


def test_the_arena_is_mapped_for_reading_only_until_something_is_written(arena: int) -> None:
    ours = session(arena)
    assert mapped() == ["r--s"]
    array = extent_of(ours, PAGE, 10)
    assert mapped() == ["r--s", "rw-s"]
    array[:] = 9
    assert os.pread(arena, 10, PAGE) == b"\x09" * 10
    extent_of(ours, 0, 1)[:] = 1
    assert mapped() == ["r--s", "rw-s"], "once for all"
    assert ours.hold(1, Lease())[PAGE] == 9
    ours.close()


def test_nothing_is_mapped_for_writing_once_a_session_was_closed(arena: int) -> None:
    ours = session(arena)
    ours.close()
    assert ours.extent(0, 10) is None
    assert mapped() == ["r--s"]
    with pytest.raises(ValueError, match="no descriptor"):
        Mapping(-1, NBYTES, writable=True)


def test_page_tables_are_full_when_a_client_has_connected(arena: int) -> None:
    ours = session(arena)
    assert resident_bytes(ours._readable) == NBYTES
    assert resident_bytes(extent_of(ours, 0, NBYTES)) == NBYTES
    ours.close()


def test_large_arenas_are_populated_in_the_background(arena: int) -> None:
    ours = session(arena, background_bytes=0)
    poll_until(lambda: resident_bytes(ours._readable) == NBYTES)
    extent = extent_of(ours, 0, NBYTES)
    poll_until(lambda: resident_bytes(extent) == NBYTES)
    ours.close()


def test_kernels_that_cannot_populate_are_helped_by_touching(
    arena: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping_module, "_MADV_POPULATE_READ", 9999)
    monkeypatch.setattr(mapping_module, "_MADV_POPULATE_WRITE", 9999)
    ours = session(arena)
    assert resident_bytes(ours._readable) == NBYTES
    assert resident_bytes(extent_of(ours, 0, NBYTES)) == NBYTES
    assert os.pread(arena, 1, 3 * PAGE) == b"\x05", "touched by reading"
    ours.close()


def test_closing_ends_the_population(arena: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping_module, "_STEP_BYTES", PAGE)
    in_step, go = threading.Event(), threading.Event()

    class SlowLibc:
        @staticmethod
        def madvise(*args: object) -> int:
            in_step.set()
            assert go.wait(5)
            return 0

    monkeypatch.setattr(mapping_module, "_libc", SlowLibc)
    ours = session(arena, background_bytes=0)
    assert in_step.wait(5)
    closing = threading.Thread(target=ours.close)
    closing.start()
    go.set()
    closing.join(5)
    assert not closing.is_alive()
    assert not [t for t in threading.enumerate() if t.name == "blobstore-populate"]


def test_the_arena_is_unmapped_when_session_and_views_are_gone(arena: int) -> None:
    gc.disable()
    try:
        ours = session(arena)
        extent = extent_of(ours, 0, 10)
        view = ours.hold(1, Lease())[5:6]
        ours.close()
        del ours
        assert mapped() == ["r--s", "rw-s"]
        del extent
        assert mapped() == ["r--s"]
        assert view[0] == 0
        del view
        assert mapped() == []
    finally:
        gc.enable()


def test_a_failed_mapping_leaves_nothing_open(arena: int) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    welcome = Welcome(1, 7, 2 * NBYTES, 8 << 20, 1 << 20)
    with pytest.raises(ValueError, match="mmap length is greater"):
        Session(welcome, read_only(arena), os.dup(arena))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_address_range_of_a_child_stays_taken(arena: int) -> None:
    mapping = Mapping(arena, NBYTES, writable=True)
    array = mapping.array()
    pid = os.fork()
    if pid == 0:
        with Path("/proc/self/maps").open() as maps:
            line = next(line for line in maps if line.startswith(f"{array.ctypes.data:x}-"))
        os._exit(0 if line.split()[1] == "---p" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    array[:10] = 3
    assert os.pread(arena, 10, 0) == b"\x03" * 10


def test_the_constants_are_this_systems() -> None:
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mapping_module._MAP_FIXED
    anonymous = mmap.mmap(-1, PAGE)
    address = np.frombuffer(anonymous, np.uint8).ctypes.data
    libc = mapping_module._libc
    assert libc.mmap(address, PAGE, mmap.PROT_READ, fixed, -1, 0) == address
    assert libc.madvise(address, PAGE, mapping_module._MADV_POPULATE_READ) == 0
    assert libc.madvise(address, PAGE, mapping_module._MADV_POPULATE_WRITE) != 0, "read-only"
    assert ctypes.get_errno() != 0
