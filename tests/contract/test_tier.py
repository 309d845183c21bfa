"""What every Tier does. A new one joins by a line in TIERS."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from blobstore.errors import Full, InvalidRequest, SizeMismatch
from blobstore.tiering.arena import Arena
from blobstore.tiering.dram import DramTier
from blobstore.tiering.ssd import SsdTier
from blobstore.tiering.tier import Extent, Tier
from blobstore.units import KIB, MIB
from tests.support.fake_tier import FakeTier

CAPACITY_BYTES = 16 * MIB

TierFactory = Callable[[Path, int], AbstractContextManager[Tier]]
"""Opens an empty tier of about so many bytes that may keep files in the directory."""


@contextmanager
def _fake(directory: Path, capacity_bytes: int) -> Iterator[Tier]:
    yield FakeTier(capacity_bytes)


@contextmanager
def _dram(directory: Path, capacity_bytes: int) -> Iterator[Tier]:
    with closing(Arena.create(capacity_bytes)) as arena:
        yield DramTier(arena)


@contextmanager
def _ssd(directory: Path, capacity_bytes: int) -> Iterator[Tier]:
    with closing(SsdTier.open(directory, capacity_bytes)) as tier:
        yield tier


TIERS: dict[str, TierFactory] = {"fake": _fake, "dram": _dram, "ssd": _ssd}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    with TIERS[request.param](tmp_path, CAPACITY_BYTES) as tier:
        yield tier


# Around pages, pieces, and what a direct write can be aligned to.
SIZES = (1, 4095, 4096, 4097, 64 * KIB + 1, MIB - 1, MIB + 513)


def _data(seed: int, nbytes: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(nbytes))


def _put(tier: Tier, data: memoryview) -> Extent:
    extent = tier.allocate(data.nbytes)
    tier.write(extent, 0, data)
    return extent


def _get(tier: Tier, extent: Extent) -> bytearray:
    into = bytearray(extent.nbytes)
    tier.read(extent, 0, memoryview(into))
    return into


def _fill(tier: Tier, nbytes: int) -> list[Extent]:
    extents: list[Extent] = []
    try:
        while True:
            extents.append(tier.allocate(nbytes))
    except Full:
        return extents


def test_extents_keep_what_was_written(tier: Tier) -> None:
    written = [_data(n, n) for n in SIZES]
    extents = [_put(tier, data) for data in written]
    assert [_get(tier, extent) for extent in extents] == written
    assert [extent.nbytes for extent in extents] == list(SIZES)


def test_an_extent_can_be_written_and_read_in_parts_of_any_order_and_size(tier: Tier) -> None:
    rng = random.Random(1)
    data = _data(2, MIB + 513)
    cuts = [0, *sorted(rng.sample(range(1, data.nbytes), 9)), data.nbytes]
    ranges = list(pairwise(cuts))
    extent = tier.allocate(data.nbytes)
    rng.shuffle(ranges)
    for start, end in ranges:
        tier.write(extent, start, data[start:end])
    assert _get(tier, extent) == data
    rng.shuffle(ranges)
    for start, end in ranges:
        into = bytearray(end - start)
        tier.read(extent, start, memoryview(into))
        assert into == data[start:end]


def test_writing_again_leaves_neighbours_alone(tier: Tier) -> None:
    left, middle, right = (_put(tier, _data(n, 70_001)) for n in range(3))
    tier.write(middle, 0, _data(9, 70_001))
    assert [_get(tier, e) for e in (left, middle, right)] == [_data(n, 70_001) for n in (0, 9, 2)]


def test_room_is_accounted_for(tier: Tier) -> None:
    before = tier.used_bytes
    assert before + tier.free_bytes == tier.capacity_bytes
    extents = [tier.allocate(n) for n in SIZES]
    assert tier.used_bytes >= before + sum(SIZES)
    assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes
    for extent in extents:
        tier.free(extent)
    assert tier.used_bytes == before


def test_a_full_tier_says_so_and_takes_nothing(tier: Tier) -> None:
    extents = _fill(tier, MIB)
    assert len(extents) >= CAPACITY_BYTES // MIB * 3 // 4
    used = tier.used_bytes
    assert used <= tier.capacity_bytes
    with pytest.raises(Full, match=tier.name):
        tier.allocate(MIB)
    assert tier.used_bytes == used


def test_freed_room_is_used_again(tier: Tier) -> None:
    extents = _fill(tier, MIB)
    for _ in range(3):
        for extent in extents:
            tier.free(extent)
        again = _fill(tier, MIB)
        assert len(again) == len(extents)
        extents = again


def test_room_for_one_does_not_admit_two(tier: Tier) -> None:
    extents = _fill(tier, MIB)
    tier.free(extents.pop())
    with pytest.raises(Full):
        tier.allocate(3 * MIB)
    extents.append(tier.allocate(MIB))
    with pytest.raises(Full):
        tier.allocate(MIB)


@pytest.mark.parametrize("seed", range(3))
def test_random_use_never_overlaps_and_never_drifts(tier: Tier, seed: int) -> None:
    rng = random.Random(seed)
    before = tier.used_bytes
    held: dict[Extent, memoryview] = {}
    for step in range(300):
        if held and rng.random() < 0.45:
            extent = rng.choice(list(held))
            assert _get(tier, extent) == held.pop(extent)
            tier.free(extent)
        else:
            data = _data(step, rng.choice(SIZES))
            try:
                held[_put(tier, data)] = data
            except Full:
                continue
        assert tier.used_bytes >= before + sum(e.nbytes for e in held)
        assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes
    for extent, data in held.items():
        assert _get(tier, extent) == data
        tier.free(extent)
    assert tier.used_bytes == before


def test_extents_of_many_threads_stay_apart(tier: Tier) -> None:
    before = tier.used_bytes

    def work(worker: int) -> None:
        rng = random.Random(worker)
        for step in range(30):
            data = _data(worker * 1000 + step, rng.choice(SIZES))
            extent = _put(tier, data)
            assert _get(tier, extent) == data
            tier.free(extent)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert tier.used_bytes == before


def test_freeing_what_is_not_allocated_is_refused(tier: Tier) -> None:
    kept = _put(tier, _data(1, 70_000))
    extent = tier.allocate(70_000)
    tier.free(extent)
    used = tier.used_bytes
    with pytest.raises(InvalidRequest):
        tier.free(extent)
    with pytest.raises(InvalidRequest):
        tier.free(Extent(kept.place, kept.offset, kept.nbytes - 1))
    assert tier.used_bytes == used
    assert _get(tier, kept) == _data(1, 70_000)


def test_empty_extents_take_no_room_even_of_a_full_tier(tier: Tier) -> None:
    _fill(tier, MIB)
    used = tier.used_bytes
    first, second = tier.allocate(0), tier.allocate(0)
    tier.write(first, 0, memoryview(b""))
    tier.read(first, 0, memoryview(bytearray()))
    assert tier.used_bytes == used
    tier.free(first)
    tier.free(second)
    assert tier.used_bytes == used


def test_negative_sizes_are_refused(tier: Tier) -> None:
    with pytest.raises(InvalidRequest):
        tier.allocate(-1)


@pytest.mark.parametrize(("start", "nbytes"), [(0, 70_001), (69_999, 2), (70_000, 1), (-1, 1)])
def test_nothing_moves_past_an_extents_ends(tier: Tier, start: int, nbytes: int) -> None:
    extent = _put(tier, _data(1, 70_000))
    neighbour = _put(tier, _data(2, 70_000))
    with pytest.raises(SizeMismatch):
        tier.write(extent, start, memoryview(bytes(nbytes)))
    into = bytearray(b"?" * nbytes)
    with pytest.raises(SizeMismatch):
        tier.read(extent, start, memoryview(into))
    assert into == b"?" * nbytes
    assert _get(tier, extent) == _data(1, 70_000)
    assert _get(tier, neighbour) == _data(2, 70_000)
