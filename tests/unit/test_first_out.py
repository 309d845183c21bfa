from __future__ import annotations

from blobstore.tiering.first_out import FirstOut
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.policy import Policy
from tests.support.clock import FakeClock


class Room:
    """An order of single letters, of which some have a time."""

    def __init__(self, order: Policy[str] | None = None) -> None:
        self.clock = FakeClock()
        self.due_s: dict[str, float] = {}
        self.inner: Policy[str] = order or LeafLru()
        self.order = FirstOut(self.inner, self.due_s.get, self.clock)

    def offer(self, *items: str) -> None:
        for item in items:
            self.order.offer(item, self.clock(), 1)
            self.clock.advance(1.0)

    def victims(self) -> str:
        return "".join(self.order.victims())


def test_without_any_time_the_order_decides() -> None:
    room = Room()
    room.offer("a", "b", "c")
    assert room.victims() == "abc"
    assert len(room.order) == 3


def test_what_is_due_goes_first_and_the_longest_due_before() -> None:
    room = Room()
    now_s = room.clock()
    room.due_s.update(c=now_s + 2, d=now_s + 1)
    room.offer("a", "b", "c", "d")
    assert room.victims() == "dcab"


def test_nothing_goes_first_before_its_time() -> None:
    room = Room()
    room.due_s.update(b=room.clock() + 100, c=room.clock() + 50)
    room.offer("a", "b", "c")
    assert room.victims() == "abc"
    room.clock.advance(50)
    assert room.victims() == "cab"
    room.clock.advance(50)
    assert room.victims() == "cba"


def test_a_time_that_is_taken_back_counts_at_once() -> None:
    room = Room()
    room.due_s.update(b=0.0, c=0.0)
    room.offer("a", "b", "c")
    assert room.victims() == "bca"
    del room.due_s["b"]
    assert room.victims() == "cab"
    room.due_s["c"] = room.clock() + 10  # put off
    assert room.victims() == "abc"


def test_a_time_that_is_given_counts_once_the_item_is_offered_again() -> None:
    room = Room()
    room.offer("a", "b")
    room.due_s["b"] = 0.0
    room.offer("b")
    assert room.victims() == "ba"


def test_who_left_or_was_withdrawn_is_no_victim() -> None:
    room = Room()
    room.due_s.update(b=0.0, c=0.0)
    room.offer("a", "b", "c")
    room.order.withdraw("b")
    assert room.victims() == "ca"
    room.order.withdraw("c")
    room.order.leave("c")
    assert room.victims() == "a"
    room.offer("b")
    assert room.victims() == "ba"


def test_items_withdrawn_on_the_way_are_not_yielded() -> None:
    room = Room()
    room.due_s.update(b=0.0, c=0.0)
    room.offer("a", "b", "c")
    walk = room.order.victims()
    assert next(walk) == "b"
    room.order.withdraw("c")
    room.order.withdraw("b")
    assert "".join(walk) == "a"


def test_the_order_knows_all_items() -> None:
    room = Room()
    room.due_s["b"] = 0.0
    room.order.enter("b", 1)
    room.offer("a", "b")
    assert list(room.inner.victims()) == ["a", "b"]
