"""One owner per data directory.

The lock is the kernel's and ends with its process, however that ends; the pid in
the file only helps to name the holder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from blobstore.errors import DirectoryInUse, SetupError
from blobstore.tiering.disk import Disk

LOCK_NAME = "LOCK"

# linux/magic.h. Their locks or shared mappings differ between hosts or caches.
_UNSUITABLE = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
}


class OwnedDirectory:
    """A directory that this process, and nobody else, works in."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """Make the directory if need be, and own it until `close`.

        Raises DirectoryInUse, naming the holder's pid, and SetupError for a
        directory that cannot be written or lies on an unsuitable file system.
        """
        self.path = path
        try:
            disk.mkdir(path)
            path.mkdir(parents=True, exist_ok=True)  # the lock and LMDB are never simulated
            kind = _UNSUITABLE.get(disk.fs_type(path))
            if kind is not None:
                raise SetupError(
                    f"{path} is on {kind}, where memory maps and locks cannot be relied on; "
                    "use a local file system such as ext4 or xfs"
                )
            self._fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(
                f"the data directory {path} cannot be used: {error.strerror}; "
                "make it writable for this user, or name another one"
            ) from error
        self._lock()

    def close(self) -> None:
        """Give the directory up; again is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise DirectoryInUse(
                f"the data directory {self.path} is in use by process {holder}; "
                "stop that one, or name another directory"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
