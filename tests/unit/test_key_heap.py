"""What a heap of changing keys may hold, and how it is walked."""

from __future__ import annotations

from blobstore.tiering.key_heap import KeyHeap


def test_stale_entries_stay_bounded() -> None:
    heap: KeyHeap[int] = KeyHeap()
    for use in range(10_000):
        heap.place(use % 100, use)
        assert len(heap._heap) <= 2 * len(heap) + 64 + 1
    for item in range(99):
        heap.remove(item)
        assert len(heap._heap) <= 2 * len(heap) + 64 + 1
    assert list(heap.walk()) == [99]


def test_the_first_is_the_least_that_is_still_there() -> None:
    heap: KeyHeap[str] = KeyHeap()
    assert heap.first() is None
    for key, item in enumerate("abc"):
        heap.place(item, key)
    heap.remove("a")
    heap.place("b", 9)
    assert heap.first() == "c"
    assert "a" not in heap
    assert "b" in heap


def test_a_walk_that_came_to_its_end_goes_on_when_something_is_placed_behind_it() -> None:
    heap: KeyHeap[str] = KeyHeap()
    heap.place("a", 1)
    walk = heap.walk()
    assert list(walk) == ["a"]
    heap.place("before", 0)
    heap.place("after", 2)
    assert list(walk) == ["after"]


def test_keys_may_be_tuples_and_equal_ones_go_in_the_order_of_placing() -> None:
    heap: KeyHeap[str] = KeyHeap()
    for item, key in (
        ("late", (1, 2.0)),
        ("one", (1, 1.0)),
        ("two", (1, 1.0)),
        ("first", (0, 9.0)),
    ):
        heap.place(item, key)
    assert list(heap.walk()) == ["first", "one", "two", "late"]
