"""The order of LeafLru."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from blobstore.tiering.lru import LeafLru


def test_coldest_goes_first_whatever_the_order_of_offers() -> None:
    policy: LeafLru[str] = LeafLru()
    for item, last_used in [("warm", 2.0), ("hot", 3.0), ("cold", 1.0)]:
        policy.offer(item, last_used, 1)
    assert list(policy.victims()) == ["cold", "warm", "hot"]


def test_equally_cold_items_go_in_the_order_of_their_offers() -> None:
    policy: LeafLru[int] = LeafLru()
    for item in (3, 1, 2):
        policy.offer(item, 5.0, 1)
    assert list(policy.victims()) == [3, 1, 2]


def test_a_use_moves_an_item_to_the_hot_end() -> None:
    policy: LeafLru[str] = LeafLru()
    for last_used, item in enumerate("abc"):
        policy.offer(item, last_used, 1)
    policy.offer("a", 10.0, 1)
    assert list(policy.victims()) == ["b", "c", "a"]


def test_size_does_not_matter() -> None:
    policy: LeafLru[str] = LeafLru()
    policy.offer("small", 1.0, 1)
    policy.offer("large", 2.0, 1 << 40)
    assert next(policy.victims()) == "small"


def test_a_parent_offered_during_the_walk_takes_its_place_in_the_order() -> None:
    policy: LeafLru[str] = LeafLru()
    for item, last_used in [("leaf", 1.0), ("other", 3.0)]:
        policy.offer(item, last_used, 1)
    walk = policy.victims()
    assert next(walk) == "leaf"
    policy.withdraw("leaf")
    policy.offer("parent", 2.0, 1)
    assert list(walk) == ["parent", "other"]


def test_items_kept_by_the_walker_are_not_yielded_again_after_an_offer() -> None:
    policy: LeafLru[int] = LeafLru()
    for item in range(20):
        policy.offer(item, item, 1)
    seen = []
    for item in policy.victims():
        seen.append(item)
        if item < 5:
            policy.offer(100 + item, 50.0 + item, 1)
    assert seen == [*range(20), *range(100, 105)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 5)), max_size=300),
    st.randoms(use_true_random=False),
)
def test_every_walk_is_sorted_while_items_come_and_go(
    steps: list[tuple[int, int | None]], rng: random.Random
) -> None:
    policy: LeafLru[int] = LeafLru()
    offered: dict[int, tuple[int, int]] = {}
    for at, (item, last_used) in enumerate(steps):
        if last_used is None:
            policy.withdraw(item)
            offered.pop(item, None)
        else:
            policy.offer(item, last_used, 1)
            offered[item] = (last_used, at)
    seen = []
    expected = sorted(offered, key=offered.__getitem__)
    for item in policy.victims():
        seen.append(item)
        if rng.random() < 0.5:
            policy.withdraw(item)
        if rng.random() < 0.3:
            policy.offer(-item - 1, -1, 1)  # colder than all: behind the walk
    assert seen == expected


def test_the_order_survives_thousands_of_uses() -> None:
    rng = random.Random(7)
    policy: LeafLru[int] = LeafLru()
    last_used = {}
    for _ in range(5_000):
        item = rng.randrange(200)
        last_used[item] = rng.random()
        policy.offer(item, last_used[item], 1)
    assert list(policy.victims()) == sorted(last_used, key=last_used.__getitem__)
