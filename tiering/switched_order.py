"""One tier's order of eviction, which can be exchanged for another one while it is in use.

Only the order in force is kept up to date. Another is built beside it from what the tier
holds, in steps that are short enough for the event loop, and takes over once it is whole.
What only a long past could tell it, it has to see anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic

from blobstore.tiering.policy import Policy, T, Use

BUILD_ITEMS = 4096
"""Taken over in one step: some milliseconds."""


class SwitchedOrder(Generic[T]):
    """The order made by the factory called `in_force`; a Policy.

    `use` does nothing: the order is told of uses by `tell`, whichever tier the items are
    in, before the tier is asked for room.
    """

    def __init__(self, factories: Mapping[str, Callable[[], Policy[T]]], in_force: str) -> None:
        self._factories = factories
        self._leading = factories[in_force]()
        self.in_force = in_force
        self.used_bytes = 0
        """What the items in the tier take, without its own rounding."""
        self._sizes: dict[T, int] = {}
        self._offers: dict[T, tuple[float, int]] = {}
        self._strays: dict[T, None] = {}
        """May go, though they were not said to be in the tier."""
        self._next: _Building[T] | None = None

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def n_items(self) -> int:
        """How many items are in the tier, whether they may go or not."""
        return len(self._sizes)

    @property
    def wanted(self) -> str:
        """Who is in force, or will be as soon as it has been built."""
        return self.in_force if self._next is None else self._next.name

    def switch(self, name: str) -> None:
        """Let the order called `name` decide, as soon as `step` has built it."""
        self._next = None
        if name != self.in_force:
            # Nothing but copies of keys: some milliseconds for a million items.
            rest = [*reversed(self._strays), *reversed(self._sizes)]
            self._next = _Building(name, self._factories[name](), rest)
            self.step()

    def step(self) -> None:
        """Go on building the order that is to take over, if there is one."""
        building = self._next
        if building is None:
            return
        for item in building.rest[: -BUILD_ITEMS - 1 : -1]:
            if item in building.entered:
                continue
            if item in self._sizes:
                building.enter(item, self._sizes[item])
            if item in self._offers:
                building.order.offer(item, *self._offers[item])
        del building.rest[-BUILD_ITEMS:]
        if not building.rest:
            self._leading, self.in_force, self._next = building.order, building.name, None

    def tell(self, use: Use[T]) -> None:
        """Tell of a use."""
        self._leading.use(use)
        if self._next is not None:
            self._next.order.use(use)

    def use(self, use: Use[T]) -> None:
        """As Policy.use, but without effect: see `tell`."""

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""
        self.used_bytes += nbytes - self._sizes.get(item, 0)
        self._sizes[item] = nbytes
        self._strays.pop(item, None)
        self._leading.enter(item, nbytes)
        if self._next is not None:
            self._next.enter(item, nbytes)

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self.used_bytes -= self._sizes.pop(item, 0)
        self._forget_offer(item)
        self._leading.leave(item)
        if self._next is not None:
            self._next.leave(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        self._offers[item] = (last_used, nbytes)
        if item not in self._sizes:
            self._strays[item] = None
        self._leading.offer(item, last_used, nbytes)
        if self._next is not None and (item in self._next.entered or item not in self._sizes):
            self._next.order.offer(item, last_used, nbytes)

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        self._forget_offer(item)
        self._leading.withdraw(item)
        if self._next is not None:
            self._next.order.withdraw(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims, by the order in force when it is called."""
        return self._leading.victims()

    def _forget_offer(self, item: T) -> None:
        self._offers.pop(item, None)
        if self._strays:
            self._strays.pop(item, None)


class _Building(Generic[T]):
    """An order on its way into force: it knows `entered`, and `rest` is to come, last first."""

    def __init__(self, name: str, order: Policy[T], rest: list[T]) -> None:
        self.name = name
        self.order = order
        self.entered: set[T] = set()
        self.rest = rest

    def enter(self, item: T, nbytes: int) -> None:
        self.entered.add(item)
        self.order.enter(item, nbytes)

    def leave(self, item: T) -> None:
        self.entered.discard(item)
        self.order.leave(item)
