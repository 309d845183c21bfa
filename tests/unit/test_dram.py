"""What the DRAM tier does beyond the Tier contract."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from blobstore.errors import Full, InvalidRequest
from blobstore.tiering.arena import Arena
from blobstore.tiering.dram import DramTier
from blobstore.tiering.tier import Extent, Tier
from blobstore.units import KIB, MIB

STAGING_BYTES = 4 * MIB


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena.create(16 * MIB)) as arena:
        yield arena


@pytest.fixture
def dram(arena: Arena) -> DramTier:
    return DramTier(arena, staging_bytes=STAGING_BYTES)


def test_it_is_a_tier(dram: DramTier) -> None:
    tier: Tier = dram
    assert tier.name == "dram"


def test_puts_leave_the_staging_reserve_to_loads(dram: DramTier) -> None:
    puts = [dram.allocate(MIB) for _ in range(12)]
    assert dram.available_bytes() == 0
    with pytest.raises(Full, match=r"wanted 1 B, free 0 B of 16 MiB.*4 MiB kept for loads"):
        dram.allocate(1)
    loads = [dram.allocate(MIB, staging=True) for _ in range(4)]
    assert dram.free_bytes == 0
    with pytest.raises(Full):
        dram.allocate(1, staging=True)
    assert len({extent.offset for extent in puts + loads}) == 16


def test_loads_may_fill_the_whole_arena(dram: DramTier) -> None:
    loads = [dram.allocate(MIB, staging=True) for _ in range(16)]
    assert dram.available_bytes() == -STAGING_BYTES
    for extent in loads[:4]:
        dram.free(extent)
    with pytest.raises(Full):
        dram.allocate(1)
    dram.free(loads[4])
    dram.allocate(MIB)


def test_the_quota_is_no_place(dram: DramTier) -> None:
    load = dram.allocate(MIB, staging=True)
    put = dram.allocate(12 * MIB - MIB)
    dram.free(load)
    dram.allocate(MIB)
    assert dram.available_bytes() == 0
    dram.free(put)
    assert dram.available_bytes() == 11 * MIB


@pytest.mark.parametrize("staging_bytes", [-1, 16 * MIB])
def test_a_reserve_that_leaves_no_room_is_refused(arena: Arena, staging_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match=str(staging_bytes)):
        DramTier(arena, staging_bytes=staging_bytes)


def test_extents_own_whole_pages(dram: DramTier) -> None:
    extents = [dram.allocate(n) for n in (1, 4096, 4097)]
    assert [extent.offset % 4096 for extent in extents] == [0, 0, 0]
    assert [dram.padded(extent.nbytes) for extent in extents] == [4096, 4096, 8192]
    assert dram.used_bytes == 4 * 4096
    assert dram.n_extents == 3


def test_wiped_extents_leave_nothing_to_the_next_owner(dram: DramTier) -> None:
    kept, secret = dram.allocate(5000), dram.allocate(5000)
    for extent in (kept, secret):
        dram.write(extent, 0, memoryview(b"\xaa" * 5000))
    dram.free(secret, wipe=True)
    again = dram.allocate(5000)
    assert again == secret
    assert bytes(dram.view(again)) == bytes(5000)
    assert bytes(dram.view(kept)) == b"\xaa" * 5000


def test_room_is_not_given_out_before_it_is_wiped(
    dram: DramTier, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = dram.allocate(12 * MIB)
    refused = []

    def wipe(offset: int, nbytes: int) -> None:
        with pytest.raises(Full):
            dram.allocate(12 * MIB)
        with pytest.raises(InvalidRequest):
            dram.free(extent)
        refused.append((offset, nbytes))

    monkeypatch.setattr(arena, "wipe", wipe)
    dram.free(extent, wipe=True)
    assert refused == [(extent.offset, 12 * MIB)]
    assert dram.allocate(12 * MIB) == extent


def test_views_are_the_bytes_in_place(dram: DramTier, arena: Arena) -> None:
    dram.allocate(100)
    extent = dram.allocate(9)
    view = dram.view(extent)
    view[:] = b"in place!"
    assert len(view) == 9
    assert bytes(arena.view[extent.offset : extent.offset + 9]) == b"in place!"
    into = bytearray(5)
    dram.read(extent, 3, memoryview(into))
    assert into == b"place"


def test_a_freed_extent_can_no_longer_be_touched(dram: DramTier) -> None:
    extent = dram.allocate(MIB)
    dram.free(extent)
    with pytest.raises(InvalidRequest):
        dram.view(extent)
    with pytest.raises(InvalidRequest):
        dram.write(extent, 0, memoryview(b"late"))
    with pytest.raises(InvalidRequest):
        dram.read(extent, 0, memoryview(bytearray(4)))


def test_gauges_tell_free_from_free_in_one_piece(dram: DramTier) -> None:
    extents = [dram.allocate(MIB, staging=True) for _ in range(16)]
    for extent in extents[::2]:
        dram.free(extent)
    assert (dram.free_bytes, dram.largest_free_bytes, dram.n_free_runs) == (8 * MIB, MIB, 8)
    assert dram.fragmentation == 1 - 1 / 8
    with pytest.raises(Full, match=r"wanted 2 MiB, free 8 MiB .*longest run 1 MiB"):
        dram.allocate(2 * MIB, staging=True)


def test_accounts_do_not_drift(dram: DramTier) -> None:
    """Field failure B27, for this tier."""
    rng = random.Random(27)
    held: list[Extent] = []
    for step in range(20_000):
        draw = rng.random()
        if draw < 0.5:
            try:
                nbytes = rng.choice([0, 1, 4096, 70_000, MIB])
                held.append(dram.allocate(nbytes, staging=draw < 0.1))
            except Full:
                assert dram.padded(nbytes) > min(
                    dram.available_bytes(staging=draw < 0.1), dram.largest_free_bytes
                )
        elif held:
            dram.free(held.pop(rng.randrange(len(held))), wipe=draw > 0.99)
        if step % 100 == 0:
            assert dram.used_bytes == sum(dram.padded(e.nbytes) for e in held)
            assert dram.used_bytes + dram.free_bytes == dram.capacity_bytes
            assert dram.n_extents == sum(e.nbytes > 0 for e in held)
    for extent in held:
        dram.free(extent)
    assert (dram.used_bytes, dram.n_extents, dram.n_free_runs) == (0, 0, 1)


@pytest.mark.parametrize("operation", ["write", "read", "wipe"])
def test_copies_let_other_threads_run(dram: DramTier, operation: str) -> None:
    """The interpreter is told never to switch by itself: a copy must give the lock up."""
    buffer = memoryview(bytearray(12 * MIB))
    copying = threading.Event()

    def copy() -> None:
        extent = dram.allocate(buffer.nbytes)
        copying.set()
        if operation == "wipe":
            dram.free(extent, wipe=True)
        else:
            getattr(dram, operation)(extent, 0, buffer)
            dram.free(extent)
        copying.clear()

    def ran_during_one_copy() -> bool:
        thread = threading.Thread(target=copy)
        thread.start()
        seen = False
        while thread.is_alive() and not seen:
            seen = copying.is_set()
            time.sleep(0)  # gives the lock up, and gets it back only if it is given up in turn
        thread.join()
        return seen

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        assert any(ran_during_one_copy() for _ in range(50))
    finally:
        sys.setswitchinterval(interval_s)


def test_concurrent_use_keeps_the_accounts(dram: DramTier) -> None:
    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            try:
                extent = dram.allocate(rng.randrange(1, 300 * KIB), staging=rng.random() < 0.5)
            except Full:
                continue
            dram.free(extent, wipe=rng.random() < 0.1)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (dram.used_bytes, dram.n_extents, dram.n_free_runs) == (0, 0, 1)
