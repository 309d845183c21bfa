"""One daemon per socket path: the pid file that its owner keeps locked.

The lock decides, since the kernel drops it when its holder ends; what the file
says only names the holder to people.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blobstore.errors import SetupError


@contextmanager
def pid_file(socket: Path) -> Iterator[Path]:
    """Own `socket`'s path while the block runs, by the file `<socket>.pid` beside it.

    Raises SetupError, which names the pid of the daemon that owns it already, and
    changes nothing then. The file is gone at the end; one left by a daemon that was
    killed is taken over.
    """
    path = socket.with_name(socket.name + ".pid")
    lock = _lock(path, socket)
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _lock(path: Path, socket: Path) -> int:
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise SetupError(
                f"cannot create {path}: {error.strerror}: give --socket a path in a directory "
                "that exists and is writable"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise SetupError(
                f"the socket {socket} is served by the daemon with pid {pid}: stop it, or give "
                "--socket another path"
            ) from None
        if _names(path, lock):
            return lock
        os.close(lock)  # its owner removed it between our open and our lock


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
