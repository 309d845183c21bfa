"""Items in the order of keys that change: what policies keep their evictable items in."""

from __future__ import annotations

import heapq
from typing import Any, Generic

from blobstore.tiering.policy import T

_Entry = tuple[Any, int, T]

_COMPACT_ABOVE = 64
"""Stale entries that a heap may hold whatever its size, so that small ones are left alone."""


class KeyHeap(Generic[T]):
    """Least key first; among equals, the one placed first. All keys of a heap are comparable.

    A heap whose entries are abandoned in place when their item is removed or placed
    anew. Both cost O(log n), amortised; it never holds more than twice the live entries
    and a constant.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self.live: dict[T, _Entry[T]] = {}
        """What is in it, to be asked for only: loops over long chains do so for each item."""
        self._sequence = 0
        self._moves = 0

    def __len__(self) -> int:
        return len(self.live)

    def __contains__(self, item: T) -> bool:
        return item in self.live

    def place(self, item: T, key: Any) -> None:
        """Give `item` its place by `key`, whether or not it has one."""
        self._sequence += 1
        entry = (key, self._sequence, item)
        self.live[item] = entry
        heapq.heappush(self._heap, entry)
        self._moves += 1
        self._compact()

    def remove(self, item: T) -> None:
        """Take `item` out; unknown ones are ignored."""
        if self.live.pop(item, None) is not None:
            self._compact()

    def first(self) -> T | None:
        """The item of the least key; None when there is nothing."""
        self._drop_stale_top()
        return self._heap[0][2] if self._heap else None

    def walk(self) -> Walk[T]:
        """All items in order, as Walk says."""
        return Walk(self)

    def _drop_stale_top(self) -> None:
        heap, live = self._heap, self.live
        while heap and live.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
            self._moves += 1

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self.live) + _COMPACT_ABOVE:
            self._heap = list(self.live.values())
            heapq.heapify(self._heap)
            self._moves += 1


class Walk(Generic[T]):
    """Goes through a heap in order and removes nothing.

    The first item costs O(1) amortised, the k-th O(log k). Items may be placed and removed
    while it goes on: one that was removed is not yielded any more, one placed meanwhile is
    if it comes after those already yielded, even when the walk had come to its end. Placing
    between two steps makes the next one pass by the items that were yielded and are still
    there: remove as you go.
    """

    def __init__(self, order: KeyHeap[T]) -> None:
        self._order = order
        self._last: tuple[Any, ...] = ()
        self._moves = -1
        self._frontier: list[tuple[_Entry[T], int]] = []

    def __iter__(self) -> Walk[T]:
        return self

    def __next__(self) -> T:
        order = self._order
        if self._moves != order._moves:
            order._drop_stale_top()
            self._frontier = [(order._heap[0], 0)] if order._heap else []
            self._moves = order._moves
        heap, frontier = order._heap, self._frontier
        while frontier:
            # The frontier holds the heap positions whose parents were passed:
            # its least entry is the heap's next in order, without popping it.
            entry, at = heapq.heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
            if entry[:2] > self._last and order.live.get(entry[2]) is entry:
                self._last = entry[:2]
                return entry[2]
        raise StopIteration
