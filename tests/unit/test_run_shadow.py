"""Runs of items find what single items find."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.tiering.policies import POLICIES
from blobstore.tiering.policy import PolicyTerms, Use
from blobstore.tiering.run_shadow import REFERENCE_SHADOWS, RunShadow
from blobstore.tiering.shadow_cache import ShadowCache

each_reference = pytest.mark.parametrize("name", REFERENCE_SHADOWS)


def _itself(item: int) -> int:
    return item


def _one(item: int) -> int:
    return 1


class _Both:
    """The same uses for the run shadow and for the policy itself."""

    def __init__(self, name: str, capacity: int) -> None:
        self.runs = REFERENCE_SHADOWS[name](capacity)
        policy = POLICIES[name](PolicyTerms(capacity, _itself))
        self.items: ShadowCache[int] = ShadowCache(capacity, policy, _one)
        self.now_s = 0.0

    def use(self, items: list[int], n_held: int = 0, *, continues: bool = False) -> int:
        self.now_s += 1.0
        use = Use(items, n_held, self.now_s, continues=continues)
        found = self.items.use(use)
        assert self.runs.use(use) == found
        assert self.runs._run_of.keys() == self.items._nodes.keys()
        return found

    def set_capacity(self, capacity: int) -> None:
        self.runs.capacity_bytes = self.items.capacity_bytes = capacity


def _chain(path: list[int]) -> list[int]:
    """Items along a path in a tree, each named by all that comes before it."""
    items, name = [], 1
    for step in path:
        name = name * 4 + step + 1
        items.append(name)
    return items


@each_reference
@given(
    capacity=st.integers(1, 24),
    paths=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=60),
)
def test_any_uses_find_the_same_in_both(name: str, capacity: int, paths: list[list[int]]) -> None:
    both = _Both(name, capacity)
    for path in paths:
        both.use(_chain(path))


@each_reference
def test_long_chains_that_grow_branch_and_come_again(name: str) -> None:
    both, rng = _Both(name, 300), random.Random(1)
    for _ in range(3000):
        conversation = rng.randrange(12)
        n = rng.randrange(1, 120)
        branch = 1000 * (rng.random() < 0.2)
        head = [
            *range(20),
            *(conversation * 10_000 + 10_000 + at + branch * (at > 50) for at in range(n)),
        ]
        both.use(head)


@each_reference
def test_room_that_changes(name: str) -> None:
    both, rng = _Both(name, 100), random.Random(2)
    for _ in range(1000):
        if rng.random() < 0.05:
            both.set_capacity(rng.randrange(1, 200))
        chain = rng.randrange(30)
        both.use([chain * 100 + at for at in range(rng.randrange(1, 30))])
    assert len(both.runs) <= both.runs.capacity_bytes


@each_reference
def test_what_continues_a_use_is_none_of_its_own(name: str) -> None:
    both, rng = _Both(name, 60), random.Random(3)
    for _ in range(1000):
        chain = rng.randrange(20)
        items = [chain * 100 + at for at in range(rng.randrange(2, 20))]
        n_asked = rng.randrange(1, len(items))
        both.use(items[:n_asked])
        both.use(items, n_asked, continues=True)


def test_a_chain_larger_than_the_cache_keeps_its_head() -> None:
    shadow = RunShadow(5, second_last=False)
    assert shadow.use(Use(list(range(10)), 0, 1.0)) == 0
    assert shadow.use(Use(list(range(10)), 0, 2.0)) == 5


def test_once_only_chains_leave_bounded_traces() -> None:
    for name in REFERENCE_SHADOWS:
        shadow = REFERENCE_SHADOWS[name](100)
        for chain in range(100_000):
            shadow.use(Use([chain * 10, chain * 10 + 1], 0, float(chain)))
        assert len(shadow) == 100
        assert len(shadow._heap) < 300
        assert len(shadow._ghosts) <= 2 * 65_536
