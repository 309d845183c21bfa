"""What policies that divide a tier into queues have in common; uses are counted as in `keyed`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from blobstore.tiering.key_heap import KeyHeap
from blobstore.tiering.policy import T, Use


class Place(Generic[T]):
    """Where a held item stands: its queue, its rank there, and what its policy counts."""

    __slots__ = ("item", "n_uses", "nbytes", "offered", "rank", "segment")

    def __init__(self, item: T, segment: int, rank: int, nbytes: int) -> None:
        self.item = item
        self.segment = segment
        self.rank = rank
        self.nbytes = nbytes
        self.n_uses = 0
        self.offered = False


class SegmentedPolicy(Generic[T]):
    """Items in `n_segments` queues, of which `losing` says which one loses next.

    Within a queue the lowest rank goes first. What is not offered keeps its rank: a
    queue is cut where its first evictable item is.
    """

    def __init__(self, n_segments: int) -> None:
        self.places: dict[T, Place[T]] = {}
        self.awaiting: set[T] = set()
        self.bytes_in = [0] * n_segments
        self._offered: list[KeyHeap[T]] = [KeyHeap() for _ in range(n_segments)]
        self._rank = 0

    def losing(self) -> int:
        """The queue to take the next victim from; another one serves if it offers none."""
        raise NotImplementedError

    def segment_of_new(self, item: T, nbytes: int) -> int:
        """The queue that `item`, which enters, joins."""
        return 0

    def next_rank(self) -> int:
        """Behind all ranks given out so far."""
        self._rank += 1
        return self._rank

    def first_in(self, segment: int) -> T | None:
        """The evictable item of a queue that goes first."""
        return self._offered[segment].first()

    def move(self, place: Place[T], segment: int, rank: int) -> None:
        """Give an item its place in a queue, the same one or another."""
        if segment != place.segment:
            self.bytes_in[place.segment] -= place.nbytes
            self.bytes_in[segment] += place.nbytes
            if place.offered:
                self._offered[place.segment].remove(place.item)
            place.segment = segment
        place.rank = rank
        if place.offered:
            self._offered[segment].place(place.item, rank)

    def __len__(self) -> int:
        return sum(map(len, self._offered))

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        raise NotImplementedError

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        if item not in self.places:
            segment = self.segment_of_new(item, nbytes)
            place = self.places[item] = Place(item, segment, self.next_rank(), nbytes)
            place.n_uses = int(item in self.awaiting)
            self.bytes_in[segment] += nbytes

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        place = self.places.pop(item, None)
        if place is not None:
            self._offered[place.segment].remove(item)
            self.bytes_in[place.segment] -= place.nbytes

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        self.enter(item, nbytes)  # nothing, unless whoever offers it has not told
        place = self.places[item]
        place.offered = True
        self._offered[place.segment].place(item, place.rank)

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        place = self.places.get(item)
        if place is not None:
            place.offered = False
            self._offered[place.segment].remove(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims. The queues are chosen anew for each: remove as you go."""
        walks = [heap.walk() for heap in self._offered]
        while True:
            segment = self.losing()
            others = (walk for at, walk in enumerate(walks) if at != segment)
            for walk in (walks[segment], *others):
                item = next(walk, None)
                if item is not None:
                    yield item
                    break
            else:
                return
