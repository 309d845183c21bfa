"""One contiguous piece of shared memory that is really there.

Owns the file behind the memory, its mapping and its two descriptors. What lies
where in it is the allocator's business; how much to ask for is settled by the
configuration, which knows the limits of the cgroup.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from blobstore.errors import InvalidRequest, NotEnough, SetupError
from blobstore.units import KIB, MIB, format_size

Pages = Literal["small", "transparent", "hugetlb"]
"""What the arena got: ordinary pages, transparent huge pages, or reserved huge pages."""

_log = logging.getLogger(__name__)

# Not mmap.madvise: that one keeps the GIL while the kernel zeroes pages.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; unknown to Python 3.11."""

_STEP_BYTES = 64 * MIB
"""Between two chances for a signal: the kernel undoes an fallocate that one cuts short."""

_POPULATE_THREADS = 8
"""Zeroing pages takes a core per call: 64 GiB on one would delay the start by half a minute."""


class Arena:
    """The shared memory of one daemon; made by `Arena.create`.

    `fd` can be mapped writable, `read_only_fd` cannot. Both, `view` and `array`
    belong to the arena and end with `close`. The memory has no name: nobody can
    unlink it, and it goes with its last user, whichever way he ends.
    """

    def __init__(self, fd: int, nbytes: int, pages: Pages) -> None:
        """Take over `fd`, a file of `nbytes`; on an error the caller keeps it."""
        self.fd = fd
        self.nbytes = nbytes
        self.pages: Pages = pages
        with ExitStack() as undo:
            self.read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self.read_only_fd)
            self._map = mmap.mmap(fd, nbytes)
            undo.pop_all()
        self.view = memoryview(self._map)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        directory: Path | None = None,
        huge_pages: str = "off",
        scratch_bytes: int = 0,
    ) -> Arena:
        """An arena of at least `nbytes`, every page of it allocated before this returns.

        It is a memfd, sealed against resizing, or a nameless file in `directory`
        (on tmpfs). `huge_pages` is `off`, `auto` (where the machine offers them)
        or `require`. So much as `scratch_bytes` more may be taken until this returns,
        for an arena that lies together in physical memory. Blocks for up to a second per
        few GiB, as `populate` does. Raises NotEnough, with what was wanted, what is
        available where, and the remedy; SetupError where no file can be made. A failure
        leaves nothing.
        """
        if nbytes < 1:
            raise InvalidRequest(f"an arena needs at least one byte, found {nbytes}")
        if huge_pages not in ("off", "auto", "require"):
            raise InvalidRequest(f"huge_pages is off, auto or require, found {huge_pages!r}")
        if huge_pages != "off" and directory is None:
            arena = _reserved(nbytes)
            if arena is not None:
                return arena
        nbytes = _round_up(nbytes, mmap.PAGESIZE)
        _refuse_what_cannot_fit(nbytes, directory)
        with ExitStack() as undo:
            fd = _open_file(directory)
            undo.callback(os.close, fd)
            _resize(fd, nbytes, directory)
            arena = cls(fd, nbytes, "small")
            undo.pop_all()
            undo.callback(arena.close)
            if huge_pages != "off":
                arena._ask_for_huge_pages(directory, required=huge_pages == "require")
            with _fragments_taken(scratch_bytes):
                _allocate(fd, nbytes, directory)
            if directory is None:
                _seal(fd)
            undo.pop_all()
        return arena

    def populate(self) -> None:
        """Fill in the page tables, so that no first touch of a page costs a fault later.

        Keeps what the memory holds. Blocks, on several cores, without the GIL.
        """
        if not self._prefault():
            # Before Linux 5.14. A read suffices in shared memory, and unlike a
            # write it cannot undo what a client is writing.
            self.array[:: mmap.PAGESIZE].max()

    def wipe(self, offset: int, nbytes: int) -> None:
        """Overwrite a range with zeros, without the GIL; its pages stay allocated."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        self.array[offset : offset + nbytes] = 0

    def close(self) -> None:
        """Close both descriptors and unmap; again is harmless.

        Where views of the memory are still in use, it is unmapped with the last.
        """
        if self.fd < 0:
            return
        os.close(self.read_only_fd)
        os.close(self.fd)
        self.fd = self.read_only_fd = -1
        with suppress(BufferError):
            self.view.release()  # others may have kept it for longer than they use it
        self.view, self.array = memoryview(b""), np.empty(0, np.uint8)
        with suppress(BufferError):
            self._map.close()
        del self._map  # so that the last view to die unmaps it

    def _prefault(self) -> bool:
        base = self.array.ctypes.data

        def step(start: int) -> bool:
            length = min(_STEP_BYTES, self.nbytes - start)
            failed: int = _madvise(base + start, length, _MADV_POPULATE_WRITE)
            return not failed

        with ThreadPoolExecutor(min(_POPULATE_THREADS, os.cpu_count() or 1)) as threads:
            return all(threads.map(step, range(0, self.nbytes, _STEP_BYTES)))

    def _ask_for_huge_pages(self, directory: Path | None, *, required: bool) -> None:
        # Before the file has pages: small ones would not be exchanged.
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._prefault()
        found = _huge_mapped_bytes(self.array.ctypes.data)
        if found:
            self.pages = "transparent"
        # A tail shorter than a huge page cannot be one.
        least = max(self.nbytes - _huge_page_bytes(), 0) + 1 if required else 1
        if found < least:
            problem = (
                f"arena: wanted {format_size(self.nbytes)} in huge pages, got {format_size(found)}"
            )
            remedy = _huge_page_remedy(self.nbytes, directory)
            if required:
                raise NotEnough(f"{problem}: {remedy}, or set huge_pages to auto")
            _log.warning("%s, ordinary ones are used instead: %s", problem, remedy)


def _reserved(nbytes: int) -> Arena | None:
    """An arena of huge pages that the administrator reserved, if there are enough."""
    nbytes = _round_up(nbytes, _huge_page_bytes())
    try:
        fd = os.memfd_create(
            "blobstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB
        )
    except OSError:
        return None
    try:
        os.posix_fallocate(fd, 0, nbytes)
        _seal(fd)
        return Arena(fd, nbytes, "hugetlb")
    except OSError:
        os.close(fd)
        return None


def _open_file(directory: Path | None) -> int:
    if directory is None:
        return os.memfd_create("blobstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return os.dup(file.fileno())
    except OSError as e:
        raise SetupError(
            f"arena: cannot make a file in {directory}: {e.strerror}; "
            "name a writable directory on tmpfs, or none for anonymous shared memory"
        ) from e


def _refuse_what_cannot_fit(nbytes: int, directory: Path | None) -> None:
    # First: fallocate would fill the file system for everybody, and a memfd has
    # no limit of its own, so that the kernel would kill somebody to make room.
    try:
        available = _available_bytes(directory)
    except OSError as e:
        raise SetupError(f"arena: no directory {directory}: {e.strerror}; create it") from e
    if nbytes > available:
        raise _not_enough(nbytes, available, directory)


def _allocate(fd: int, nbytes: int, directory: Path | None) -> None:
    """Give the file every page: without, any later touch may end in SIGBUS."""
    try:
        for start in range(0, nbytes, _STEP_BYTES):
            os.posix_fallocate(fd, start, min(_STEP_BYTES, nbytes - start))
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            had = os.fstat(fd).st_blocks * 512
            raise _not_enough(nbytes, had + _available_bytes(directory), directory) from e
        raise _refused(e, nbytes, directory) from e


@contextmanager
def _fragments_taken(scratch_bytes: int) -> Iterator[None]:
    """Hold short runs of free memory meanwhile, so that the arena gets the long ones.

    The kernel hands out the shortest first, and a disk request takes only so many
    runs: the same reads took 323 ms into short ones and 222 ms into long ones.
    """
    nbytes = min(_fragment_bytes(), scratch_bytes)
    fd = os.memfd_create("blobstore-fragments", os.MFD_CLOEXEC)
    try:
        with suppress(OSError):
            for start in range(0, nbytes, _STEP_BYTES):
                os.posix_fallocate(fd, start, min(_STEP_BYTES, nbytes - start))
        yield
    finally:
        os.close(fd)


def _fragment_bytes() -> int:
    """Free memory in runs shorter than a huge page; 0 where the kernel does not say."""
    orders = (_huge_page_bytes() // mmap.PAGESIZE).bit_length() - 1
    pages = 0
    with suppress(OSError):
        for line in Path("/proc/buddyinfo").read_text().splitlines():
            counts = line.split()[4 : 4 + orders]
            pages += sum(int(count) << order for order, count in enumerate(counts))
    return pages * mmap.PAGESIZE


def _resize(fd: int, nbytes: int, directory: Path | None) -> None:
    try:
        os.ftruncate(fd, nbytes)
    except OSError as e:
        raise _refused(e, nbytes, directory) from e


def _refused(e: OSError, nbytes: int, directory: Path | None) -> SetupError:
    return SetupError(
        f"arena: {format_size(nbytes)} refused in {directory or 'memory'}: {e.strerror}; "
        "check the file size limit (`ulimit -f`), and that a directory is on tmpfs"
    )


def _not_enough(nbytes: int, available: int, directory: Path | None) -> NotEnough:
    if directory is None:
        remedy = "ask for less (--dram), or free memory"
    else:
        remedy = (
            f"ask for less (--dram), enlarge it (`mount -o remount,size=… {directory}`; in a "
            "container, --shm-size), or leave the directory out for anonymous shared memory"
        )
    return NotEnough(
        f"arena: wanted {format_size(nbytes)}, available {format_size(available)} in "
        f"{directory or 'memory'}: {remedy}"
    )


def _huge_page_remedy(nbytes: int, directory: Path | None) -> str:
    if directory is not None:
        return f"mount {directory} as tmpfs with huge=advise"
    pages = _round_up(nbytes, _huge_page_bytes()) // _huge_page_bytes()
    return (
        f"reserve them (`sysctl vm.nr_hugepages={pages}`), or allow transparent ones "
        "(`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`)"
    )


def _available_bytes(directory: Path | None) -> int:
    available = _meminfo_bytes("MemAvailable")
    if directory is not None:
        found = os.statvfs(directory)
        available = min(available, found.f_bavail * found.f_frsize)
    return available


def _seal(fd: int) -> None:
    # A client that may write must not be able to take pages away under us.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _huge_page_bytes() -> int:
    return _meminfo_bytes("Hugepagesize") or 2 * MIB


def _meminfo_bytes(field: str) -> int:
    """A line of /proc/meminfo, 0 if the kernel does not have it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    return 0


def _huge_mapped_bytes(address: int) -> int:
    """How much of the mapping that starts at `address` lies in transparent huge pages."""
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name:
            mine = line.startswith(f"{address:08x}-")
        elif mine and name in ("ShmemPmdMapped", "FilePmdMapped"):
            found += int(value.split()[0]) * KIB
    return found
