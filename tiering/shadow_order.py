"""The learned order in a shadow: of items by identity, judged as those of the tiers are.

The classifier has been told of all that a shadow sees. So this one tells it nothing, and
only remembers which slot each item has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from blobstore.tiering.learned_order import Judge, LearnedOrder
from blobstore.tiering.policy import T


class ShadowOrder(LearnedOrder[int], Generic[T]):
    """By the worths of `judge`, who knows items by the slots that `find` gives."""

    def __init__(
        self, judge: Judge[Any], find: Callable[[T], int], rng: np.random.Generator
    ) -> None:
        self._find = find
        self._seen: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        super().__init__(judge, rng)

    def see(self, items: Sequence[T], identities: Sequence[int]) -> None:
        """The next use is of `items`, which go by `identities` here."""
        self._seen = dict(zip(identities, map(self._find, items), strict=True))

    def enter(self, item: int, nbytes: int) -> None:
        """As Policy.enter."""
        self._slots[item] = self._seen[item]

    def leave(self, item: int) -> None:
        """As Policy.leave."""
        self._slots.pop(item, None)
        super().leave(item)

    def _slot(self, item: int, last_used: float) -> int:
        return self._slots[item]
