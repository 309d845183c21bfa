"""The arena: memory that is really there, whoever else wants some."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blobstore.errors import InvalidRequest, NotEnough, SetupError
from blobstore.tiering import arena as arena_module
from blobstore.tiering.arena import Arena
from blobstore.units import MIB
from tests.support.tmpfs import tmpfs


@pytest.fixture(params=["memfd", "directory"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    directory = Path("/dev/shm") if request.param == "directory" else None
    with closing(Arena.create(2 * MIB, directory=directory)) as arena:
        yield arena


def _allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_every_page_is_allocated_at_once(arena: Arena) -> None:
    assert _allocated_bytes(arena.fd) == arena.nbytes == 2 * MIB


def test_sizes_are_rounded_up_to_pages() -> None:
    with closing(Arena.create(mmap.PAGESIZE + 1)) as arena:
        assert arena.nbytes == len(arena.view) == arena.array.nbytes == 2 * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_arena_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidRequest):
        Arena.create(nbytes)


def test_an_unknown_wish_about_huge_pages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'on'"):
        Arena.create(MIB, huge_pages="on")


def test_both_descriptors_show_the_same_memory(arena: Arena) -> None:
    arena.view[5:10] = b"hello"
    for fd, access in [(arena.fd, mmap.ACCESS_WRITE), (arena.read_only_fd, mmap.ACCESS_READ)]:
        with mmap.mmap(fd, arena.nbytes, access=access) as mapped:
            assert mapped[5:10] == b"hello"
    with mmap.mmap(arena.fd, arena.nbytes) as mapped:
        mapped[0:3] = b"bye"
    assert bytes(arena.view[0:3]) == b"bye"


def test_the_read_only_descriptor_cannot_write(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(arena.read_only_fd, arena.nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.pwrite(arena.read_only_fd, b"x", 0)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        os.ftruncate(arena.read_only_fd, 0)


def test_nobody_can_take_pages_away() -> None:
    with closing(Arena.create(MIB)) as arena:
        for nbytes in (0, MIB - 4096, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, nbytes)


def test_the_memory_has_no_name(arena: Arena) -> None:
    assert os.readlink(f"/proc/self/fd/{arena.fd}").endswith("(deleted)")
    assert os.fstat(arena.fd).st_nlink == 0


def test_wiping_clears_the_range_and_keeps_its_pages(arena: Arena) -> None:
    arena.view[:] = b"\xff" * arena.nbytes
    arena.wipe(5000, 10_000)
    assert arena.view[5000:15_000] == bytes(10_000)
    assert (arena.view[4999], arena.view[15_000]) == (0xFF, 0xFF)
    assert _allocated_bytes(arena.fd) == arena.nbytes


def _resident_bytes(address: int) -> int:
    """Resident size of the mapping that starts at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:08x}-"):
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    raise AssertionError("not mapped")


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_populating_maps_every_page_and_keeps_what_they_hold(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "old":
        monkeypatch.setattr(arena_module, "_madvise", lambda *_: -1)
    with closing(Arena.create(4 * MIB)) as arena:
        os.pwrite(arena.fd, b"kept", 4096)
        assert _resident_bytes(arena.array.ctypes.data) < arena.nbytes
        arena.populate()
        assert _resident_bytes(arena.array.ctypes.data) == arena.nbytes
        assert bytes(arena.view[4096:4100]) == b"kept"


def test_closing_again_is_harmless_and_closes_both_descriptors() -> None:
    arena = Arena.create(MIB)
    fds = arena.fd, arena.read_only_fd
    arena.close()
    arena.close()
    for fd in fds:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(fd)
    assert len(arena.view) == arena.array.nbytes == 0


def test_views_outlive_the_close() -> None:
    arena = Arena.create(MIB)
    view = arena.view[:4]
    view[:] = b"last"
    arena.close()
    assert bytes(view) == b"last"


_CLIENT = """
import mmap, sys
mapped = mmap.mmap(int(sys.argv[1]), 0, access=mmap.ACCESS_READ)
print(mapped[:5].decode(), flush=True)
how = sys.stdin.readline().strip()
if how == "raise":
    raise SystemExit("on purpose")
if how == "read on":
    print(mapped[:5].decode(), flush=True)
"""


def _client(arena: Arena) -> subprocess.Popen[str]:
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, str(arena.read_only_fd)],
        pass_fds=[arena.read_only_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "hello\n"
    return client


@pytest.mark.parametrize("end", ["return", "raise", "kill"])
def test_a_client_that_leaves_takes_nothing_with_it(arena: Arena, end: str) -> None:
    """Field failure B42."""
    arena.view[:5] = b"hello"
    with _client(arena) as client:
        if end == "kill":
            client.send_signal(signal.SIGKILL)
        _, complaints = client.communicate("" if end == "kill" else end)
        assert complaints == ("on purpose\n" if end == "raise" else "")
    assert bytes(arena.view[:5]) == b"hello"
    with _client(arena) as client:
        client.communicate("return")


def test_a_client_keeps_the_memory_that_it_has_mapped() -> None:
    arena = Arena.create(MIB)
    arena.view[:5] = b"hello"
    with _client(arena) as client:
        arena.close()
        out, complaints = client.communicate("read on")
    assert (out, complaints) == ("hello\n", "")


def test_more_than_the_machine_has_is_refused_with_numbers() -> None:
    began = time.monotonic()
    with pytest.raises(NotEnough, match=r"wanted 1024 TiB, available \d.* in memory: .*--dram"):
        Arena.create(1 << 50)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("name", ["missing", "file"])
def test_an_unusable_directory_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=str(tmp_path / name)):
        Arena.create(MIB, directory=tmp_path / name)


