"""One cache of given capacity, driven by a policy on trees of items, holding no bytes.

It makes the calls of the seam (`policy`) in their order: the replay of traces measures
policies with it, and the live store keeps small ones as shadows of policies that are not
in force. No item stays without its parent: only leaves go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from blobstore.tiering.policy import Policy, T, Use


class _Node(Generic[T]):
    __slots__ = ("item", "last_used", "n_children", "nbytes", "parent")

    def __init__(self, item: T, parent: _Node[T] | None, nbytes: int, last_used: float) -> None:
        self.item = item
        self.parent = parent
        self.nbytes = nbytes
        self.last_used = last_used
        self.n_children = 0


class ShadowCache(Generic[T]):
    """What a cache of `capacity_bytes` would hold under `policy`; nothing else may drive that.

    `nbytes_of` is asked once for each item that enters. A use costs O(log chain) for
    what is held already, and O(1) besides the policy for each item that enters or leaves.
    `on_evict` hears of each victim that has left: the item, its parent, its last use.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: Policy[T],
        nbytes_of: Callable[[T], int],
        on_evict: Callable[[T, T | None, float], None] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.n_evicted = 0
        self._policy = policy
        self._nbytes_of = nbytes_of
        self._on_evict = on_evict
        self._nodes: dict[T, _Node[T]] = {}

    def __len__(self) -> int:
        """How many items it holds."""
        return len(self._nodes)

    def __contains__(self, item: T) -> bool:
        return item in self._nodes

    def n_held(self, items: Sequence[T]) -> int:
        """Leading items of a chain, from its root, that it holds."""
        nodes = self._nodes
        low, high = 0, len(items)
        while low < high:  # what is held is a prefix: no item outlives its parent
            middle = (low + high) // 2
            if items[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, use: Use[T]) -> int:
        """Serve one use: returns how many leading items were held, and takes in the others.

        The policy is told `use` as it is. What does not fit, although all else has left,
        stays out, tail first.
        """
        self._policy.use(use)
        n_held = self.n_held(use.items)
        self._hold(use.items, n_held, use.now_s)
        return n_held

    def touch(self, items: Sequence[T], now_s: float) -> int:
        """Note that what is held of a chain was used, of which the policy has been told.

        Returns how many leading items that is.
        """
        n_held = self.n_held(items)
        self._hold(items[:n_held], n_held, now_s)
        return n_held

    def take_in(self, items: Sequence[T], last_used: float) -> int:
        """Take in what is missing of a chain, of which nobody was told a use.

        `items` begin at a root or at an item that is held. Returns how many came in.
        """
        n_held, n_before = self.n_held(items), len(self._nodes) + self.n_evicted
        self._hold(items, n_held, last_used)
        return len(self._nodes) + self.n_evicted - n_before

    def lineage(self, item: T) -> Iterator[T]:
        """A held item and all that it hangs on, up to its root."""
        node: _Node[T] | None = self._nodes[item]
        while node is not None:
            yield node.item
            node = node.parent

    def _hold(self, items: Sequence[T], n_held: int, now_s: float) -> None:
        leaf = self._nodes[items[n_held - 1]] if n_held else None
        if leaf is not None:
            leaf.last_used = max(leaf.last_used, now_s)
            if not leaf.n_children:
                self._policy.withdraw(leaf.item)
        if n_held < len(items):
            leaf = self._enter(items[n_held:], leaf, now_s)
        if leaf is not None and not leaf.n_children:
            self._policy.offer(leaf.item, leaf.last_used, leaf.nbytes)

    def _enter(self, items: Sequence[T], leaf: _Node[T] | None, now_s: float) -> _Node[T] | None:
        """Take in `items` below `leaf`, which stays; returns the new leaf."""
        nodes = self._nodes
        sizes = [self._nbytes_of(item) for item in items]
        held_bytes = sum(nodes[item].nbytes for item in items if item in nodes)  # mostly none
        self._make_room(sum(sizes) - held_bytes, leaf)
        room_bytes = self.capacity_bytes - self.used_bytes
        for item, nbytes in zip(items, sizes, strict=True):
            if item in nodes:
                leaf = self._go_on_from(nodes[item], leaf, now_s)
                continue
            room_bytes -= nbytes
            if room_bytes < 0:
                break
            if leaf is not None:
                leaf.n_children += 1
            leaf = nodes[item] = _Node(item, leaf, nbytes, now_s)
            self.used_bytes += nbytes
            self._policy.enter(item, nbytes)
        return leaf

    def _go_on_from(self, held: _Node[T], leaf: _Node[T] | None, now_s: float) -> _Node[T]:
        """The chain that ended with `leaf` goes on with what is held below another item.

        There that stays: an item has one place, and its size counts once.
        """
        if leaf is not None and not leaf.n_children:
            self._policy.offer(leaf.item, leaf.last_used, leaf.nbytes)
        if not held.n_children:
            self._policy.withdraw(held.item)
        held.last_used = max(held.last_used, now_s)
        return held

    def _make_room(self, nbytes: int, pinned: _Node[T] | None) -> None:
        policy = self._policy
        used_bytes_max = self.capacity_bytes - nbytes
        while self.used_bytes > used_bytes_max:
            victim = next(policy.victims(), None)
            if victim is None:
                return
            node = self._nodes.pop(victim)
            self.used_bytes -= node.nbytes
            self.n_evicted += 1
            policy.withdraw(victim)
            policy.leave(victim)
            parent = node.parent
            if parent is not None:
                parent.n_children -= 1
                # A use of a child was one of its parent; only the leaf was told of it.
                parent.last_used = max(parent.last_used, node.last_used)
                if not parent.n_children and parent is not pinned:
                    policy.offer(parent.item, parent.last_used, parent.nbytes)
            if self._on_evict is not None:
                self._on_evict(victim, parent.item if parent else None, node.last_used)
