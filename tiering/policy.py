"""The seam for what stays in a tier: an order among what may go, told of every use.

A policy orders the items of one tier that may go now. Whether an item may go (nobody
holds it, nothing hangs below it, its bytes are safe elsewhere) is decided by whoever
offers and withdraws it, so any order evicts leaves only. The live store and the replay
of traces drive policies through the same calls, in the same order.

Items are opaque, hashable, and compared by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
T_contra = TypeVar("T_contra", bound=Hashable, contravariant=True)
"""For protocols that take items and give none."""


@dataclass(frozen=True, slots=True)
class Use(Generic[T]):
    """One request's use of one chain of items.

    Args:
        items: the chain from its root to where the request ends, held or about to be stored.
        n_held: leading items that were held, in whatever tier, when the request came.
        now_s: the time of the request, on the clock of `last_used`.
        item_tokens: tokens of each item but the last of a prompt, which may be partial.
        prompt_tokens: of the request; 0 if unknown.
        answer_tokens: that followed the prompt; 0 if unknown.
        continues: the request has been told of already, by a use that ended at
            `items[n_held - 1]`: this one says what it stored, and counts no second use.
        session, turn, kind, finish: what the caller told about the request; "" and -1
            where nothing is known.
    """

    items: Sequence[T]
    n_held: int
    now_s: float
    item_tokens: int = 1
    prompt_tokens: int = 0
    answer_tokens: int = 0
    continues: bool = False
    session: str = ""
    turn: int = -1
    kind: str = ""
    finish: str = ""


@dataclass(frozen=True, slots=True)
class PolicyTerms(Generic[T]):
    """What a policy is made for.

    Args:
        capacity_bytes: of the tier, for policies that divide it.
        identity: 64 bits that stay with an item's content for good, so that it is known
            again after it has left.
        seed: of all that is random.
    """

    capacity_bytes: int
    identity: Callable[[T], int]
    seed: int = 0


class Policy(Protocol[T]):
    """An order among the evictable items of one tier. One thread uses it.

    For one request the calls come in this order: `use`; then `victims`, `leave` and
    `offer` (of parents laid bare) until there is room; then `enter` for what is new, root
    side first; then `offer` for the leaf.
    """

    def use(self, use: Use[T]) -> None:
        """A request uses a chain, of which some items may be in this tier."""
        ...

    def enter(self, item: T, nbytes: int) -> None:
        """`item` has entered the tier."""
        ...

    def leave(self, item: T) -> None:
        """`item` has left the tier, and was withdrawn; unknown items are ignored."""
        ...

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """Say that `item` may go; offering it again replaces what was said."""
        ...

    def withdraw(self, item: T) -> None:
        """Say that `item` may not go for now, or is gone; unknown items are ignored."""
        ...

    def victims(self) -> Iterator[T]:
        """Evictable items, the one to lose first, first. Removes nothing.

        Items may be offered and withdrawn while it runs: a withdrawn item is
        not yielded any more, and one offered meanwhile is yielded if it comes
        after those already yielded in the policy's order.
        """
        ...

    def __len__(self) -> int:
        """How many items may go."""
        ...
