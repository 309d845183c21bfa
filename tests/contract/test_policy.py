"""What every Policy does, whatever its order. A new one joins by its name in POLICIES.

The orders of plans join too: they are what the store asks, and are told through the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.bench.trace import made_trace
from blobstore.tiering import lru_k
from blobstore.tiering.first_out import FirstOut
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.plan import POLICY_NAMES, Plan, PlanSettings, make_plan
from blobstore.tiering.policies import POLICIES
from blobstore.tiering.policy import Policy, PolicyTerms, Use
from blobstore.tiering.shadow_cache import ShadowCache

CAPACITY_BYTES = 20_000

MakePolicy = Callable[[], Policy[Any]]


def _identity(item: object) -> int:
    return item if isinstance(item, int) else int.from_bytes(str(item).encode(), "big")


class _Planned:
    """The order of DRAM in a plan, told as the store tells it."""

    def __init__(self, name: str) -> None:
        self._plan: Plan[Any] = make_plan(
            name, PolicyTerms(CAPACITY_BYTES, _identity), settings=PlanSettings(inline=True)
        )
        self._order = self._plan.dram

    def use(self, use: Use[Any]) -> None:
        self._plan.use(use)
        self._plan.tick(use.now_s)

    def enter(self, item: Any, nbytes: int) -> None:
        self._order.enter(item, nbytes)

    def leave(self, item: Any) -> None:
        self._order.leave(item)
        self._plan.forget(item)

    def offer(self, item: Any, last_used: float, nbytes: int) -> None:
        self._order.offer(item, last_used, nbytes)

    def withdraw(self, item: Any) -> None:
        self._order.withdraw(item)

    def victims(self) -> Iterator[Any]:
        return self._order.victims()

    def __len__(self) -> int:
        return len(self._order)


def _maker(name: str) -> MakePolicy:
    return lambda: POLICIES[name](PolicyTerms(CAPACITY_BYTES, _identity))


def _first_out() -> Policy[Any]:
    """Half of the items go before the others."""
    return FirstOut(LeafLru(), lambda item: 0.0 if _identity(item) % 2 else None, lambda: 1.0)


MAKERS: dict[str, MakePolicy] = (
    {name: _maker(name) for name in POLICIES}
    | {f"plan {name}": partial(_Planned, name) for name in POLICY_NAMES[:2]}
    | {"first out": _first_out}
)

each_policy = pytest.mark.parametrize("make", [*MAKERS.values()], ids=MAKERS)


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


@each_policy
def test_a_use_counts_alike_whether_it_is_told_before_its_items_enter_or_after(
    make: MakePolicy,
) -> None:
    """A replay tells before, the live store after."""
    orders = []
    for told_after in (False, True):
        policy = make()
        for now_s, text in enumerate(["a", "b", "c", "d", "b", "c", "c", "e", "a"], 1):
            use = Use([text], int(text in policy_holds(policy)), float(now_s))
            if not told_after:
                policy.use(use)
            policy.withdraw(text)
            if not use.n_held:
                policy.enter(text, 4000)
            policy.offer(text, use.now_s, 4000)
            if told_after:
                policy.use(use)
        orders.append(list(policy.victims()))
    assert orders[0] == orders[1]


def policy_holds(policy: Policy[Any]) -> set[Any]:
    return set(policy.victims())


def _sizes(block: int) -> int:
    return 500 + block % 7 * 100


class _Watched:
    """A policy that is checked as it goes: what it says may go, may go."""

    def __init__(self, policy: Policy[int]) -> None:
        self._policy = policy
        self.inside: set[int] = set()
        self.offered: set[int] = set()
        self.evicted: list[int] = []

    def use(self, use: Use[int]) -> None:
        self._policy.use(use)

    def enter(self, item: int, nbytes: int) -> None:
        assert item not in self.inside
        self.inside.add(item)
        self._policy.enter(item, nbytes)

    def leave(self, item: int) -> None:
        assert item not in self.offered
        self.inside.remove(item)
        self._policy.leave(item)
        self.evicted.append(item)

    def offer(self, item: int, last_used: float, nbytes: int) -> None:
        assert item in self.inside
        self.offered.add(item)
        self._policy.offer(item, last_used, nbytes)

    def withdraw(self, item: int) -> None:
        self.offered.discard(item)
        self._policy.withdraw(item)

    def victims(self) -> Iterator[int]:
        for victim in self._policy.victims():
            assert victim in self.offered
            yield victim

    def __len__(self) -> int:
        return len(self._policy)


def _replayed(make: MakePolicy) -> tuple[_Watched, int]:
    policy = _Watched(make())
    cache = ShadowCache(CAPACITY_BYTES, policy, _sizes)
    n_hit = 0
    for request in made_trace().requests:
        n_held = cache.n_held(request.blocks)
        n_hit += cache.use(Use(request.blocks, n_held, request.time_s, 512))
        assert cache.used_bytes <= CAPACITY_BYTES
        assert len(policy) == len(policy.offered)
        assert len(cache) == len(policy.inside)
        assert sorted(policy.victims()) == sorted(policy.offered)
    return policy, n_hit


@each_policy
def test_conversations_are_served_from_a_cache_that_is_too_small(make: MakePolicy) -> None:
    policy, n_hit = _replayed(make)
    assert len(policy.evicted) > 100
    assert n_hit > 100


@each_policy
def test_the_same_uses_evict_the_same_items(make: MakePolicy) -> None:
    assert _replayed(make)[0].evicted == _replayed(make)[0].evicted


@each_policy
def test_what_left_and_came_back_may_go_again(make: MakePolicy) -> None:
    policy = make()
    for at in range(3):
        policy.use(Use(["a"], 0, float(at)))
        policy.enter("a", 1000)
        policy.offer("a", float(at), 1000)
        assert list(policy.victims()) == ["a"]
        policy.withdraw("a")
        policy.leave("a")
        assert list(policy.victims()) == []


@pytest.mark.parametrize("name", POLICIES)
def test_keys_used_once_leave_nothing_behind_but_a_bounded_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ours may remember is a setting of its own, and is tested with it."""
    monkeypatch.setattr(lru_k, "_GHOSTS_MIN", 100)
    policy = MAKERS[name]()
    cache = ShadowCache(CAPACITY_BYTES, policy, lambda item: 1000)
    cache.use(Use([-1], 0, 0.0))
    for item in range(3_000):
        cache.use(Use([item], 0, float(item)))
    assert len(policy) == len(cache) == CAPACITY_BYTES // 1000
    assert _n_remembered(policy) <= 1100


def _n_remembered(policy: Policy[Any]) -> int:
    """Entries in all that a policy keeps, at any depth."""
    todo, n = [*vars(policy).values()], 0
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            n += len(value)
        elif isinstance(value, list | tuple):
            todo += value
        elif type(value).__module__.startswith("blobstore.tiering") and hasattr(value, "__dict__"):
            todo += vars(value).values()
    return n
