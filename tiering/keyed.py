"""What policies of one key per item have in common, and how uses are counted.

A use may be told before its new items enter, as in a replay, or just after, as in the
live store, which tells later than it stores. So entering is no use: what is held is
counted when it is told, also if it is offered already, and what the latest use was
`awaiting` when it enters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic

from blobstore.tiering.key_heap import KeyHeap
from blobstore.tiering.policy import T, Use


def touched(use: Use[T]) -> Sequence[T]:
    """The items for which `use` is a use of its own: all but those told of before."""
    return use.items[use.n_held :] if use.continues else use.items


class KeyedPolicy(Generic[T]):
    """Least key first; among equals, the one placed first."""

    def __init__(self) -> None:
        self.offered: KeyHeap[T] = KeyHeap()
        self.awaiting: set[T] = set()

    def key(self, item: T, last_used: float) -> Any:
        """Where `item` stands from now on: the least goes first."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.offered)

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self.offered.remove(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        self.offered.place(item, self.key(item, last_used))

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        self.offered.remove(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims; costs as Walk says."""
        return self.offered.walk()