@pytest.mark.root
def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", 8 * MIB, "ro") as shm, pytest.raises(SetupError, match=str(shm)):
        Arena.create(MIB, directory=shm)


@pytest.mark.root
@pytest.mark.parametrize("checked", ["before", "by the kernel"])
def test_a_file_system_too_small_is_an_error_at_start(
    tmp_path: Path, checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field failure B41; also when the room goes between the check and the allocation."""
    with tmpfs(tmp_path / "shm", 8 * MIB) as shm:
        if checked == "by the kernel":
            monkeypatch.setattr(arena_module, "_refuse_what_cannot_fit", lambda *_: None)
            monkeypatch.setattr(arena_module, "_STEP_BYTES", 3 * MIB)
        began = time.monotonic()
        with pytest.raises(NotEnough) as refused:
            Arena.create(64 * MIB, directory=shm)
        assert time.monotonic() - began < 2
        for part in ("wanted 64 MiB", "available 8 MiB", str(shm), "remount", "--dram"):
            assert part in str(refused.value)
        left = os.statvfs(shm)
        assert left.f_bavail * left.f_frsize == 8 * MIB
        with closing(Arena.create(6 * MIB, directory=shm)) as arena:
            assert arena.nbytes == 6 * MIB


_FILL = """
import os, sys
with open(sys.argv[1] + "/eaten", "wb", buffering=0) as file:
    try:
        while file.write(bytes(1 << 16)):
            pass
    except OSError:
        pass
"""

_WRITE_ALL = """
import sys
from pathlib import Path
from blobstore.tiering.arena import Arena
arena = Arena.create(4 << 20, directory=Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
arena.array[:] = 1
print(int(arena.array.sum()), flush=True)
"""


@pytest.mark.root
def test_another_process_that_fills_the_file_system_does_no_harm(tmp_path: Path) -> None:
    """In a process of its own: what must not happen is a SIGBUS."""
    with (
        tmpfs(tmp_path / "shm", 8 * MIB) as shm,
        subprocess.Popen(
            [sys.executable, "-c", _WRITE_ALL, str(shm)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner,
    ):
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        subprocess.run([sys.executable, "-c", _FILL, str(shm)], check=True)
        assert os.statvfs(shm).f_bavail == 0
        out, _ = owner.communicate("go\n")
        assert (owner.returncode, out) == (0, f"{4 * MIB}\n")


@pytest.fixture
def no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that offers none, whatever this one does."""
    memfd_create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOSYS, "no huge pages")
        return memfd_create(name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(arena_module, "_huge_mapped_bytes", lambda _: 0)


@pytest.mark.usefixtures("no_huge_pages")
@pytest.mark.parametrize("directory", [None, Path("/dev/shm")])
def test_huge_pages_that_are_not_to_be_had_cost_one_warning(
    directory: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Arena.create(4 * MIB, directory=directory, huge_pages="auto")) as arena:
        assert arena.pages == "small"
        assert _allocated_bytes(arena.fd) == 4 * MIB
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.usefixtures("no_huge_pages")
@pytest.mark.parametrize("nbytes", [MIB, 4 * MIB])
def test_huge_pages_that_are_required_are_an_error_with_a_remedy(nbytes: int) -> None:
    with pytest.raises(NotEnough, match=r"huge pages, got 0 B: .*vm\.nr_hugepages"):
        Arena.create(nbytes, huge_pages="require")


def test_asking_for_huge_pages_gives_a_sound_arena_either_way() -> None:
    with closing(Arena.create(4 * MIB, huge_pages="auto")) as arena:
        assert arena.nbytes >= 4 * MIB
        arena.array[:] = 7
        assert arena.view[-1] == 7
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 0)


def test_scratch_memory_is_given_back_and_never_more_than_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    fallocate = os.posix_fallocate

    def watched(fd: int, offset: int, nbytes: int) -> None:
        taken.append(nbytes)
        fallocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    monkeypatch.setattr(arena_module, "_fragment_bytes", lambda: 1 << 40)
    descriptors = len(os.listdir("/proc/self/fd"))
    with closing(Arena.create(2 * MIB, scratch_bytes=3 * MIB)) as arena:
        assert taken == [3 * MIB, 2 * MIB]
        assert _allocated_bytes(arena.fd) == 2 * MIB
        assert len(os.listdir("/proc/self/fd")) == descriptors + 3  # its two, and the mapping's
    taken.clear()
    with closing(Arena.create(2 * MIB)):
        assert taken == [2 * MIB]


def test_scratch_memory_that_cannot_be_had_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fallocate = os.posix_fallocate

    def refused(fd: int, offset: int, nbytes: int) -> None:
        if nbytes == 3 * MIB:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        fallocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", refused)
    monkeypatch.setattr(arena_module, "_fragment_bytes", lambda: 3 * MIB)
    with closing(Arena.create(2 * MIB, scratch_bytes=3 * MIB)) as arena:
        assert _allocated_bytes(arena.fd) == 2 * MIB
