"""Proof that a file's bytes are not in the page cache, so that reading them is cold."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget the cached pages of the files; only clean pages can go."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_pages(paths: Iterable[Path]) -> int:
    """How many pages of the files are in the page cache."""
    return sum(_resident_pages(path) for path in paths)


def _resident_pages(path: Path) -> int:
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes == 0:
            return 0
        with mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapping:
            flags = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
            pages = np.frombuffer(mapping, np.uint8)
            failed = _libc.mincore(pages.ctypes.data, nbytes, flags)
            error = ctypes.get_errno()
            del pages  # or the mapping could not be closed
    if failed:
        raise OSError(error, os.strerror(error), str(path))
    return int((np.frombuffer(flags.raw, np.uint8) & 1).sum())
