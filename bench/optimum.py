"""`min`: a cache that knows the future, and so the most that any policy can reach.

Of the leaves, the one whose next use is furthest goes first. A request's own blocks are
candidates like all others: it may as well leave nothing. With blocks of one size that is
the exact optimum for tokens, where a hit is a prefix: a parent is used no later than its
children, so no leaf holds back what should go before it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from blobstore.bench.future import Future
from blobstore.bench.trace import Trace
from blobstore.errors import InvalidRequest


class OptimalCache:
    """One cache of `n_blocks_max` blocks, for one replay of `trace` from its first request on."""

    def __init__(self, trace: Trace, n_blocks_max: int) -> None:
        if n_blocks_max < 0:
            raise InvalidRequest(f"a cache of {n_blocks_max} blocks")
        self._future = Future(trace)
        self._room = n_blocks_max
        self._held = bytearray(trace.n_blocks)
        self._parent = [-1] * trace.n_blocks
        self._n_children = [0] * trace.n_blocks
        self._n_blocks = trace.n_blocks
        # Leaves, the furthest next use first, each as one number that says both. It is
        # stale unless it is `_entry`'s.
        self._heap: list[int] = []
        self._entry = [0] * trace.n_blocks
        self.n_evicted = 0

    def use(self, blocks: Sequence[int]) -> int:
        """Serve the next request: returns how many leading blocks were held."""
        self._future.go_on()
        held = self._held
        n_held = bisect_left(blocks, 1, key=lambda block: 1 - held[block])
        leaf = blocks[n_held - 1] if n_held else -1
        for block in blocks[n_held:]:
            held[block] = 1
            self._parent[block] = leaf
            if leaf >= 0:
                self._n_children[leaf] += 1
                self._entry[leaf] = 0
            leaf = block
        self._room -= len(blocks) - n_held
        if leaf >= 0 and not self._n_children[leaf]:
            self._offer(leaf)
        while self._room < 0:
            self._evict()
        return n_held

    def _offer(self, leaf: int) -> None:
        entry = -(self._future.next_use(leaf) * self._n_blocks + leaf) - 1
        self._entry[leaf] = entry
        heapq.heappush(self._heap, entry)

    def _evict(self) -> None:
        while True:
            entry = heapq.heappop(self._heap)
            leaf = -(entry + 1) % self._n_blocks
            if self._entry[leaf] == entry:
                break
        self._entry[leaf] = 0
        self._held[leaf] = 0
        self._room += 1
        self.n_evicted += 1
        parent = self._parent[leaf]
        if parent >= 0:
            self._n_children[parent] -= 1
            if not self._n_children[parent]:
                self._offer(parent)
