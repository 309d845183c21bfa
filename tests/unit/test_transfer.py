from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from blobstore.tiering import transfer
from blobstore.tiering.disk import BLOCK_BYTES, Handle
from tests.support.sim_disk import SimDisk

SIZES = (1, 4095, 4096, 4097, 70_000, transfer.STEP_BYTES, transfer.STEP_BYTES + 1, 3_000_000)


class _Watched(SimDisk):
    """Remembers which memory was used directly."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__(direct=direct)
        self.views: list[memoryview] = []

    def pwritev(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        self.views += views
        super().pwritev(handle, views, offset)

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        self.views += views
        super().preadv(handle, views, offset)


def _memory(nbytes: int, shift: int) -> memoryview:
    """`nbytes` that start `shift` bytes behind a page border, with a guard behind them."""
    return memoryview(mmap.mmap(-1, nbytes + shift + 4096))[shift : shift + nbytes]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_of_any_address_and_length_come_back(nbytes: int, shift: int, direct: bool) -> None:
    disk = SimDisk(direct=direct)
    handle = disk.open(Path("/sim/f"), create=True, direct=True)
    data = _memory(nbytes, shift)
    data[:] = random.Random(nbytes).randbytes(nbytes)
    transfer.write(disk, handle, BLOCK_BYTES, data)
    disk.truncate(handle, BLOCK_BYTES + -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
    whole = _memory(nbytes + 1, shift)
    whole[nbytes] = 0xEE
    transfer.read(disk, handle, BLOCK_BYTES, whole[:nbytes])
    assert whole[:nbytes] == data
    assert whole[nbytes] == 0xEE


def test_aligned_memory_is_not_copied_but_for_an_odd_end() -> None:
    disk = _Watched(direct=True)
    handle = disk.open(Path("/sim/f"), create=True, direct=True)
    data = _memory(transfer.STEP_BYTES + 5000, 0)
    transfer.write(disk, handle, 0, data)
    disk.truncate(handle, 2 * transfer.STEP_BYTES)
    transfer.read(disk, handle, 0, data)
    steps = [128 * BLOCK_BYTES, 127 * BLOCK_BYTES, BLOCK_BYTES]  # two, the second with an odd end
    assert [view.nbytes for view in disk.views] == steps * 2
    own = [view.obj is data.obj for view in disk.views]
    assert own == [True, True, False] * 2


def test_read_only_memory_can_be_written() -> None:
    disk = SimDisk()
    handle = disk.open(Path("/sim/f"), create=True, direct=True)
    transfer.write(disk, handle, 0, memoryview(b"abc"))
    into = bytearray(3)
    transfer.read(disk, handle, 0, memoryview(into))
    assert into == b"abc"
