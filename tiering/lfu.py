"""By number of uses: plain, with dynamic aging, and weighed by size (GDSF)."""

from __future__ import annotations

from blobstore.tiering.keyed import KeyedPolicy, touched
from blobstore.tiering.policy import T, Use


class Lfu(KeyedPolicy[T]):
    """Fewest uses since it came goes first; among equals, the least recently used.

    Nothing ages: what was once in demand stays for good. `LfuDa` mends that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._n_uses: dict[T, int] = {}

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        n_uses, awaiting, offered = self._n_uses, self.awaiting, self.offered.live
        awaiting.clear()
        for item in touched(use):
            if item in n_uses:
                n_uses[item] += 1
                if item in offered:
                    self.offered.place(item, self.key(item, use.now_s))
            else:
                awaiting.add(item)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        self._n_uses[item] = int(item in self.awaiting)

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        super().leave(item)
        self._n_uses.pop(item, None)

    def key(self, item: T, last_used: float) -> tuple[int, float]:
        """As KeyedPolicy.key."""
        return max(1, self._n_uses.get(item, 1)), last_used
