"""The limit of copying: memcpy between mappings of the kinds that the store uses."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from blobstore.bench.machine import memory_available_bytes
from blobstore.bench.pairs import timed
from blobstore.sizing import SCRATCH_BYTES_MAX
from blobstore.tiering.arena import Arena

Bytes = NDArray[np.uint8]


def caller_buffers(n: int, nbytes: int, *, seed: int | None = None) -> list[Bytes]:
    """`n` page-aligned buffers in ordinary memory, every page touched.

    Filled with noise if a `seed` is given. They live as long as their arrays.
    """
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, n * stride), np.uint8).reshape(n, stride)
    if seed is None:
        memory[:, :: mmap.PAGESIZE] = 0
    else:
        random = np.random.default_rng(seed)
        for row in memory:
            row[:] = np.frombuffer(random.bytes(stride), np.uint8)
    return [row[:nbytes] for row in memory]


class SharedBuffers:
    """`n` buffers in an arena like the daemon's: shared memory, its page tables filled in."""

    def __init__(self, n: int, nbytes: int) -> None:
        stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        spare_bytes = max(0, memory_available_bytes() - n * stride)
        self._arena = Arena.create(
            n * stride, scratch_bytes=min(spare_bytes // 2, SCRATCH_BYTES_MAX)
        )
        self._arena.populate()
        self.views: list[Bytes] = [
            self._arena.array[start : start + nbytes] for start in range(0, n * stride, stride)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.views = []
        self._arena.close()


def copy_each(sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[float]:
    """Copy every source to its target, on this thread; the seconds that each copy took."""
    return [
        timed(lambda: np.copyto(target, source))  # noqa: B023 (called at once)
        for source, target in zip(sources, targets, strict=True)
    ]
