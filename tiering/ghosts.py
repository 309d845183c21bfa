"""What is remembered of items that left: a bounded memory by identity."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Ghosts(Generic[V]):
    """A note by identity, of the latest `n_max` that were noted, or of up to twice as many.

    Two generations: when the young one is full, it becomes the old one, and what was old
    is forgotten. So noting and looking up cost two look-ups and no order is kept.
    """

    def __init__(self) -> None:
        self._young: dict[int, V] = {}
        self._old: dict[int, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, identity: int, note: V, n_max: int) -> None:
        """Remember `note`, in place of any earlier one."""
        self._old.pop(identity, None)
        self._young[identity] = note
        if len(self._young) >= n_max:
            self._old, self._young = self._young, {}

    def take(self, identity: int) -> V | None:
        """What was noted last, which is forgotten now; None if nothing is known."""
        note = self._young.pop(identity, None)
        return self._old.pop(identity, None) if note is None else note


class GhostQueue:
    """The items that left last, oldest first, with their sizes; its owner cuts it to length."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, identity: int) -> bool:
        return identity in self._sizes

    def add(self, identity: int, nbytes: int) -> None:
        """The latest, whether or not it was there."""
        self.remove(identity)
        self._sizes[identity] = nbytes
        self.nbytes += nbytes

    def remove(self, identity: int) -> bool:
        """Whether it was there."""
        nbytes = self._sizes.pop(identity, None)
        if nbytes is None:
            return False
        self.nbytes -= nbytes
        return True

    def size_of(self, identity: int) -> int | None:
        """Its bytes, if it is there."""
        return self._sizes.get(identity)

    def cut(self, nbytes_max: float) -> None:
        """Forget the oldest until no more than `nbytes_max` are left."""
        while self.nbytes > nbytes_max:
            self.nbytes -= self._sizes.popitem(last=False)[1]
