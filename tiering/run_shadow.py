"""A shadow of LRU or LRU-2 that goes by runs of items instead of single ones.

Items that were stored together and used together since stand in one run, which is split
where their ways part. So a use costs by the runs on its chain, and what comes and goes
little more than a place in a dict: what `ShadowCache` finds with the same order, for a
tenth of the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

from blobstore.tiering.ghosts import Ghosts
from blobstore.tiering.policy import Use

_NEVER = float("-inf")

_Entry = tuple[float, float, int, "_Run"]

_COMPACT_ABOVE = 64

_GHOSTS_PER_ITEM = 4
_GHOSTS_MIN = 1 << 16
"""As many as LruK has."""


class _Run:
    __slots__ = ("before", "entry", "items", "last", "n_children", "parent", "start")

    def __init__(
        self, items: list[int], parent: _Run | None, start: int, before: float, last: float
    ) -> None:
        self.items = items
        self.parent = parent
        self.start = start
        """How many items come before its first one."""
        self.before = before
        self.last = last
        """Second last and last use of all items."""
        self.n_children = 0
        self.entry: _Entry | None = None
        """Its place in the heap; None if it may not go."""


class RunShadow:
    """What a cache of `capacity` items would hold under LRU (`second_last`: LRU-2).

    An item is a byte here: `capacity_bytes` can be set anew at any time.
    """

    def __init__(self, capacity: int, *, second_last: bool) -> None:
        self.capacity_bytes = capacity
        self._second_last = second_last
        self._run_of: dict[int, _Run] = {}
        self._heap: list[_Entry] = []
        self._n_offered = 0
        self._sequence = 0
        self._ghosts: Ghosts[float] = Ghosts()

    def __len__(self) -> int:
        """How many items it holds."""
        return len(self._run_of)

    def use(self, use: Use[int]) -> int:
        """As ShadowCache.use."""
        items = use.items
        n_held = self._n_held(items)
        leaf = self._reach(items, n_held)
        told = use.n_held if use.continues and self._second_last else 0
        if told < n_held:
            self._reach(items, told)
            self._touch(leaf, told, use.now_s)
        if leaf is not None:
            self._withdraw(leaf)
        if n_held < len(items):
            self._make_room(len(items) - n_held, leaf)
            room = max(self.capacity_bytes - len(self._run_of), 0)
            leaf = self._enter(items[n_held : n_held + room], leaf, use.now_s)
        if leaf is not None and not leaf.n_children:
            self._offer(leaf)
        return n_held

    def _n_held(self, items: Sequence[int]) -> int:
        run_of = self._run_of
        low, high = 0, len(items)
        while low < high:  # what is held is a prefix: no item outlives its parent
            middle = (low + high) // 2
            if items[middle] in run_of:
                low = middle + 1
            else:
                high = middle
        return low

    def _reach(self, items: Sequence[int], n_held: int) -> _Run | None:
        """The run that ends where what is held of a chain does, split off if need be."""
        if not n_held:
            return None
        run = self._run_of[items[n_held - 1]]
        n_head = n_held - run.start
        if n_head == len(run.items):
            return run
        head = _Run(run.items[:n_head], run.parent, run.start, run.before, run.last)
        head.n_children = 1
        run.items = run.items[n_head:]
        run.parent = head
        run.start = n_held
        self._run_of.update(dict.fromkeys(head.items, head))
        return head

    def _touch(self, leaf: _Run | None, told: int, now_s: float) -> None:
        """All runs of the chain are used, but for those of items that were told of before."""
        run = leaf
        while run is not None and run.start >= told:
            run.before = run.last
            run.last = max(run.last, now_s)
            run = run.parent

    def _enter(self, items: Sequence[int], leaf: _Run | None, now_s: float) -> _Run | None:
        """Take in `items` below `leaf`; returns the new leaf."""
        start = 0 if leaf is None else leaf.start + len(leaf.items)
        if not self._second_last:
            return self._append(list(items), leaf, start, _NEVER, now_s) if items else leaf
        known = [self._ghosts.take(item) for item in items]
        for before, group in groupby(zip(items, known, strict=True), key=lambda pair: pair[1]):
            run = [item for item, _ in group]
            leaf = self._append(run, leaf, start, _NEVER if before is None else before, now_s)
            start += len(run)
        return leaf

    def _append(
        self, items: list[int], leaf: _Run | None, start: int, before: float, now_s: float
    ) -> _Run:
        if leaf is not None:
            leaf.n_children += 1
        run = _Run(items, leaf, start, before, now_s)
        self._run_of.update(dict.fromkeys(items, run))
        return run

    def _make_room(self, n: int, pinned: _Run | None) -> None:
        """Let go of what is least worth, from its tail, until there is room for `n`."""
        while (excess := len(self._run_of) + n - self.capacity_bytes) > 0:
            run = self._first()
            if run is None:
                return
            self._cut(run, min(excess, len(run.items)))
            if run.items:
                continue
            self._withdraw(run)
            parent = run.parent
            if parent is not None:
                parent.n_children -= 1
                if not parent.n_children and parent is not pinned:
                    self._offer(parent)

    def _cut(self, run: _Run, n: int) -> None:
        for item in run.items[: -n - 1 : -1]:
            del self._run_of[item]
            if self._second_last:
                self._ghosts.note(item, run.last, max(_GHOSTS_MIN, _GHOSTS_PER_ITEM * len(self)))
        del run.items[-n:]

    def _offer(self, run: _Run) -> None:
        self._withdraw(run)
        self._sequence += 1
        before = run.before if self._second_last else 0.0
        run.entry = (before, run.last, self._sequence, run)
        self._n_offered += 1
        heapq.heappush(self._heap, run.entry)
        if len(self._heap) > 2 * self._n_offered + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapq.heapify(self._heap)

    def _withdraw(self, run: _Run) -> None:
        self._n_offered -= run.entry is not None
        run.entry = None

    def _first(self) -> _Run | None:
        heap = self._heap
        while heap and heap[0][3].entry is not heap[0]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None


REFERENCE_SHADOWS: Mapping[str, Callable[[int], RunShadow]] = {
    "lru": partial(RunShadow, second_last=False),
    "lru2": partial(RunShadow, second_last=True),
}
"""By the names of the policies that they are shadows of: makes one of a capacity in items."""
