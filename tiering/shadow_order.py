"""The learned order in a shadow, where a classifier of its own follows the fits of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from blobstore.tiering.learning import Learner
from blobstore.tiering.policy import T, Use


class ShadowOrder(Generic[T]):
    """A Policy that tells `learner` what its shadow sees; nobody else does."""

    def __init__(self, learner: Learner[T], capacity_bytes: int) -> None:
        self._learner = learner
        self._order = learner.order(capacity_bytes)

    def __len__(self) -> int:
        return len(self._order)

    def adopt(self, fitted: Any) -> None:
        """Go by `fitted` from now on."""
        self._learner.adopt(fitted)

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""
        self._learner.use(use)
        self._order.use(use)

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        self._order.enter(item, nbytes)

    def leave(self, item: T) -> None:
        """As Policy.leave: it is in no other tier here."""
        self._order.leave(item)
        self._learner.forget(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        self._order.offer(item, last_used, nbytes)

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        self._order.withdraw(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims."""
        return self._order.victims()
