"""The seam between the SSD tier and the operating system.

Everything the tier does to files goes through a `Disk`, but for LMDB's own
files, so that a test can put a disk in its place that fails or loses power at
any step. `PosixDisk` is the real one: it keeps no state, and its calls release
the GIL while the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blobstore.errors import StorageFailed

BLOCK_BYTES = 4096
"""Alignment of addresses, offsets and lengths that direct I/O accepts on every device."""


@dataclass(frozen=True, slots=True)
class Handle:
    """An open file. `direct`: its I/O bypasses the page cache and must be aligned."""

    number: int
    path: Path
    direct: bool


class Disk(Protocol):
    """Files as the SSD tier needs them. Any thread may call; calls block.

    Every method raises OSError where the disk refuses. Bytes, sizes and holes
    last only once `sync` of their file has returned, names once `sync_dir` of
    their directory has.
    """

    def open(self, path: Path, *, create: bool, direct: bool) -> Handle:
        """Open for reading and writing; direct only where the file system allows it."""
        ...

    def close(self, handle: Handle) -> None:
        """Close the file; nothing is synced."""
        ...

    def pwritev(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        """Write all views one after the other from `offset` on.

        With a direct handle each view is aligned to BLOCK_BYTES. After an error
        the range is undefined.
        """
        ...

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        """Fill all views from `offset` on; a short read is an error."""
        ...

    def sync(self, handle: Handle) -> None:
        """Return once the file's bytes and size would survive a loss of power."""
        ...

    def sync_dir(self, path: Path) -> None:
        """Return once the directory's names would survive a loss of power."""
        ...

    def preallocate(self, handle: Handle, offset: int, nbytes: int) -> None:
        """Give a range inside the file blocks of its own; what is there stays."""
        ...

    def punch(self, handle: Handle, offset: int, nbytes: int) -> None:
        """Give the blocks of a range back to the file system; it reads as zeros."""
        ...

    def truncate(self, handle: Handle, nbytes: int) -> None:
        """Set the file's size; what is added is a hole."""
        ...

    def size(self, handle: Handle) -> int:
        """The file's size, holes included."""
        ...

    def allocated_bytes(self, handle: Handle) -> int:
        """What the file takes on the disk, holes excluded."""
        ...

    def listdir(self, path: Path) -> list[str]:
        """The names in a directory, in any order."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file's name; a file that is not there is no error."""
        ...

    def mkdir(self, path: Path) -> None:
        """Make a directory and what is missing above it; it may exist."""
        ...

    def free_bytes(self, path: Path) -> int:
        """What the file system of `path` has left for us."""
        ...

    def fs_type(self, path: Path) -> int:
        """The magic number of the file system of `path` (statfs)."""
        ...

    def before_commit(self) -> None:
        """Called when a catalogue transaction is about to commit: a crash point for tests."""
        ...

    def after_commit(self) -> None:
        """Called when a catalogue transaction has just become durable."""
        ...


class PosixDisk:
    """The operating system's files."""

    def open(self, path: Path, *, create: bool, direct: bool) -> Handle:
        """As `Disk.open`; new files are readable by the owner alone."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        if direct:
            # EINVAL is how a file system says that it has no direct I/O.
            with suppress(OSError):
                return Handle(os.open(path, flags | os.O_DIRECT, 0o600), path, direct=True)
        return Handle(os.open(path, flags, 0o600), path, direct=False)

    def close(self, handle: Handle) -> None:
        """As `Disk.close`."""
        os.close(handle.number)

    def pwritev(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        """As `Disk.pwritev`."""
        wanted = sum(view.nbytes for view in views)
        found = os.pwritev(handle.number, views, offset)
        if found != wanted:  # the kernel cuts a write short where room ends
            refusal = os.strerror(errno.ENOSPC)
            raise OSError(errno.ENOSPC, f"{refusal}: wrote {found} of {wanted} bytes at {offset}")

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        """As `Disk.preadv`."""
        wanted = sum(view.nbytes for view in views)
        found = os.preadv(handle.number, views, offset)
        if found != wanted:
            raise OSError(errno.EIO, f"read {found} of {wanted} bytes at {offset}")

    def sync(self, handle: Handle) -> None:
        """As `Disk.sync`, by fdatasync."""
        os.fdatasync(handle.number)

    def sync_dir(self, path: Path) -> None:
        """As `Disk.sync_dir`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def preallocate(self, handle: Handle, offset: int, nbytes: int) -> None:
        """As `Disk.preallocate`; EOPNOTSUPP where the file system cannot."""
        _fallocate(handle.number, 0, offset, nbytes)

    def punch(self, handle: Handle, offset: int, nbytes: int) -> None:
        """As `Disk.punch`; EOPNOTSUPP where the file system cannot."""
        _fallocate(handle.number, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)

    def truncate(self, handle: Handle, nbytes: int) -> None:
        """As `Disk.truncate`."""
        os.ftruncate(handle.number, nbytes)

    def size(self, handle: Handle) -> int:
        """As `Disk.size`."""
        return os.fstat(handle.number).st_size

    def allocated_bytes(self, handle: Handle) -> int:
        """As `Disk.allocated_bytes`."""
        return os.fstat(handle.number).st_blocks * 512

    def listdir(self, path: Path) -> list[str]:
        """As `Disk.listdir`."""
        return [entry.name for entry in path.iterdir()]

    def unlink(self, path: Path) -> None:
        """As `Disk.unlink`."""
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> None:
        """As `Disk.mkdir`; for the owner alone."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def free_bytes(self, path: Path) -> int:
        """As `Disk.free_bytes`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def fs_type(self, path: Path) -> int:
        """As `Disk.fs_type`."""
        found = (ctypes.c_long * 32)()  # struct statfs is 120 bytes and starts with f_type
        if _libc.statfs(os.fsencode(path), ctypes.byref(found)):
            raise OSError(ctypes.get_errno(), "statfs", str(path))
        return int(found[0]) & 0xFFFFFFFF

    def before_commit(self) -> None:
        """Nothing: the real world needs no crash point."""

    def after_commit(self) -> None:
        """Nothing: the real world needs no crash point."""


def storage_failed(error: OSError, doing: str, path: Path) -> StorageFailed:
    """The typed error for what the operating system refused; keeps the errno."""
    if isinstance(error, StorageFailed):
        return error
    return StorageFailed(error.errno or errno.EIO, f"cannot {doing} {path}: {error.strerror}")


# os has no fallocate with a mode, and no statfs.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_KEEP_SIZE = 1
_PUNCH_HOLE = 2


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    while _libc.fallocate(fd, mode, offset, nbytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
