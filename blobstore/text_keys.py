"""The keys under which texts are encrypted: one for each, in slots of a file of their own.

A database keeps old versions of its pages for a while. What is encrypted there is gone for
good once its key is, and a key is overwritten in place: so this is no database, and its
file is never rewritten elsewhere. A key is used for one text, once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from blobstore.errors import NewerFormat, SetupError

KEY_BYTES = 32
FORMAT_VERSION = 1

_KIND = b"bs-tkeys"
_HEAD = struct.Struct("<8sI")
_START = 4096
"""The slots begin here; the head is alone in its block."""
_NO_KEY = bytes(KEY_BYTES)


class TextKeys(Protocol):
    """One writer at a time; any thread may read."""

    def get(self, slot: int) -> bytes | None:
        """The key in `slot`, or None. Raises OSError."""
        ...

    def take(self) -> tuple[int, bytes]:
        """A new key and the slot that it is in, durable after `sync`. Raises OSError."""
        ...

    def sync(self) -> None:
        """Return once what was taken would survive a loss of power. Raises OSError."""
        ...

    def wipe(self, slots: Iterable[int]) -> None:
        """Overwrite keys for good, and give their slots to others. Raises OSError."""
        ...

    def keep_only(self, slots: Iterable[int]) -> None:
        """Wipe what is in no slot of these: a crash may have left it. Raises OSError."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class KeyFile:
    """Keys on disk."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises OSError, NewerFormat, or SetupError if it is no such."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._check(path)
        except BaseException:
            os.close(self._fd)
            raise
        self._n = self._slots()
        self._free: list[int] = []

    def get(self, slot: int) -> bytes | None:
        """As TextKeys.get."""
        key = os.pread(self._fd, KEY_BYTES, _START + slot * KEY_BYTES)
        return key if len(key) == KEY_BYTES and key != _NO_KEY else None

    def take(self) -> tuple[int, bytes]:
        """As TextKeys.take."""
        slot = self._free[-1] if self._free else self._n
        key = os.urandom(KEY_BYTES)
        self._write(slot, key)
        if self._free:
            self._free.pop()
        else:
            self._n += 1
        return slot, key

    def sync(self) -> None:
        """As TextKeys.sync."""
        os.fdatasync(self._fd)

    def wipe(self, slots: Iterable[int]) -> None:
        """As TextKeys.wipe."""
        gone = sorted(set(slots), reverse=True)  # the first ones are taken again first
        if not gone:
            return
        for slot in gone:
            self._write(slot, _NO_KEY)
        os.fdatasync(self._fd)
        self._free += gone

    def keep_only(self, slots: Iterable[int]) -> None:
        """As TextKeys.keep_only."""
        self._n = self._slots()
        used = np.zeros(self._n, bool)
        kept = np.fromiter(slots, np.int64)
        used[kept[kept < self._n]] = True
        self._free = np.flatnonzero(~used)[::-1].tolist()
        held = np.fromfile(f"/proc/self/fd/{self._fd}", np.uint8, self._n * KEY_BYTES, "", _START)
        filled = held.reshape(-1, KEY_BYTES).any(axis=1)
        left = np.flatnonzero(filled & ~used).tolist()
        for slot in left:
            self._write(slot, _NO_KEY)
        if left:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """As TextKeys.close."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, slot: int, key: bytes) -> None:
        os.pwrite(self._fd, key, _START + slot * KEY_BYTES)

    def _slots(self) -> int:
        return max(0, os.fstat(self._fd).st_size - _START) // KEY_BYTES

    def _check(self, path: Path) -> None:
        head = os.pread(self._fd, _START, 0)
        if not head:
            os.pwrite(self._fd, _HEAD.pack(_KIND, FORMAT_VERSION).ljust(_START, b"\0"), 0)
            os.fsync(self._fd)
            return
        kind, version = _HEAD.unpack_from(head.ljust(_START, b"\0"))
        if kind != _KIND:
            raise SetupError(
                f"{path} does not hold the keys of texts: restore it, or move it and "
                f"{path.parent} away to start without texts"
            )
        if version > FORMAT_VERSION:
            raise NewerFormat(
                f"{path} is of version {version}, this program reads up to {FORMAT_VERSION}: "
                "upgrade it"
            )


class MemoryKeys:
    """Keys that no restart survives."""

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}
        self._next = 0

    def get(self, slot: int) -> bytes | None:
        """As TextKeys.get."""
        return self._keys.get(slot)

    def take(self) -> tuple[int, bytes]:
        """As TextKeys.take."""
        slot, key = self._next, os.urandom(KEY_BYTES)
        self._next += 1
        self._keys[slot] = key
        return slot, key

    def sync(self) -> None:
        """As TextKeys.sync."""

    def wipe(self, slots: Iterable[int]) -> None:
        """As TextKeys.wipe."""
        for slot in slots:
            self._keys.pop(slot, None)

    def keep_only(self, slots: Iterable[int]) -> None:
        """As TextKeys.keep_only."""
        kept = set(slots)
        self._keys = {slot: key for slot, key in self._keys.items() if slot in kept}

    def close(self) -> None:
        """As TextKeys.close."""
        self._keys.clear()
