"""The right to serve at one socket path: one daemon at a time, whatever died before.

A lock on a pid file beside the socket decides, since the kernel drops it when its
holder ends. The socket file alone proves nothing: SIGKILL leaves it behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blobstore.errors import SetupError

_CONNECT_TIMEOUT_S = 1.0


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Own `path` while the block runs: a stale socket is removed, a live one refused.

    At the end the socket and the pid file are gone. Raises SetupError, which names
    the other daemon's pid, and leaves everything as it was.
    """
    pid_path = path.with_name(path.name + ".pid")
    lock = _lock(pid_path, path)
    try:
        _remove_stale(path)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        with suppress(FileNotFoundError):
            pid_path.unlink()
        os.close(lock)


def _lock(pid_path: Path, path: Path) -> int:
    """The pid file, open and locked. Raises SetupError if somebody else has it."""
    while True:
        try:
            lock = os.open(pid_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SetupError(
                f"cannot create {pid_path}: {error.strerror}: give --socket a path in a "
                "directory that exists and is writable"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise SetupError(
                f"the socket {path} is served by the daemon with pid {pid}: stop it, or give "
                "--socket another path"
            ) from None
        if _is_still(lock, pid_path):
            return lock
        os.close(lock)  # its owner removed it between our open and our lock


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SetupError(
            f"{path} exists and is no socket: remove it, or give --socket another path"
        )
    if _is_served(path):
        raise SetupError(
            f"the socket {path} is served by another program: stop it, or give --socket "
            "another path"
        )
    path.unlink()


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True
