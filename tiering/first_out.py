"""An order of eviction in which some items, each from its own time on, go before all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

from blobstore.tiering.due_bytes import DueBytes
from blobstore.tiering.key_heap import KeyHeap
from blobstore.tiering.policy import Policy, T, Use


class FirstOut(Generic[T]):
    """As `order` says, but for items whose time has come. A Policy.

    Args:
        order: is told of all items, so that it knows those that are not to go first any more.
        due_s: from when on an item goes first, by `clock`; None if it has no such time. When
            that changes for the better of an item, nothing is to be done; for the worse, the
            item is to be offered again.
        clock: the time.
        due_bytes: is kept up to date with the items that have a time and enter or leave; who
            gives an item a time, or takes it back, does so there too.
    """

    def __init__(
        self,
        order: Policy[T],
        due_s: Callable[[T], float | None],
        clock: Callable[[], float],
        due_bytes: DueBytes[T] | None = None,
    ) -> None:
        self._order = order
        self._due_s = due_s
        self._clock = clock
        self._due_bytes = due_bytes
        self._first: KeyHeap[T] = KeyHeap()
        """What has a time, or had one, and may go."""

    def __len__(self) -> int:
        return len(self._order)

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        self._order.use(use)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        self._order.enter(item, nbytes)
        if self._due_bytes is not None and (due_s := self._due_s(item)) is not None:
            self._due_bytes.add(item, due_s, nbytes)

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self._first.remove(item)
        if self._due_bytes is not None:
            self._due_bytes.remove(item)
        self._order.leave(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        self._order.offer(item, last_used, nbytes)
        due_s = self._due_s(item)
        if due_s is not None:
            self._first.place(item, due_s)
        elif self._first.live:
            self._first.remove(item)

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        self._first.remove(item)
        self._order.withdraw(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims: those that are due, the longest first, and then by the order."""
        return self._all() if len(self._first) else self._order.victims()

    def _all(self) -> Iterator[T]:
        now_s = self._clock()
        for item in self._first.walk():
            if self._first.live[item][0] > now_s:
                break  # and so are all that come after it
            if self._is_due(item, now_s):
                yield item
        for item in self._order.victims():
            if not self._is_due(item, now_s):
                yield item

    def _is_due(self, item: T, now_s: float) -> bool:
        if item not in self._first:
            return False
        due_s = self._due_s(item)
        return due_s is not None and due_s <= now_s
