"""The allocator against a naive list of granules."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blobstore.errors import InvalidRequest
from blobstore.tiering.allocator import GRANULE_BYTES, OffsetAllocator
from blobstore.units import MIB

N_GRANULES = 48


class AllocatorAgainstGranules(RuleBasedStateMachine):
    """Every granule knows its owner; a run is free if its granules have none."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = OffsetAllocator(N_GRANULES * GRANULE_BYTES + 1)
        self.owners: list[int | None] = [None] * N_GRANULES
        self.sizes: dict[int, int] = {}

    def free_runs(self) -> list[int]:
        return [len(list(run)) for owner, run in groupby(self.owners) if owner is None]

    @rule(n=st.integers(1, 20), ragged=st.integers(0, GRANULE_BYTES - 1))
    def allocate(self, n: int, ragged: int) -> None:
        offset = self.allocator.allocate(n * GRANULE_BYTES - ragged)
        if offset is None:
            assert max(self.free_runs(), default=0) < n
            return
        first, rest = divmod(offset, GRANULE_BYTES)
        assert rest == 0
        assert self.owners[first : first + n] == [None] * n
        self.owners[first : first + n] = [offset] * n
        self.sizes[offset] = n

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.sizes)))
        n = self.sizes.pop(offset)
        assert self.allocator.size_of(offset) == n * GRANULE_BYTES
        assert self.allocator.free(offset) == n * GRANULE_BYTES
        first = offset // GRANULE_BYTES
        self.owners[first : first + n] = [None] * n

    @rule(granule=st.integers(0, N_GRANULES), ragged=st.integers(0, 1))
    def free_what_is_not_allocated(self, granule: int, ragged: int) -> None:
        offset = granule * GRANULE_BYTES + ragged
        if offset not in self.sizes:
            with pytest.raises(InvalidRequest):
                self.allocator.free(offset)

    @invariant()
    def gauges_agree(self) -> None:
        runs = [n * GRANULE_BYTES for n in self.free_runs()]
        assert self.allocator.capacity_bytes == N_GRANULES * GRANULE_BYTES
        assert self.allocator.free_bytes == sum(runs)
        assert self.allocator.used_bytes == self.allocator.capacity_bytes - sum(runs)
        assert self.allocator.n_free_runs == len(runs)
        assert self.allocator.largest_free_bytes == max(runs, default=0)
        expected = 1 - max(runs) / sum(runs) if runs else 0
        assert self.allocator.fragmentation == pytest.approx(expected)

    def teardown(self) -> None:
        for offset in self.sizes:
            self.allocator.free(offset)
        assert self.allocator.n_free_runs == 1
        assert self.allocator.largest_free_bytes == self.allocator.capacity_bytes


TestAllocatorAgainstGranules = AllocatorAgainstGranules.TestCase
TestAllocatorAgainstGranules.settings = settings(max_examples=60, stateful_step_count=60)


def test_the_shortest_run_that_fits_is_taken() -> None:
    allocator = OffsetAllocator(16 * MIB)
    offsets = [allocator.allocate(n * MIB) for n in (3, 1, 2, 1)]
    allocator.free(offsets[0] or 0)
    allocator.free(offsets[2] or 0)
    assert allocator.allocate(2 * MIB - 1) == offsets[2]
    assert allocator.allocate(3 * MIB) == offsets[0]


def test_scattered_room_is_shown_as_fragmentation_and_heals() -> None:
    """Field failure B31: free in total, not in one piece."""
    allocator = OffsetAllocator(128 * MIB)
    small, large = [], []
    for _ in range(32):
        small.append(allocator.allocate(1 * MIB))
        large.append(allocator.allocate(3 * MIB))
    for offset in small:
        allocator.free(offset or 0)
    assert allocator.free_bytes == 32 * MIB
    assert allocator.allocate(16 * MIB) is None
    assert allocator.n_free_runs == 32
    assert allocator.fragmentation == 1 - 1 / 32
    for offset in large[:5]:
        allocator.free(offset or 0)
    assert allocator.allocate(16 * MIB) is not None
    for offset in large[5:]:
        allocator.free(offset or 0)
    assert allocator.largest_free_bytes == 112 * MIB
    assert allocator.fragmentation == 0


def test_a_long_mixed_history_coalesces_to_one_run() -> None:
    rng = random.Random(31)
    allocator = OffsetAllocator(256 * MIB)
    held: list[int] = []
    for _ in range(20_000):
        if held and rng.random() < 0.5:
            allocator.free(held.pop(rng.randrange(len(held))))
        else:
            offset = allocator.allocate(rng.choice([1, 5000, MIB, 3 * MIB, 17_900_000]))
            if offset is not None:
                held.append(offset)
    rng.shuffle(held)
    for offset in held:
        allocator.free(offset)
    assert (allocator.n_free_runs, allocator.used_bytes) == (1, 0)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_and_negative_ranges_are_refused(nbytes: int) -> None:
    with pytest.raises(InvalidRequest):
        OffsetAllocator(MIB).allocate(nbytes)


@pytest.mark.parametrize("granule_bytes", [0, -4096, 3000])
def test_a_granule_is_a_power_of_two(granule_bytes: int) -> None:
    with pytest.raises(InvalidRequest):
        OffsetAllocator(MIB, granule_bytes)


def test_a_space_below_one_granule_holds_nothing() -> None:
    allocator = OffsetAllocator(GRANULE_BYTES - 1)
    assert allocator.capacity_bytes == 0
    assert allocator.fragmentation == 0
    assert allocator.allocate(1) is None
