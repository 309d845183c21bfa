"""S3-FIFO: a small queue sieves out what is used once; no use moves anything.

After Yang et al., "FIFO queues are all you need for cache eviction" (2023), in bytes.
"""

from __future__ import annotations

from blobstore.tiering.ghosts import GhostQueue
from blobstore.tiering.keyed import touched
from blobstore.tiering.policy import PolicyTerms, T, Use
from blobstore.tiering.segmented import SegmentedPolicy

_SMALL, _MAIN = 0, 1

_SMALL_SHARE, _GHOST_SHARE = 0.1, 0.9
"""Of the capacity."""

_HITS_FOR_MAIN = 2
_HITS_MAX = 3
"""Uses after the first."""


class S3Fifo(SegmentedPolicy[T]):
    """First in, first out, of the small queue unless the main one is over its share."""

    def __init__(self, terms: PolicyTerms[T]) -> None:
        super().__init__(2)
        self._identity = terms.identity
        self._small_bytes = int(_SMALL_SHARE * terms.capacity_bytes)
        self._main_bytes = terms.capacity_bytes - self._small_bytes
        self._ghost_bytes = int(_GHOST_SHARE * terms.capacity_bytes)
        self._ghosts = GhostQueue()
        self._returning: set[T] = set()
        """Items of the request being served that had left lately."""
        self._evicting = False

    def losing(self) -> int:
        """As SegmentedPolicy.losing; what has earned to stay gets its new place first."""
        self._evicting = True
        if self.bytes_in[_MAIN] <= self._main_bytes and self._sieve():
            return _SMALL
        while (item := self.first_in(_MAIN)) is not None:
            place = self.places[item]
            if place.n_uses <= 1:
                return _MAIN
            place.n_uses = min(place.n_uses - 1, _HITS_MAX)
            self.move(place, _MAIN, self.next_rank())
        return _SMALL

    def _sieve(self) -> bool:
        """Whether the small queue has somebody to lose, once the others have moved on."""
        while (item := self.first_in(_SMALL)) is not None:
            place = self.places[item]
            if place.n_uses <= _HITS_FOR_MAIN:
                return True
            place.n_uses = 1
            self.move(place, _MAIN, self.next_rank())
        return False

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        self.awaiting.clear()
        self._returning.clear()
        for item in touched(use):
            place = self.places.get(item)
            if place is not None:
                place.n_uses += 1
                continue
            self.awaiting.add(item)
            if self._ghosts.remove(self._identity(item)):
                self._returning.add(item)

    def segment_of_new(self, item: T, nbytes: int) -> int:
        """As SegmentedPolicy.segment_of_new; a first filling goes on in the main queue."""
        if item in self._returning or self._ghosts.remove(self._identity(item)):
            return _MAIN
        full = self.bytes_in[_SMALL] >= self._small_bytes
        return _MAIN if full and not self._evicting else _SMALL

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        place = self.places.get(item)
        if place is not None and place.segment == _SMALL:
            self._ghosts.add(self._identity(item), place.nbytes)
            self._ghosts.cut(self._ghost_bytes)
        super().leave(item)
