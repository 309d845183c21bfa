"""LRU-2: the second last use counts, so that what was used but once goes first."""

from __future__ import annotations

from blobstore.tiering.ghosts import Ghosts
from blobstore.tiering.keyed import KeyedPolicy, touched
from blobstore.tiering.policy import PolicyTerms, T, Use

_NEVER = float("-inf")

_GHOSTS_PER_ITEM = 4
"""Items whose last use is remembered after they left, per item held."""

_GHOSTS_MIN = 1 << 16


class LruK(KeyedPolicy[T]):
    """Earliest second last use first; among items used once, the least recently used.

    Uses of an item count on after it left, for as long as it is remembered.
    """

    def __init__(self, terms: PolicyTerms[T]) -> None:
        super().__init__()
        self._identity = terms.identity
        self._uses: dict[T, tuple[float, float]] = {}
        """Second last and last use of what is held."""
        self._ghosts: Ghosts[float] = Ghosts()
        self._now_s = 0.0

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        self._now_s = now_s = use.now_s
        uses, awaiting, offered = self._uses, self.awaiting, self.offered.live
        awaiting.clear()
        for item in touched(use):
            times = uses.get(item)
            if times is not None:
                uses[item] = (times[1], now_s)
                if item in offered:
                    self.offered.place(item, uses[item])
            else:
                awaiting.add(item)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        last = self._ghosts.take(self._identity(item))
        if last is None:
            last = _NEVER
        self._uses[item] = (last, self._now_s) if item in self.awaiting else (_NEVER, last)

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        super().leave(item)
        times = self._uses.pop(item, None)
        if times is not None:
            n_ghosts_max = max(_GHOSTS_MIN, _GHOSTS_PER_ITEM * len(self._uses))
            self._ghosts.note(self._identity(item), times[1], n_ghosts_max)

    def key(self, item: T, last_used: float) -> tuple[float, float]:
        """As KeyedPolicy.key; `last_used` stands in for uses that this order was not told of."""
        before, last = self._uses.get(item, (_NEVER, _NEVER))
        return before, max(last, last_used)
