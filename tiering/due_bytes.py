"""How many bytes of a tier go before all others by now: room there in all but name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from blobstore.tiering.key_heap import KeyHeap
from blobstore.tiering.policy import T


class DueBytes(Generic[T]):
    """A sum over items of the tier, each of which counts from its own time on, by `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._later: KeyHeap[T] = KeyHeap()
        self._nbytes: dict[T, int] = {}
        self._now_bytes = 0

    def __len__(self) -> int:
        return len(self._nbytes)

    @property
    def now_bytes(self) -> int:
        """Of those whose time has come."""
        now_s = self._clock()
        while (item := self._later.first()) is not None and self._later.live[item][0] <= now_s:
            self._later.remove(item)
            self._now_bytes += self._nbytes[item]
        return self._now_bytes

    def add(self, item: T, due_s: float, nbytes: int) -> None:
        """`item` is in the tier, and goes first from `due_s` on; in place of what was said."""
        self.remove(item)
        self._nbytes[item] = nbytes
        self._later.place(item, due_s)

    def remove(self, item: T) -> None:
        """It has left the tier, or does not go first any more; unknown ones are ignored."""
        nbytes = self._nbytes.pop(item, 0)
        if item in self._later:
            self._later.remove(item)
        else:
            self._now_bytes -= nbytes
