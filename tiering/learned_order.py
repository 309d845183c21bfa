"""Least worth first, among a few that are drawn, and on up the chain of what has gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol

import numpy as np
import numpy.typing as npt

from blobstore.tiering.leaf_sample import LeafSample
from blobstore.tiering.policy import T, T_contra, Use

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


_DRAWN = 128
"""Of so many at random, the least is among the least 1/128 of all, near enough."""

_POOL = 24
"""The least of a draw, of which as many may be lost as the draw has an eye for."""

_LOST_PER_DRAW = 6
"""If there are more than are drawn: the others of the pool are too far from the least of all."""

_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of each _DRAWN, walked by in turns once the pool is used up: no step looks at more of them."""

_LOOKED_UP_FIRST, _LOOKED_UP_MAX = 8, 64
"""Of a chain that is walked up, judged at once: the longer, the longer it has been."""


class Judge(Protocol[T_contra]):
    """Who knows what an item is worth now."""

    def slot_of(self, item: T_contra, last_used: float) -> int:
        """The slot of `item`, made if it is not known."""
        ...

    def worths(self, slots: IntArray) -> FloatArray:
        """What the items of these slots are worth now."""
        ...

    def worths_above(self, item: T_contra, n: int) -> tuple[list[int], list[float]]:
        """The slots of the next `n` that `item` hangs on, nearest first, and their worths."""
        ...


class LearnedOrder(Generic[T]):
    """One tier's order of eviction by a judge, whom the orders of all tiers share."""

    def __init__(self, judge: Judge[T], rng: np.random.Generator) -> None:
        self._judge = judge
        self._rng = rng
        self._offered: LeafSample[T] = LeafSample(rng)
        self._pool: list[tuple[float, T]] = []
        self._n_left = 0
        self._bar = 0.0
        self._slots_above: list[int] = []
        self._worths_above: list[float] = []
        self._n_above = 0
        self._next: T | None = None

    def __len__(self) -> int:
        return len(self._offered)

    def use(self, use: Use[T]) -> None:
        """As Policy.use; the judge is told by whoever made it. Worth is as of the last use."""
        self._pool.clear()
        self._next = None

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self._offered.remove(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        slot = self._judge.slot_of(item, last_used)
        self._offered.put(item, slot)
        at = self._n_above
        if at == len(self._slots_above) or slot != self._slots_above[at]:
            self._pool.clear()  # it has not been drawn from all
            return
        worth = self._worths_above[at]
        self._n_above += 1
        if worth > self._bar:
            self._pool.append((worth, item))
            self._pool.sort(key=_minus_worth)
            return
        self._next = item
        if self._n_above == len(self._slots_above):
            self._look_up(item, min(2 * self._n_above, _LOOKED_UP_MAX))

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        self._offered.remove(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims, but for chance. The first costs some 50 µs, 2 µs up a chain.

        Past the pool each step costs a look at a draw, and one in many a list of all.
        """
        yielded: set[T] = set()
        while len(yielded) < _POOL:
            item = self._least(yielded)
            if item is None:
                break
            yielded.add(item)
            yield item
        for share in _SHARES:
            items, slots = self._offered.all()
            shuffled = self._rng.permutation(len(items))
            for start in range(0, len(items), _DRAWN):
                left = [
                    at
                    for at in shuffled[start : start + _DRAWN].tolist()
                    if items[at] not in yielded and items[at] in self._offered
                ]
                if not left:
                    continue
                n = max(1, int(len(left) * share))
                for _, item in self._sorted([items[at] for at in left], slots[left], n):
                    if item in self._offered:
                        yielded.add(item)
                        yield item
        yield from (item for item in self._offered.all()[0] if item not in yielded)

    def _least(self, yielded: set[T]) -> T | None:
        """On up the chain of what has gone last while that is worth least, or else of a draw."""
        offered, above = self._offered, self._next
        if above is not None and above in offered and above not in yielded:
            return above
        pool = self._pool
        while pool and pool[-1][1] not in offered:
            pool.pop()
            self._n_left -= 1
        if not pool or self._n_left <= 0:
            self._draw()
        left = [entry for entry in self._pool if entry[1] in offered]
        for at in range(len(left) - 1, -1, -1):
            item = left[at][1]
            if item not in yielded:
                self._bar = left[at - 1][0] if at else float("inf")
                self._look_up(item, _LOOKED_UP_FIRST)
                return item
        return None

    def _draw(self) -> None:
        items, slots = self._offered.draw(_DRAWN)
        self._pool = self._sorted(items, slots, _POOL)[::-1]
        self._n_left = _POOL - 1 if len(items) == len(self._offered) else _LOST_PER_DRAW

    def _look_up(self, item: T, n: int) -> None:
        """See what those above `item` are worth, who are likely to go next."""
        self._slots_above, self._worths_above = self._judge.worths_above(item, n)
        self._n_above = 0

    def _sorted(self, items: Sequence[T], slots: IntArray, n: int) -> list[tuple[float, T]]:
        """The `n` of least worth with their worths, the least first, each once."""
        worths = self._judge.worths(slots)
        places = worths.argsort(kind="stable")[:n]
        found: dict[T, float] = {}
        for place, worth in zip(places.tolist(), worths[places].tolist(), strict=True):
            found.setdefault(items[place], worth)
        return [(worth, item) for item, worth in found.items()]


def _minus_worth(entry: tuple[float, object]) -> float:
    return -entry[0]
