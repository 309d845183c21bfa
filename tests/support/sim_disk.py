"""A disk in memory that can lose power, fail and fill up at any step.

It keeps apart what a program sees and what would survive: bytes, sizes and
holes become durable with `sync`, names with `sync_dir`. When power is lost,
what was not synced is dropped, kept, or survives in any part and order, down to
single sectors. Every call is a numbered step, at which power can be cut.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from blobstore.tiering.disk import BLOCK_BYTES, Handle

SECTOR_BYTES = 512
EXT4 = 0xEF53

Survival = Literal["dropped", "kept", "torn"]
"""What becomes of unsynced changes when power is lost."""


class PowerLost(BaseException):
    """The machine is off. Not an Exception: no handler of ours may carry on."""


@dataclass
class _Content:
    size: int = 0
    blocks: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> _Content:
        return _Content(self.size, dict(self.blocks))


Change = Callable[[_Content], None]


@dataclass
class _File:
    seen: _Content = field(default_factory=_Content)
    safe: _Content = field(default_factory=_Content)
    unsynced: list[list[Change]] = field(default_factory=list)
    """Of each change, the parts that may survive alone."""

    def apply(self, parts: list[Change]) -> None:
        for part in parts:
            part(self.seen)
        self.unsynced.append(parts)

    def survive(self, survival: Survival, rng: random.Random) -> None:
        after = self.safe.copy()
        if survival != "dropped":
            parts = [part for parts in self.unsynced for part in parts]
            if survival == "torn":
                parts = rng.sample(parts, rng.randint(0, len(parts)))
            for part in parts:
                part(after)
        self.seen, self.safe, self.unsynced = after, after.copy(), []


class SimDisk:
    """Implements `Disk`.

    `cut_at` is the number of the step at which power is lost; `before_step` runs
    before each step with its name and path, and may raise OSError.
    """

    def __init__(self, capacity_bytes: int = 1 << 40, *, direct: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.direct = direct
        self.steps = 0
        self.cut_at: int | None = None
        self.before_step: Callable[[str, Path], None] = lambda name, path: None
        self.history: list[str] = []
        self._on = True
        self._rng = random.Random(0)
        self._files: dict[Path, _File] = {}
        self._safe_names: dict[Path, _File] = {}
        self._open: dict[int, _File] = {}
        self._next = 1000

    def restart(self, survival: Survival, seed: int) -> None:
        """Power comes back without faults: what is on the disk now is what survived."""
        rng = random.Random(seed)
        names = dict(self._safe_names)
        for path in sorted(self._files.keys() | self._safe_names.keys()):
            then, now = self._safe_names.get(path), self._files.get(path)
            if survival == "kept" or (survival == "torn" and rng.random() < 0.5):
                if now is None:
                    del names[path]
                elif now is not then:
                    names[path] = now
        self._files, self._safe_names = names, dict(names)
        for file in self._files.values():
            file.survive(survival, rng)
        self._open.clear()
        self._rng = rng
        self._on, self.cut_at, self.steps = True, None, 0
        self.before_step = lambda name, path: None
        self.history.clear()

    @property
    def n_open(self) -> int:
        """Files that are open."""
        return len(self._open)

    def allocated_total(self) -> int:
        """Bytes of all blocks of all files that have a name."""
        return sum(len(file.seen.blocks) for file in self._files.values()) * BLOCK_BYTES

    def rot(self, path: Path, offset: int) -> None:
        """Flip a byte of what is stored."""
        number, at = divmod(offset, BLOCK_BYTES)
        for content in (self._files[path].seen, self._files[path].safe):
            block = bytearray(content.blocks.get(number, bytes(BLOCK_BYTES)))
            block[at] ^= 0xFF
            content.blocks[number] = bytes(block)

    def open(self, path: Path, *, create: bool, direct: bool) -> Handle:
        self._step("create" if create else "open", path)
        if path not in self._files:
            if not create:
                raise OSError(errno.ENOENT, "no such file", str(path))
            self._files[path] = _File()
        self._next += 1
        self._open[self._next] = self._files[path]
        return Handle(self._next, path, direct and self.direct)

    def close(self, handle: Handle) -> None:
        del self._open[handle.number]

    def pwritev(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        data = b"".join(_checked(handle, views, offset))
        file = self._open[handle.number]

        def write() -> None:
            self._require_room(file, offset, len(data))
            file.apply(list(_sectors(data, offset)))

        self._step("pwritev", handle.path, write)

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        self._step("preadv", handle.path)
        content = self._open[handle.number].seen
        for view in _checked(handle, views, offset):
            if offset + view.nbytes > content.size:
                raise OSError(errno.EIO, "short read")
            view[:] = _read(content, offset, view.nbytes)
            offset += view.nbytes

    def sync(self, handle: Handle) -> None:
        self._step("sync", handle.path)
        file = self._open[handle.number]
        file.safe, file.unsynced = file.seen.copy(), []

    def sync_dir(self, path: Path) -> None:
        self._step("sync_dir", path)
        for known in list(self._files.keys() | self._safe_names.keys()):
            if known.parent == path:
                if known in self._files:
                    self._safe_names[known] = self._files[known]
                else:
                    del self._safe_names[known]

    def preallocate(self, handle: Handle, offset: int, nbytes: int) -> None:
        file = self._open[handle.number]

        def allocate(content: _Content) -> None:
            for block in range(offset // BLOCK_BYTES, (offset + nbytes) // BLOCK_BYTES):
                content.blocks.setdefault(block, bytes(BLOCK_BYTES))

        def change() -> None:
            self._require_room(file, offset, nbytes)
            file.apply([allocate])

        self._step("preallocate", handle.path, change)

    def punch(self, handle: Handle, offset: int, nbytes: int) -> None:
        assert offset % BLOCK_BYTES == nbytes % BLOCK_BYTES == 0

        def clear(content: _Content) -> None:
            for block in range(offset // BLOCK_BYTES, (offset + nbytes) // BLOCK_BYTES):
                content.blocks.pop(block, None)

        file = self._open[handle.number]
        self._step("punch", handle.path, lambda: file.apply([clear]))

    def truncate(self, handle: Handle, nbytes: int) -> None:
        def resize(content: _Content) -> None:
            content.size = nbytes
            for block in [b for b in content.blocks if b * BLOCK_BYTES >= nbytes]:
                del content.blocks[block]

        file = self._open[handle.number]
        self._step("truncate", handle.path, lambda: file.apply([resize]))

    def size(self, handle: Handle) -> int:
        return self._open[handle.number].seen.size

    def allocated_bytes(self, handle: Handle) -> int:
        return len(self._open[handle.number].seen.blocks) * BLOCK_BYTES

    def listdir(self, path: Path) -> list[str]:
        self._step("listdir", path)
        return [known.name for known in self._files if known.parent == path]

    def unlink(self, path: Path) -> None:
        self._step("unlink", path, lambda: self._files.pop(path, None))

    def mkdir(self, path: Path) -> None:
        self._step("mkdir", path)

    def free_bytes(self, path: Path) -> int:
        return self.capacity_bytes - self.allocated_total()

    def fs_type(self, path: Path) -> int:
        return EXT4

    def before_commit(self) -> None:
        self._step("before_commit", Path("catalogue"))

    def after_commit(self) -> None:
        self._step("after_commit", Path("catalogue"))

    def _step(self, name: str, path: Path, change: Callable[[], object] | None = None) -> None:
        if not self._on:
            raise PowerLost(name)
        number = self.steps
        self.steps += 1
        self.history.append(name)
        if number == self.cut_at:
            if change is not None and self._rng.random() < 0.5:
                change()  # it was under way, and some of it may survive
            self._on = False
            raise PowerLost(f"step {number}: {name} {path.name}")
        self.before_step(name, path)
        if change is not None:
            change()

    def _require_room(self, file: _File, offset: int, nbytes: int) -> None:
        blocks = range(offset // BLOCK_BYTES, -(-(offset + nbytes) // BLOCK_BYTES))
        new = sum(block not in file.seen.blocks for block in blocks)
        if self.allocated_total() + new * BLOCK_BYTES > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checked(handle: Handle, views: Sequence[memoryview], offset: int) -> Iterator[memoryview]:
    """The views, refused as a direct handle refuses them where they are not aligned."""
    for view in views:
        if handle.direct:
            address = np.frombuffer(view, np.uint8).ctypes.data
            if address % SECTOR_BYTES or view.nbytes % BLOCK_BYTES or offset % BLOCK_BYTES:
                raise OSError(errno.EINVAL, "not aligned for direct I/O")
        yield view


def _sectors(data: bytes, offset: int) -> Iterator[Change]:
    end = offset + len(data)

    def extend(content: _Content) -> None:
        content.size = max(content.size, end)

    yield extend
    first = offset - offset % SECTOR_BYTES
    for start in range(first, end, SECTOR_BYTES):
        low, high = max(start, offset), min(start + SECTOR_BYTES, end)
        yield _one_sector(low, data[low - offset : high - offset])


def _one_sector(offset: int, data: bytes) -> Change:
    number, start = divmod(offset, BLOCK_BYTES)

    def write(content: _Content) -> None:
        block = bytearray(content.blocks.get(number, bytes(BLOCK_BYTES)))
        block[start : start + len(data)] = data
        content.blocks[number] = bytes(block)

    return write


def _read(content: _Content, offset: int, nbytes: int) -> bytes:
    first, last = offset // BLOCK_BYTES, -(-(offset + nbytes) // BLOCK_BYTES)
    empty = bytes(BLOCK_BYTES)
    joined = b"".join(content.blocks.get(block, empty) for block in range(first, last))
    start = offset - first * BLOCK_BYTES
    return joined[start : start + nbytes]
