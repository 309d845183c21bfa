"""The daemon's arena, mapped into this process.

Views of a mapping keep it: it is unmapped when the last of them is gone, whatever
became of client and daemon meanwhile. Page tables are filled at once, since 500
first touches would cost milliseconds; in the background if that takes long.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

from blobstore.clients import forks

Bytes = NDArray[np.uint8]

BACKGROUND_BYTES = 1 << 30
"""Larger mappings are populated in the background: 4 KiB pages take about 50 ns each."""

_STEP_BYTES = 64 << 20
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # x86-64 and arm64
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p


class Mapping(mmap.mmap):
    """One mapping of the arena. Arrays over it hold it, so it never holds an array itself."""

    __slots__ = ("_address", "_nbytes", "_populating", "_stopped", "_writable")

    _address: int
    _nbytes: int
    _populating: threading.Thread | None
    _stopped: threading.Event
    _writable: bool

    def __new__(cls, fd: int, nbytes: int, *, writable: bool) -> Mapping:
        """Map `nbytes` of `fd`, which may be closed afterwards."""
        if fd < 0:
            raise ValueError("no descriptor: it would be memory that nobody shares")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self = super().__new__(cls, fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
        self._nbytes = nbytes
        self._writable = writable
        self._address = np.frombuffer(self, np.uint8).ctypes.data
        self._stopped = threading.Event()
        self._populating = None
        forks.watch(self)
        return self

    def array(self) -> Bytes:
        """All of it as bytes; read-only unless it was mapped for writing."""
        return np.frombuffer(self, np.uint8)

    def populate(self, background_bytes: int = BACKGROUND_BYTES) -> None:
        """Fill the page tables; of a mapping above `background_bytes` in a thread of its own."""
        if self._nbytes <= background_bytes:
            self._populate()
            return
        self._populating = threading.Thread(
            target=self._populate, name="blobstore-populate", daemon=True
        )
        self._populating.start()

    def stop_populating(self) -> None:
        """Return once no thread populates it any more: within a step."""
        self._stopped.set()
        if self._populating is not None:
            self._populating.join()
            self._populating = None

    def leave_parent(self) -> None:
        """In a forked child, make every access fault: what is here may be others' by then.

        The address range stays mapped, so that unmapping it later is harmless.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        placed = _libc.mmap(self._address, self._nbytes, _PROT_NONE, flags, -1, 0)
        if placed != self._address:
            os.abort()  # the alternative is to read bytes that are no longer ours

    def _populate(self) -> None:
        advice = _MADV_POPULATE_WRITE if self._writable else _MADV_POPULATE_READ
        for start in range(0, self._nbytes, _STEP_BYTES):
            if self._stopped.is_set():
                return
            nbytes = min(_STEP_BYTES, self._nbytes - start)
            if _libc.madvise(self._address + start, nbytes, advice) != 0:
                self.array()[start : start + nbytes : mmap.PAGESIZE].max()  # kernels before 5.14
