"""That the least worth goes first, and chains from their ends upwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blobstore.tiering.learned_order import LearnedOrder
from blobstore.tiering.policy import Use
from blobstore.tiering.shadow_cache import ShadowCache


class _Judge:
    """Items are their own slots; chains are `parents`; counts how often it was asked."""

    def __init__(self, worth: Mapping[int, float], parents: Mapping[int, int]) -> None:
        self.worth = worth
        self.parents = parents
        self.n_asked = self.n_looked_up = 0
        self.judged: set[int] = set()

    def slot_of(self, item: int, last_used: float) -> int:
        return item

    def worths(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        self.n_asked += 1
        self.judged.update(slots.tolist())
        return np.array([self.worth[slot] for slot in slots.tolist()])

    def worth_of(self, slot: int) -> float | None:
        return self.worth[slot] if slot in self.judged else None

    def above(self, slot: int) -> int:
        return self.parents.get(slot, -1)

    def look_up(self, slots: Iterable[int]) -> None:
        self.n_looked_up += 1
        for slot in slots:
            for _ in range(8):
                self.judged.add(slot)
                slot = self.above(slot)


def _order(judge: _Judge, items: range | list[int]) -> LearnedOrder[int]:
    order: LearnedOrder[int] = LearnedOrder(judge, np.random.default_rng(1))
    for item in items:
        order.offer(item, 0.0, 1)
    return order


def _evict(order: LearnedOrder[int], judge: _Judge, n: int) -> list[int]:
    """Lose `n` items, as tiers do: each one's parent is offered once it is bare."""
    gone: list[int] = []
    for _ in range(n):
        victim = next(order.victims())
        order.withdraw(victim)
        order.leave(victim)
        gone.append(victim)
        parent = judge.parents.get(victim, -1)
        if parent >= 0:
            order.offer(parent, 0.0, 1)
    return gone


def _two_chains(first: list[float], second: list[float]) -> tuple[_Judge, LearnedOrder[int]]:
    """Chains 0, 1, 2… and 100, 101, 102…, worth so much from their roots to their ends."""
    worth = dict(enumerate(first)) | {100 + at: value for at, value in enumerate(second)}
    parents = {item: item - 1 for item in worth if item % 100}
    judge = _Judge(worth, parents)
    return judge, _order(judge, [len(first) - 1, 99 + len(second)])


def test_of_few_the_least_worth_goes_first() -> None:
    worth = dict(enumerate(np.random.default_rng(2).permutation(60).tolist()))
    order = _order(_Judge(worth, {}), range(60))
    assert [worth[item] for item in order.victims()] == list(range(60))


def test_of_many_those_worth_little_go_first_and_all_come_in_the_end() -> None:
    worth = {item: float(item) for item in range(2000)}
    judge = _Judge(worth, {})
    order = _order(judge, range(2000))
    assert np.mean(_evict(order, judge, 200)) < 250
    assert sorted(order.victims()) == sorted(order._offered.all()[0])
    assert len(set(order.victims())) == 1800


def test_a_chain_goes_on_while_it_is_worth_least() -> None:
    judge, order = _two_chains([1.0] * 40, [2.0] * 40)
    assert _evict(order, judge, 40) == list(range(39, -1, -1))
    assert judge.n_asked < 5
    assert judge.n_looked_up < 8


def test_of_chains_worth_the_same_one_is_lost_whole_before_the_next() -> None:
    judge, order = _two_chains([1.0] * 10, [1.0] * 10)
    gone = _evict(order, judge, 20)
    assert [item // 100 for item in gone] in ([0] * 10 + [1] * 10, [1] * 10 + [0] * 10)


def test_a_chain_stops_where_another_is_worth_less() -> None:
    judge, order = _two_chains([8.0, 3.0, 1.0], [9.0, 4.0, 2.0])
    assert _evict(order, judge, 6) == [2, 102, 1, 101, 0, 100]


def test_looking_does_not_change_who_goes() -> None:
    judge, order = _two_chains([9.0, 3.0, 1.0], [9.0, 4.0, 2.0])
    for expected in (2, 102, 1):
        least, *_ = order.victims()
        assert least == next(order.victims()) == expected
        assert _evict(order, judge, 1) == [expected]


def test_a_walk_past_many_looks_at_few_at_a_time() -> None:
    asked: list[int] = []

    class Watched(_Judge):
        def worths(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            asked.append(len(slots))
            return super().worths(slots)

    judge = Watched({item: float(item) for item in range(3000)}, {})
    order = _order(judge, range(3000))
    walked = list(order.victims())
    assert sorted(walked) == list(range(3000))
    assert max(asked) <= 1024


def test_what_is_read_over_and_over_leaves_nothing_behind() -> None:
    judge = _Judge({item: float(item) for item in range(10)}, {})
    order = _order(judge, range(10))
    assert next(order.victims()) == 0
    for _ in range(1000):
        order.withdraw(0)
        order.offer(0, 0.0, 1)
    assert len(order._heap) < 300
    assert next(order.victims()) == 0
    assert len(order) == 10


def test_worth_is_asked_anew_after_a_use() -> None:
    judge = _Judge({1: 1.0, 2: 2.0}, {})
    order = _order(judge, [1, 2])
    assert next(order.victims()) == 1
    judge.worth = {1: 2.0, 2: 1.0}
    order.use(Use([1], 1, 1.0))
    assert next(order.victims()) == 2


def test_what_a_use_has_changed_waits_for_the_next_sweep() -> None:
    judge = _Judge({item: float(item) for item in range(400)}, {})
    order = _order(judge, range(400))
    gone = _evict(order, judge, 2)
    judge.worth = {**judge.worth, 2: -1.0, 401: -2.0}
    order.use(Use([2], 1, 1.0))
    order.offer(401, 0.0, 1)
    gone += _evict(order, judge, 40)
    assert gone == [0, 1, *range(3, 43)]
    gone = _evict(order, judge, 60)
    assert gone.index(401) + 1 == gone.index(2)


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_under_it_keeps_whole_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    worth = dict(enumerate(rng.random(1000).tolist()))
    parents = {item: item - 1 for item in worth if item % 10}
    cache: ShadowCache[int] = ShadowCache(55, _order(_Judge(worth, parents), []), lambda _: 1)
    for time_s in range(300):
        root = int(rng.integers(100)) * 10
        items = list(range(root, root + int(rng.integers(1, 11))))
        held: Any = cache.n_held(items)
        cache.use(Use(items, held, float(time_s)))
        assert cache.n_held(items) == len(items)
        assert len(cache) <= 55
