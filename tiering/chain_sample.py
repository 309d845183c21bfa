"""Which chains a shadow of a cache looks at: a fixed share, by whole conversations.

Chains that share all but a common head (a system prompt, tools) are told apart where they
leave it: a *head* is an item that many different items continue, and the *stem* of a chain
is its first item below its last head. The stem decides, so a conversation is sampled as a
whole, also where all of them start with one and the same item.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic

from xxhash import xxh3_64_intdigest

from blobstore.tiering.policy import T

_CONTINUATIONS = 8
"""Different items after it that make an item a head: conversations branch, but not so much."""

_CANDIDATES_MAX = 4096
"""Items whose continuations are counted; the ones continued longest ago are let go."""

_HEADS_MAX = 1024


class ChainSample(Generic[T]):
    """Picks the chains of about a `share` of all conversations. Memory is bounded."""

    def __init__(self, share: float, identity: Callable[[T], int], seed: int = 0) -> None:
        assert 0 < share <= 1
        self.share = share
        self._below = int(share * 2**64)
        self._identity = identity
        self._seed = seed
        self._continued: OrderedDict[T, set[int]] = OrderedDict()
        self._heads: OrderedDict[T, None] = OrderedDict()

    def note(self, items: Sequence[T], n_held: int) -> None:
        """A chain was used of which `n_held` leading items were known."""
        if self.share == 1 or not 0 < n_held < len(items):
            return
        at = items[n_held - 1]
        if at in self._heads:
            self._heads.move_to_end(at)
            return
        after = self._continued.setdefault(at, set())
        after.add(self._identity(items[n_held]))
        if len(after) >= _CONTINUATIONS:
            del self._continued[at]
            self._heads[at] = None
            if len(self._heads) > _HEADS_MAX:
                self._heads.popitem(last=False)
        else:
            self._continued.move_to_end(at)
            if len(self._continued) > _CANDIDATES_MAX:
                self._continued.popitem(last=False)

    def picks(self, items: Sequence[T]) -> bool:
        """Whether this chain is in the sample."""
        if self.share == 1:
            return True
        stem = self._identity(self._stem(items)) ^ self._seed
        return xxh3_64_intdigest(stem.to_bytes(8, "little")) < self._below

    def forget(self, item: T) -> None:
        """`item` is gone for good."""
        self._continued.pop(item, None)
        self._heads.pop(item, None)

    def _stem(self, items: Sequence[T]) -> T:
        heads = self._heads
        if heads and not heads.keys().isdisjoint(items):
            for at in range(len(items) - 2, -1, -1):
                if items[at] in heads:
                    return items[at + 1]
        return items[0]
