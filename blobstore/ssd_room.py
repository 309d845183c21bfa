"""Room on the SSD: extents for writes, made by letting cold leaves go.

What may leave is offered to a policy, as in DRAM; a blob that is nowhere else
leaves the index with its copy here. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blobstore.committer import Committer
from blobstore.counters import Counters
from blobstore.errors import Full
from blobstore.index import Index, Record, Retention
from blobstore.residency import Residency
from blobstore.stories import Stories
from blobstore.tiering.placement import blocks_of
from blobstore.tiering.policy import Policy
from blobstore.tiering.ssd import SsdTier
from blobstore.tiering.tier import Extent
from blobstore.units import MIB

AHEAD_BYTES_MAX = 256 * MIB
"""Shed before it is needed, so that a write need not wait for a commit: at most this, and
1/16 of the capacity."""


class SsdRoom:
    """Who has room on one SSD tier."""

    def __init__(
        self,
        ssd: SsdTier,
        committer: Committer,
        index: Index,
        residency: Residency,
        policy: Policy[Record],
        counters: Counters,
        stories: Stories,
    ) -> None:
        self._ssd = ssd
        self._committer = committer
        self._index = index
        self._residency = residency
        self._policy = policy
        self._counters = counters
        self._stories = stories
        self.on_evicted: Callable[[Record], None] = lambda record: None
        """Called for each blob that had to leave."""
        self.ahead_bytes = min(ssd.capacity_bytes // 16, AHEAD_BYTES_MAX)
        """Kept free for the next writes."""

    def enter(self, record: Record) -> None:
        """The record has a copy on SSD from now on. The caller settles it."""
        self._policy.enter(record, record.nbytes)

    def settle(self, record: Record) -> None:
        """Bring the record's standing in the order of eviction up to date."""
        if record.ssd is False:
            return
        if record.has_children or record.retention is Retention.DURABLE:
            self._policy.withdraw(record)
        else:
            self._policy.offer(record, record.last_used, record.nbytes)

    def remove(self, record: Record, why: str) -> None:
        """Give up the copy on SSD, if there is one. The caller settles the record."""
        if record.ssd is not False:
            self._leave(record, why)
            self._committer.remove(record)

    def hollow(self, record: Record, why: str) -> None:
        """Give up the copy on SSD, if there is one, but not the row. The caller settles."""
        if record.ssd is not False:
            self._leave(record, why)
            self._committer.hollow(record)

    async def take(self, nbytes: int) -> Extent:
        """An extent, once there is room. Raises Full, or what the commit failed with."""
        while True:
            try:
                extent = self._ssd.allocate(nbytes)
            except Full:
                missing = blocks_of(nbytes) - self._ssd.free_bytes
                if not (self._committer.removing or self.shed(missing if missing > 0 else nbytes)):
                    raise
                await self._committer.round()
            else:
                self._shed_ahead(nbytes)
                return extent

    def shed(self, nbytes: int) -> bool:
        """Let cold leaves, and what they bare, of `nbytes` in sum leave; if too few may, none."""
        victims = self._victims(nbytes)
        for victim in victims:
            self._evict(victim)
        return bool(victims)

    def _victims(self, nbytes: int) -> list[Record]:
        chosen: list[Record] = []
        left: dict[Record, int] = {}
        turn: Iterable[Record] = self._policy.victims()
        while True:
            bared: list[Record] = []
            for leaf in turn:
                victim: Record | None = leaf
                while victim is not None and _may_leave(victim):
                    chosen.append(victim)
                    if isinstance(victim.ssd, Extent):
                        nbytes -= blocks_of(victim.ssd.nbytes)
                    if nbytes <= 0:
                        return chosen
                    victim = self._bared_by(victim, left)
                    if victim is not None and not self._residency.is_superseded(victim):
                        bared.append(victim)
                        break
            if not bared:
                return []
            turn = sorted(bared, key=lambda record: record.last_used)

    def _shed_ahead(self, nbytes: int) -> None:
        if self._ssd.free_bytes + self._committer.leaving_bytes < self.ahead_bytes:
            self.shed(nbytes)

    def _leave(self, record: Record, why: str) -> None:
        self._policy.withdraw(record)
        self._policy.leave(record)
        self._counters.moved("ssd>none", why, record)
        self._stories.note(record, "ssd>none", why)

    def _bared_by(self, victim: Record, left: dict[Record, int]) -> Record | None:
        """The blob that nothing continues any more once `victim` has left; holes go along.

        `left` counts the children of each such blob that have not been chosen. What is in DRAM
        stays in the tree, unless it is superseded: that leaves DRAM along with the SSD.
        """
        node: Record | None = victim
        while node is not None and (not node.packed or self._residency.is_superseded(node)):
            node = node.parent
            if node is None:
                break
            left[node] = left.get(node, sum(1 for _ in node.children())) - 1
            if left[node]:
                break
            if not node.hole:
                return node
        return None

    def _evict(self, record: Record) -> None:
        if record.has_children:  # of what was to leave DRAM before it, something could not
            return
        why = "superseded" if self._residency.is_superseded(record) else "room"
        if why == "superseded" and record.packed:
            self._residency.demote(record, why)
        self._counters.ssd_evicted += 1
        self.remove(record, why)
        self.on_evicted(record)
        above = record if record.packed else self._index.discard(record)
        if above is not None:
            self._residency.settle(above)


def _may_leave(record: Record) -> bool:
    busy = record.pins or record.heirs or record.dirty or record.fill is not None
    kept = record.ssd is False or record.retention is Retention.DURABLE
    return not (busy or kept)
