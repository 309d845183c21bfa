"""What every Policy does, whatever its order. A new one joins by a line in POLICIES."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.tiering.lru import LeafLru
from blobstore.tiering.policy import Policy

POLICIES: dict[str, Callable[[], Policy[str]]] = {"leaf_lru": LeafLru}

each_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
MakePolicy = Callable[[], Policy[str]]


def _offered(make: MakePolicy, items: str) -> Policy[str]:
    policy = make()
    for at, item in enumerate(items):
        policy.offer(item, float(at), 1000)
    return policy


@each_policy
def test_victims_are_what_was_offered_and_not_withdrawn(make: MakePolicy) -> None:
    policy = _offered(make, "abcd")
    policy.withdraw("b")
    assert sorted(policy.victims()) == ["a", "c", "d"]
    assert len(policy) == 3


@each_policy
def test_an_empty_policy_has_no_victims(make: MakePolicy) -> None:
    policy = make()
    assert list(policy.victims()) == []
    assert len(policy) == 0


@each_policy
def test_looking_at_victims_removes_nothing(make: MakePolicy) -> None:
    policy = _offered(make, "abc")
    assert list(policy.victims()) == list(policy.victims())
    assert len(policy) == 3


@each_policy
def test_offering_again_replaces(make: MakePolicy) -> None:
    policy = _offered(make, "abab")
    policy.offer("b", 9.0, 2000)
    assert sorted(policy.victims()) == ["a", "b"]
    assert len(policy) == 2


@each_policy
def test_unknown_items_are_withdrawn_without_effect(make: MakePolicy) -> None:
    policy = _offered(make, "a")
    policy.withdraw("z")
    policy.withdraw("a")
    policy.withdraw("a")
    assert len(policy) == 0


@each_policy
def test_evicting_on_the_way_reaches_every_item_once(make: MakePolicy) -> None:
    policy = _offered(make, "abcdefgh")
    seen = []
    for item in policy.victims():
        policy.withdraw(item)
        seen.append(item)
    assert sorted(seen) == list("abcdefgh")


@each_policy
def test_items_withdrawn_ahead_of_the_walk_are_not_yielded(make: MakePolicy) -> None:
    policy = _offered(make, "abcdefgh")
    order = list(policy.victims())
    walk = policy.victims()
    first = next(walk)
    gone = order[1:4]
    for item in gone:
        policy.withdraw(item)
    assert [first, *walk] == [item for item in order if item not in gone]


@each_policy
def test_walks_do_not_disturb_each_other(make: MakePolicy) -> None:
    policy = _offered(make, "abcdef")
    order = list(policy.victims())
    one, other = policy.victims(), policy.victims()
    assert [next(one), next(one), next(other)] == [order[0], order[1], order[0]]
    policy.withdraw(order[2])
    assert list(one) == order[3:]
    assert list(other) == [order[1], *order[3:]]


@each_policy
def test_an_abandoned_walk_leaves_every_item_in_place(make: MakePolicy) -> None:
    policy = _offered(make, "abc")
    next(policy.victims())
    assert sorted(policy.victims()) == ["a", "b", "c"]


@each_policy
def test_a_chain_that_offers_its_parents_is_evicted_whole(make: MakePolicy) -> None:
    chain = [f"blob {n}" for n in range(50)]
    policy = make()
    policy.offer(chain[-1], 1.0, 1000)
    evicted = []
    while (leaf := next(policy.victims(), None)) is not None:
        policy.withdraw(leaf)
        evicted.append(leaf)
        parent = chain.index(leaf) - 1
        if parent >= 0:
            policy.offer(chain[parent], 1.0, 1000)
    assert evicted == chain[::-1]


_STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefghij"), st.none() | st.floats(0, 10)), max_size=200
)


@each_policy
@given(steps=_STEPS)
def test_any_history_leaves_exactly_the_offered_items(
    make: MakePolicy, steps: list[tuple[str, float | None]]
) -> None:
    policy = make()
    offered = set()
    for item, last_used in steps:
        if last_used is None:
            policy.withdraw(item)
            offered.discard(item)
        else:
            policy.offer(item, last_used, 1000)
            offered.add(item)
        assert len(policy) == len(offered)
        assert (next(policy.victims(), None) is None) == (not offered)
    assert sorted(policy.victims()) == sorted(offered)
