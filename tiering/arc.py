"""ARC: recency and frequency share the tier, and what was missed moves the border.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (2003), in
bytes instead of pages.
"""

from __future__ import annotations

from blobstore.tiering.ghosts import GhostQueue
from blobstore.tiering.keyed import touched
from blobstore.tiering.policy import PolicyTerms, T, Use
from blobstore.tiering.segmented import SegmentedPolicy

_ONCE, _AGAIN = 0, 1
"""Queues: used once since it came, and more often."""


class Arc(SegmentedPolicy[T]):
    """Least recently used first, of the queue that is longer than it earns."""

    def __init__(self, terms: PolicyTerms[T]) -> None:
        super().__init__(2)
        self._identity = terms.identity
        self._capacity_bytes = terms.capacity_bytes
        self._once_bytes_wanted = 0.0
        self._ghosts = (GhostQueue(), GhostQueue())
        self._missed_again = False

    def losing(self) -> int:
        """As SegmentedPolicy.losing."""
        once, wanted = self.bytes_in[_ONCE], self._once_bytes_wanted
        if once and (once > wanted or (self._missed_again and once >= wanted)):
            return _ONCE
        return _AGAIN

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        rank = self.next_rank()
        self._missed_again = False
        self.awaiting.clear()
        for item in touched(use):
            place = self.places.get(item)
            if place is not None:
                place.n_uses += 1
                self.move(place, _AGAIN if place.n_uses > 1 else place.segment, rank)
            else:
                self.awaiting.add(item)
                self._adapt(self._identity(item))

    def segment_of_new(self, item: T, nbytes: int) -> int:
        """As SegmentedPolicy.segment_of_new."""
        identity = self._identity(item)
        if item not in self.awaiting:
            self._adapt(identity)
        known = self._ghosts[_ONCE].remove(identity) or self._ghosts[_AGAIN].remove(identity)
        return _AGAIN if known else _ONCE

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        super().enter(item, nbytes)
        once, again = self._ghosts
        once.cut(max(0, self._capacity_bytes - self.bytes_in[_ONCE]))
        again.cut(max(0, 2 * self._capacity_bytes - sum(self.bytes_in) - once.nbytes))

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        place = self.places.get(item)
        if place is not None:
            self._ghosts[place.segment].add(self._identity(item), place.nbytes)
        super().leave(item)

    def _adapt(self, identity: int) -> None:
        """A miss of what left one queue says that this queue should have been longer."""
        once, again = self._ghosts
        nbytes = once.size_of(identity)
        if nbytes is not None:
            step = nbytes * max(1.0, again.nbytes / max(1, once.nbytes))
            self._once_bytes_wanted = min(self._capacity_bytes, self._once_bytes_wanted + step)
            return
        nbytes = again.size_of(identity)
        if nbytes is not None:
            self._missed_again = True
            step = nbytes * max(1.0, once.nbytes / max(1, again.nbytes))
            self._once_bytes_wanted = max(0.0, self._once_bytes_wanted - step)
