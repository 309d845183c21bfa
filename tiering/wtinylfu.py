"""W-TinyLFU: what leaves a small window gets in only if it is asked for more than what would go.

After Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy"
(2017), in bytes. Uses are counted exactly, not in a sketch: the counts are halved in time
for there to be few.
"""

from __future__ import annotations

from collections import OrderedDict

from blobstore.tiering.keyed import touched
from blobstore.tiering.policy import PolicyTerms, T, Use
from blobstore.tiering.segmented import Place, SegmentedPolicy

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2

_WINDOW_SHARE = 0.01
"""Of the capacity."""

_PROTECTED_SHARE = 0.8
"""Of what is not window."""

_USES_PER_ITEM = 10
"""Uses between two halvings, per item held."""

_USES_MIN = 1000


class WTinyLfu(SegmentedPolicy[T]):
    """Of the window's coldest and the coldest on probation, the one asked for less."""

    def __init__(self, terms: PolicyTerms[T]) -> None:
        super().__init__(3)
        self._identity = terms.identity
        self._window_bytes = max(1, int(_WINDOW_SHARE * terms.capacity_bytes))
        self._main_bytes = terms.capacity_bytes - self._window_bytes
        self._protected_bytes = int(_PROTECTED_SHARE * self._main_bytes)
        self._recency: tuple[OrderedDict[T, None], ...] = (OrderedDict(), OrderedDict())
        """Least recently used first: the window, and the protected (on probation none needs it)."""
        self._n_uses: dict[int, int] = {}
        self._n_uses_told = 0

    def losing(self) -> int:
        """As SegmentedPolicy.losing."""
        candidate = self.first_in(_WINDOW)
        victim = self.first_in(_PROBATION)
        if candidate is None or self.bytes_in[_WINDOW] < self._window_bytes:
            return _PROTECTED if victim is None else _PROBATION
        if victim is None:
            return _WINDOW
        return _PROBATION if self._asked(candidate) > self._asked(victim) else _WINDOW

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        rank = self.next_rank()
        self.awaiting.clear()
        for item in reversed(touched(use)):  # so that a tail ages before its head
            self._count(item)
            place = self.places.get(item)
            if place is None:
                self.awaiting.add(item)
                continue
            place.n_uses += 1
            if place.n_uses > 1 or place.segment != _PROBATION:
                self._refresh(place, rank)
        while self.bytes_in[_PROTECTED] > self._protected_bytes:
            coldest, _ = self._recency[1].popitem(last=False)
            place = self.places[coldest]
            self.move(place, _PROBATION, place.rank)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        if item in self.places:
            return
        super().enter(item, nbytes)
        self._recency[0][item] = None
        while self.bytes_in[_WINDOW] > self._window_bytes and self._main_has_room():
            coldest, _ = self._recency[0].popitem(last=False)
            place = self.places[coldest]
            self.move(place, _PROBATION, place.rank)

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        for queue in self._recency:
            queue.pop(item, None)
        super().leave(item)

    def _refresh(self, place: Place[T], rank: int) -> None:
        if place.segment == _PROBATION:
            self._recency[1][place.item] = None
        else:
            self._recency[place.segment // 2].move_to_end(place.item)
        self.move(place, _WINDOW if place.segment == _WINDOW else _PROTECTED, rank)

    def _main_has_room(self) -> bool:
        return self.bytes_in[_PROBATION] + self.bytes_in[_PROTECTED] < self._main_bytes

    def _asked(self, item: T) -> int:
        return self._n_uses.get(self._identity(item), 0)

    def _count(self, item: T) -> None:
        identity = self._identity(item)
        self._n_uses[identity] = self._n_uses.get(identity, 0) + 1
        self._n_uses_told += 1
        if self._n_uses_told > max(_USES_MIN, _USES_PER_ITEM * len(self.places)):
            self._n_uses_told //= 2
            self._n_uses = {known: n // 2 for known, n in self._n_uses.items() if n > 1}
