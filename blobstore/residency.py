"""Which blobs hold DRAM, and who leaves when room is needed.

Owns every extent of the arena. A record's bytes stay while it is pinned (leases,
loans to writers, I/O in flight) or while a blob that continues it is in DRAM;
what may leave is offered to the policy, which says in which order. Used on the
event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from blobstore.counters import Counters
from blobstore.errors import Busy, Full
from blobstore.index import Index, Record, Retention
from blobstore.tiering.dram import DramTier
from blobstore.tiering.policy import Policy
from blobstore.tiering.tier import Extent

WAITERS_MAX = 1024
"""Reservations that may wait for room at once; more are refused as busy."""


class Residency:
    """Room in DRAM: taken by `take`, kept by pins, given back by eviction or `settle`."""

    def __init__(
        self,
        dram: DramTier,
        policy: Policy[Record],
        index: Index,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._dram = dram
        self._policy = policy
        self._index = index
        self._counters = counters
        self._clock = clock
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.pinned_bytes = 0
        self.on_settled: Callable[[Record], None] = lambda record: None
        """Called whenever a record's standing may have changed."""
        self.spare_bytes_wanted: Callable[[], None] = lambda: None
        """Called when eviction found too little: a chance to hurry write-back."""

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return len(self._waiters)

    def limit(self, *, loading: bool) -> int:
        """Most bytes that puts (or loads) can ever have."""
        return self._dram.capacity_bytes if loading else self._dram.room_for_puts_bytes

    def pin(self, record: Record) -> None:
        """Keep the record's DRAM bytes, and its ancestors', until `unpin`."""
        record.pins += 1
        if record.pins == 1:
            self.pinned_bytes += record.nbytes
            self._policy.withdraw(record)

    def unpin(self, record: Record) -> None:
        """Undo one `pin`; the last one counts as a use."""
        assert record.pins > 0
        record.pins -= 1
        if record.pins == 0:
            self.pinned_bytes -= record.nbytes
            record.last_used = self._clock()
            self.settle(record)
            self.notify()

    def settle(self, record: Record) -> None:
        """Bring the record's standing up to date: free useless bytes, else offer or withdraw."""
        if not record.gone and (record.packed or record.fill is not None or record.dram is None):
            if self._evictable(record):
                self._policy.offer(record, record.last_used, record.nbytes)
            else:
                self._policy.withdraw(record)
            self.on_settled(record)
        elif record.dram is not None and not (record.pins or record.dram_children):
            # Dropped, or a load or a draft that failed: nobody reads or writes it any more.
            self._policy.withdraw(record)
            self.hide(record)
            self._free(record)

    def keep(self, record: Record) -> None:
        """Keep the record known and in some tier, DRAM or not, until `unkeep`."""
        record.heirs += 1
        self.settle(record)

    def unkeep(self, record: Record) -> None:
        """Undo one `keep`."""
        assert record.heirs > 0
        record.heirs -= 1
        if record.heirs == 0:
            self.settle(record)
            self.notify()

    def show(self, record: Record) -> None:
        """Make the bytes in the record's extent readable."""
        assert record.dram is not None
        record.show_in_dram(record.dram)
        self._enter(record)

    def hide(self, record: Record) -> None:
        """Give the bytes in DRAM to nobody any more; those who have them keep them."""
        if record.packed:
            record.packed = b""
            self._leave(record)

    def take(self, records: Sequence[Record], *, loading: bool) -> bool:
        """Give every record an extent, evicting if need be; all or none.

        False leaves everything as it was, unless the arena is too fragmented:
        then some cold blobs may have left for nothing.
        """
        short = sum(self._dram.padded(r.nbytes) for r in records) - self._dram.available_bytes(
            staging=loading
        )
        if short > 0 and not self._evict(short):
            return False
        taken: list[Record] = []
        for record in records:
            extent = self._allocate(record.nbytes, loading)
            if extent is None:
                for undo in taken:
                    self.give_back(undo)
                return False
            record.dram = extent
            taken.append(record)
        return True

    async def take_or_wait(
        self, records: Sequence[Record], *, loading: bool, deadline_s: float
    ) -> str:
        """`take`, waiting for room until the clock reads `deadline_s`; "" or why not."""
        wanted = sum(self._dram.padded(record.nbytes) for record in records)
        if wanted > self.limit(loading=loading):
            return "too_large"
        if not self._waiters and self.take(records, loading=loading):
            return ""
        if len(self._waiters) >= WAITERS_MAX:
            raise Busy(f"{WAITERS_MAX} reservations wait for room already")
        return await self._queue(records, loading, deadline_s)

    async def _queue(self, records: Sequence[Record], loading: bool, deadline_s: float) -> str:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiters.append(turn)
        try:
            while True:
                self.spare_bytes_wanted()
                remaining_s = deadline_s - self._clock()
                if remaining_s <= 0:
                    return "full"
                await asyncio.wait([turn], timeout=remaining_s)
                mine = self._waiters.index(turn)
                turn = self._waiters[mine] = loop.create_future()
                if mine == 0 and self.take(records, loading=loading):
                    return ""
        finally:
            self._waiters.remove(turn)
            self.notify()

    def notify(self) -> None:
        """Room may have come: let the first who waits try."""
        if self._waiters and not self._waiters[0].done():
            self._waiters[0].set_result(None)

    def give_back(self, record: Record) -> None:
        """Free the extent of a record that was never made readable."""
        if record.dram is not None:
            self._free(record)
            self.notify()

    def hand_over(self, record: Record, to: Record) -> None:
        """Make the bytes of `record`, which was never shown, readable under `to` instead."""
        assert not record.packed
        assert to.dram is None
        to.dram, record.dram = record.dram, None
        self.show(to)

    def demote(self, record: Record) -> bool:
        """Free the DRAM bytes of a blob that is on SSD too, if nothing holds them."""
        if record.ssd is False or not self._evictable(record):
            return False
        self._soft_leave(record)
        self._expel(record)
        self.notify()
        return True

    def _evictable(self, record: Record) -> bool:
        return (
            record.packed != b""
            and not record.pins
            and not record.dram_children
            and not record.dirty
            and record.fill is None
            and (record.ssd is not False or not (record.has_children or record.heirs))
        )

    def _evict(self, short: int) -> bool:
        """Free at least `short` bytes, coldest first; or nothing at all."""
        chosen: list[Record] = []
        while short > 0:
            victim = next(self._policy.victims(), None)
            if victim is None:
                for record in reversed(chosen):
                    self._undo_soft_leave(record)
                return False
            self._soft_leave(victim)
            chosen.append(victim)
            short -= self._dram.padded(victim.nbytes)
        for victim in chosen:
            self._expel(victim)
        return True

    # A victim first leaves the tree, which offers its parent to the policy in
    # its own place in the order; bytes are freed once the sum suffices.
    def _soft_leave(self, record: Record) -> None:
        self._policy.withdraw(record)
        if record.ssd is False and record.parent is not None:
            record.parent.disown(record)
        self._leave(record)

    def _undo_soft_leave(self, record: Record) -> None:
        if record.ssd is False and record.parent is not None:
            record.parent.adopt(record)
        self._enter(record)
        self.settle(record)

    def _expel(self, record: Record) -> None:
        record.packed = b""
        self._free(record)
        if record.ssd is False:
            self._counters.dropped += 1
            self._counters.lost_unsaved += record.unsaved
            self._index.discard(record)
        else:
            self._counters.demoted += 1

    def _allocate(self, nbytes: int, loading: bool) -> Extent | None:
        while True:
            try:
                return self._dram.allocate(nbytes, staging=loading)
            except Full:
                # Enough in total, but not in one piece: go on until it is.
                if not self._evict(1):
                    return None

    def _free(self, record: Record) -> None:
        assert record.dram is not None
        self._dram.free(record.dram, wipe=record.retention is Retention.VOLATILE)
        record.dram = None

    def _enter(self, record: Record) -> None:
        parent = record.parent
        if parent is not None:
            parent.dram_children += 1
            if parent.dram_children == 1:
                self._policy.withdraw(parent)

    def _leave(self, record: Record) -> None:
        parent = record.parent
        if parent is not None:
            parent.dram_children -= 1
            parent.last_used = max(parent.last_used, record.last_used)
            if parent.dram_children == 0:
                self.settle(parent)
