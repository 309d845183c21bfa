"""Greedy dual by size and frequency, and LFU with dynamic aging, which is the same for one size.

An item is worth its uses (per byte, in GDSF) on top of the age of the cache when it was
last used; that age is the worth of what left last, so what is used no more falls behind.
"""

from __future__ import annotations

from blobstore.tiering.keyed import KeyedPolicy, touched
from blobstore.tiering.policy import T, Use


class LfuDa(KeyedPolicy[T]):
    """Fewest uses first, aged; among equals, the least recently used."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0
        self._uses: dict[T, tuple[int, float, float]] = {}
        """Uses of what is held, the age of the cache at the last of them, the weight of each."""

    def weight(self, nbytes: int) -> float:
        """What one use of an item of `nbytes` is worth."""
        return 1.0

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        uses, age, awaiting, offered = self._uses, self._age, self.awaiting, self.offered.live
        awaiting.clear()
        for item in touched(use):
            known = uses.get(item)
            if known is not None:
                uses[item] = (known[0] + 1, age, known[2])
                if item in offered:
                    self.offered.place(item, self.key(item, use.now_s))
            else:
                awaiting.add(item)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        self._uses[item] = (int(item in self.awaiting), self._age, self.weight(nbytes))

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        super().leave(item)
        known = self._uses.pop(item, None)
        if known is not None:
            self._age = max(self._age, _worth(*known))

    def key(self, item: T, last_used: float) -> tuple[float, float]:
        """As KeyedPolicy.key."""
        known = self._uses.get(item, (1, self._age, 1.0))
        return _worth(*known), last_used


class Gdsf(LfuDa[T]):
    """As LfuDa, with uses per byte: of two items used alike, the larger goes first."""

    def weight(self, nbytes: int) -> float:
        """As LfuDa.weight; an empty item is worth no more than one of a byte."""
        return 1.0 / max(1, nbytes)


def _worth(n_uses: int, age: float, weight: float) -> float:
    return age + max(1, n_uses) * weight
