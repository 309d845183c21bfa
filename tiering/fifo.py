"""First in, first out: no use counts."""

from __future__ import annotations

from itertools import count

from blobstore.tiering.keyed import KeyedPolicy
from blobstore.tiering.policy import T


class Fifo(KeyedPolicy[T]):
    """What came first goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = count()
        self._entered: dict[T, int] = {}

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        self._entered[item] = next(self._clock)

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        super().leave(item)
        self._entered.pop(item, None)

    def key(self, item: T, last_used: float) -> int:
        """As KeyedPolicy.key."""
        return self._entered.get(item, -1)
