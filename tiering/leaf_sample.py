"""The items of one tier that may go, from which a few can be drawn at once."""

from __future__ import annotations

from typing import Generic

import numpy as np
import numpy.typing as npt

from blobstore.tiering.policy import T

IntArray = npt.NDArray[np.int64]


class LeafSample(Generic[T]):
    """Items with their slots, in no order; every change and every draw costs O(1) an item."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._items: list[T] = []
        self._slots = np.zeros(256, np.int64)
        self._places: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def put(self, item: T, slot: int) -> None:
        """Take in `item`, or note its slot anew."""
        place = self._places.get(item)
        if place is None:
            place = self._places[item] = len(self._items)
            self._items.append(item)
            if place == len(self._slots):
                self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
        self._slots[place] = slot

    def remove(self, item: T) -> None:
        """Unknown items are ignored."""
        place = self._places.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if place < len(self._items):
            self._items[place] = last
            self._slots[place] = self._slots[len(self._items)]
            self._places[last] = place

    def draw(self, n: int) -> tuple[list[T], IntArray]:
        """Some `n` items, each maybe more than once, and their slots; all if there are no more."""
        if len(self._items) <= n:
            return self.all()
        places = self._rng.integers(len(self._items), size=n)
        items = self._items
        return [items[place] for place in places.tolist()], self._slots[places]

    def all(self) -> tuple[list[T], IntArray]:
        """All items, and their slots."""
        return list(self._items), self._slots[: len(self._items)].copy()
