"""Several orders of one tier, one of them in force."""

from __future__ import annotations

import pytest

from blobstore.tiering import switched_order as module
from blobstore.tiering.fifo import Fifo
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.policy import Use
from blobstore.tiering.switched_order import SwitchedOrder
from tests.support.stand_in_learner import NewestFirst


def _order() -> SwitchedOrder[str]:
    order: SwitchedOrder[str] = SwitchedOrder({"new": NewestFirst, "lru": LeafLru}, "new")
    for at, item in enumerate("abc"):
        order.enter(item, 10 + at)
        order.offer(item, float(at), 10 + at)
    return order


def test_the_order_in_force_says_who_goes() -> None:
    order = _order()
    assert list(order.victims()) == ["c", "b", "a"]
    order.switch("lru")
    assert order.in_force == "lru"
    assert list(order.victims()) == ["a", "b", "c"]
    assert len(order) == 3


def test_changing_over_forgets_nothing_that_was_said_before() -> None:
    order = _order()
    order.withdraw("b")
    order.leave("a")
    order.switch("lru")
    assert list(order.victims()) == ["c"]
    order.offer("b", 9.0, 11)
    order.switch("new")
    assert list(order.victims()) == ["b", "c"]


def test_what_is_held_is_counted_once() -> None:
    order = _order()
    assert (order.n_items, order.used_bytes) == (3, 33)
    order.enter("a", 20)
    assert (order.n_items, order.used_bytes) == (3, 43)
    order.leave("a")
    order.leave("a")
    order.leave("unknown")
    assert (order.n_items, order.used_bytes) == (2, 23)


def test_uses_are_told_once_by_tell() -> None:
    told: list[str] = []

    class Told(LeafLru[str]):
        def use(self, use: Use[str]) -> None:
            told.extend(use.items)

    order = SwitchedOrder({"told": Told}, "told")
    order.use(Use(["a"], 0, 1.0))
    assert told == []
    order.tell(Use(["a"], 0, 1.0))
    assert told == ["a"]


def test_a_large_tier_is_taken_over_in_steps_and_nothing_is_lost_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BUILD_ITEMS", 3)
    order: SwitchedOrder[int] = SwitchedOrder({"new": NewestFirst, "lru": LeafLru}, "new")
    for item in range(10):
        order.enter(item, 1)
        if item != 4:
            order.offer(item, float(item), 1)
    order.switch("lru")
    assert order.in_force == "new"
    order.leave(1)  # taken over already
    order.leave(8)  # not yet
    order.withdraw(2)
    order.withdraw(7)
    order.offer(0, 99.0, 1)
    order.offer(9, 98.0, 1)
    order.enter(20, 1)
    order.offer(20, 97.0, 1)
    order.offer(21, 96.0, 1)  # never entered
    while order.in_force != "lru":
        order.step()
    assert list(order.victims()) == [3, 5, 6, 21, 20, 9, 0]
    assert len(order) == 7
    assert order.n_items == 9


def test_what_comes_again_while_an_order_is_built_is_entered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BUILD_ITEMS", 1)
    entered: list[int] = []

    class Entered(LeafLru[int]):
        def enter(self, item: int, nbytes: int) -> None:
            entered.append(item)

    order: SwitchedOrder[int] = SwitchedOrder({"new": NewestFirst, "e": Entered}, "new")
    for item in range(4):
        order.enter(item, 1)
    order.switch("e")
    order.leave(3)
    order.enter(3, 1)
    while order.in_force != "e":
        order.step()
    assert sorted(entered) == [0, 1, 2, 3]


def test_changing_ones_mind_while_an_order_is_built_keeps_the_one_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BUILD_ITEMS", 1)
    order = _order()
    order.switch("lru")
    order.switch("new")
    for _ in range(5):
        order.step()
    assert order.in_force == "new"


def test_what_was_only_offered_is_taken_over_too() -> None:
    order = _order()
    order.offer("z", 5.0, 1)
    order.offer("y", 6.0, 1)
    order.withdraw("y")
    order.enter("y", 1)
    order.switch("lru")
    assert list(order.victims()) == ["a", "b", "c", "z"]
    order.leave("z")
    order.switch("new")
    assert list(order.victims()) == ["c", "b", "a"]


def test_items_are_taken_over_in_the_order_in_which_they_entered() -> None:
    order: SwitchedOrder[int] = SwitchedOrder({"new": NewestFirst, "fifo": Fifo}, "new")
    for item in (3, 1, 2):
        order.enter(item, 1)
        order.offer(item, 0.0, 1)
    order.switch("fifo")
    assert list(order.victims()) == [3, 1, 2]
