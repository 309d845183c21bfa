"""Least worth first: among the least of a sweep, and on up the chains of what has gone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol

import numpy as np
import numpy.typing as npt

from blobstore.tiering.leaf_sample import LeafSample
from blobstore.tiering.policy import T, T_contra, Use

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SWEPT = 1024
"""Looked at in a sweep, at random where there are more."""

_POOL_MIN, _POOL_SHARE = 24, 8
"""The least of a sweep, of which victims are taken until the next one."""

_VICTIMS_MIN, _VICTIMS_SHARE = 16, 4
_VICTIMS_OF_ALL = 256
_USES_SHARE = 128
"""A sweep holds until so many of what it has seen have left, or as many uses have come as
may have changed a small part of it. Nobody is overlooked while the pool is all that there is."""

_AHEAD = 16
"""Of the pool, whose chains are judged as soon as that of one victim has to be."""

_DRAWN = 128
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of each _DRAWN, walked by in turns once the pool is used up: no step looks at more of them."""

_Entry = tuple[float, int, T, int]
"""Worth, order of coming, item, slot."""


class Judge(Protocol[T_contra]):
    """Who knows what an item is worth now."""

    def slot_of(self, item: T_contra, last_used: float) -> int:
        """The slot of `item`, made if it is not known."""
        ...

    def worths(self, slots: IntArray) -> FloatArray:
        """What the items of these slots are worth now."""
        ...

    def worth_of(self, slot: int) -> float | None:
        """The same of one, in no time; None if that takes a judgement."""
        ...

    def above(self, slot: int) -> int:
        """The slot of what the item hangs on; -1 if nothing is known."""
        ...

    def look_up(self, slots: Iterable[int]) -> None:
        """Judge items and some that they hang on, who are likely to go next."""
        ...


class LearnedOrder(Generic[T]):
    """One tier's order of eviction by a judge, whom the orders of all tiers share.

    What is offered anew waits for the next sweep, unless a victim has laid it bare.
    """

    def __init__(self, judge: Judge[T], rng: np.random.Generator) -> None:
        self._judge = judge
        self._rng = rng
        self._offered: LeafSample[T] = LeafSample(rng)
        self._bared: dict[T, int] = {}
        """With their slots: offered since the last sweep, and in the pool at once."""
        self._pool: dict[T, _Entry[T]] = {}
        self._heap: list[_Entry[T]] = []
        self._bar = 0.0
        """What is worth more is not in the pool."""
        self._n_bared = 0
        """Since the last sweep."""
        self._n_victims_left = self._n_uses_left = 0
        self._above = -1
        """The slot above the last victim."""

    def __len__(self) -> int:
        return len(self._offered) + len(self._bared)

    def use(self, use: Use[T]) -> None:
        """As Policy.use; the judge is told by whoever made it. Worth is as of the last use."""
        self._n_uses_left -= 1
        pool = self._pool
        if not pool.keys().isdisjoint(use.items):
            for item in use.items:
                if item in pool:
                    self._set_aside(item)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self.withdraw(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        judge = self._judge
        slot = self._slot(item, last_used)
        worth = judge.worth_of(slot)
        if worth is None and slot == self._above:
            judge.look_up([slot, *(entry[3] for entry in self._heap[:_AHEAD])])
            worth = judge.worth_of(slot)
        if worth is None or worth > self._bar or self._n_victims_left <= 0:
            if self._pool.pop(item, None) is not None:
                self._bared.pop(item, None)
            self._offered.put(item, slot)
            return
        if item not in self._offered:
            self._bared[item] = slot
        self._n_bared += 1  # of equal worth, the end of a chain that has been begun goes first
        entry = (worth, -self._n_bared, item, slot)
        self._pool[item] = entry
        heapq.heappush(self._heap, entry)

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        entry = self._pool.pop(item, None)
        if entry is not None:
            self._n_victims_left -= 1
            self._above = self._judge.above(entry[3])
            if self._bared.pop(item, None) is not None:
                return
        self._offered.remove(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims, but for chance. A sweep costs 0.1 ms for a thousand; most need none.

        Past the pool each step costs a look at a draw, and one in many a list of all.
        """
        first = self._least()
        if first is not None:
            yield first
            yield from self._others({first})

    def _slot(self, item: T, last_used: float) -> int:
        return self._judge.slot_of(item, last_used)

    def _others(self, yielded: set[T]) -> Iterator[T]:
        while len(yielded) < _POOL_MIN and (item := self._least_but(yielded)) is not None:
            yielded.add(item)
            yield item
        self._settle()
        for share in _SHARES:
            items, slots = self._offered.all()
            shuffled = self._rng.permutation(len(items))
            for start in range(0, len(items), _DRAWN):
                left = [
                    at
                    for at in shuffled[start : start + _DRAWN].tolist()
                    if items[at] not in yielded and items[at] in self
                ]
                if not left:
                    continue
                order = self._judge.worths(slots[left]).argsort(kind="stable")
                for place in order[: max(1, int(len(left) * share))].tolist():
                    item = items[left[place]]
                    if item in self:
                        yielded.add(item)
                        yield item
        self._settle()
        yield from (item for item in self._offered.all()[0] if item not in yielded)

    def __contains__(self, item: T) -> bool:
        return item in self._offered or item in self._bared

    def _least(self) -> T | None:
        if self._n_victims_left <= 0 or self._n_uses_left < 0:
            self._sweep()
        while len(self):
            heap, pool = self._heap, self._pool
            while heap:
                entry = heap[0]
                if pool.get(entry[2]) is entry:
                    return entry[2]
                heapq.heappop(heap)
            self._sweep()
        return None

    def _least_but(self, yielded: set[T]) -> T | None:
        self._least()
        left = (entry for entry in self._pool.values() if entry[2] not in yielded)
        least = min(left, default=None)
        return None if least is None else least[2]

    def _sweep(self) -> None:
        """Fill the pool with the least of all, or of many."""
        self._settle()
        items, slots = self._offered.draw(_SWEPT)
        worths = self._judge.worths(slots)
        n, n_kept = len(items), max(_POOL_MIN, len(items) // _POOL_SHARE)
        least = worths.argsort(kind="stable")[:n_kept]
        self._heap = [
            (worth, at, items[place], slot)
            for at, (worth, place, slot) in enumerate(
                zip(
                    worths.take(least).tolist(),
                    least.tolist(),
                    slots.take(least).tolist(),
                    strict=True,
                )
            )
        ]
        self._pool = {entry[2]: entry for entry in self._heap}
        self._n_bared = 0
        if n > n_kept:
            self._bar = self._heap[-1][0]
            self._n_victims_left = max(_VICTIMS_MIN, n // _VICTIMS_SHARE)
        else:
            self._bar, self._n_victims_left = float("inf"), _VICTIMS_OF_ALL
        self._n_uses_left = n // _USES_SHARE

    def _settle(self) -> None:
        for item, slot in self._bared.items():
            self._offered.put(item, slot)
        self._bared.clear()

    def _set_aside(self, item: T) -> None:
        del self._pool[item]
        slot = self._bared.pop(item, None)
        if slot is not None:
            self._offered.put(item, slot)
