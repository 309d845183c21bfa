"""Least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic

from blobstore.tiering.policy import T, Use

_Entry = tuple[float, int, T]

_COMPACT_ABOVE = 64
"""Stale entries that a heap may hold whatever its size, so that small ones are left alone."""


class LeafLru(Generic[T]):
    """Least recently used first; among equals, the one offered first.

    A heap whose entries are abandoned in place when their item is withdrawn or
    offered anew. Offering and withdrawing cost O(log n), amortised; the heap
    never holds more than twice the live entries and a constant.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self._live: dict[T, _Entry[T]] = {}
        self._sequence = 0
        self._moves = 0

    def __len__(self) -> int:
        return len(self._live)

    def use(self, use: Use[T]) -> None:
        """As Policy.use; the time of last use comes with each offer."""

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self.withdraw(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer; size does not matter to this order."""
        self._sequence += 1
        entry = (last_used, self._sequence, item)
        self._live[item] = entry
        heapq.heappush(self._heap, entry)
        self._moves += 1
        self._compact()

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        if self._live.pop(item, None) is not None:
            self._compact()

    def victims(self) -> Iterator[T]:
        """As Policy.victims. The first costs O(1) amortised; the k-th O(log k).

        An offer between two steps makes the next one walk past the items that
        were yielded and not withdrawn: evict as you go.
        """
        last = (float("-inf"), 0)
        moves = -1
        frontier: list[tuple[_Entry[T], int]] = []
        while True:
            if moves != self._moves:
                self._drop_stale_top()
                frontier = [(self._heap[0], 0)] if self._heap else []
                moves = self._moves
            if not frontier:
                return
            # The frontier holds the heap positions whose parents were passed:
            # its least entry is the heap's next in order, without popping it.
            entry, at = heapq.heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))
            if entry[:2] > last and self._live.get(entry[2]) is entry:
                last = entry[:2]
                yield entry[2]

    def _drop_stale_top(self) -> None:
        while self._heap and self._live.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
            self._moves += 1

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _COMPACT_ABOVE:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
            self._moves += 1
