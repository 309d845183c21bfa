"""Which blobs hold DRAM, and who leaves when room is needed.

Owns every extent of the arena. A record's bytes stay while it is pinned (leases,
loans to writers, I/O in flight) or while a blob that continues it is in DRAM;
what may leave is offered to the policy, which says in which order. Used on the
event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

from blobstore.counters import Counters
from blobstore.errors import Full
from blobstore.eviction import Eviction, Gate
from blobstore.index import Index, Record, Retention
from blobstore.run_search import RunSearch
from blobstore.stories import Stories
from blobstore.tiering.dram import DramTier
from blobstore.tiering.policy import Policy
from blobstore.tiering.tier import Extent
from blobstore.turns import Turns

WAITERS_MAX = 1024
"""Reservations that may wait for room at once; more are refused as busy."""

WIPE_INLINE_BYTES = 256 << 10
"""Zeroing this much takes less time than handing it to a thread."""

PATIENCE_S = 0.25
"""How long a put waits for cold blobs to be written to SSD before warmer ones go instead."""


class Residency:
    """Room in DRAM: taken by `take`, kept by pins, given back by eviction or `settle`."""

    def __init__(
        self,
        dram: DramTier,
        policy: Policy[Record],
        index: Index,
        counters: Counters,
        pool: Executor,
        clock: Callable[[], float],
        stories: Stories,
    ) -> None:
        self._dram = dram
        self._policy = policy
        self._index = index
        self._counters = counters
        self._pool = pool
        self._clock = clock
        self._stories = stories
        self._eviction = Eviction(
            dram, policy, self._leave_tree, self._rejoin_tree, self._offer_quietly
        )
        self._turns = Turns(clock, WAITERS_MAX)
        self._load_turns = Turns(clock, WAITERS_MAX)
        self._search = RunSearch(
            dram.free_runs, self.coldest, lambda record: self.gate.waits(record), dram.padded,
            self._expel_together, self.notify, clock,
        )  # fmt: skip
        self._wipes: set[asyncio.Future[None]] = set()
        self.wiping_bytes = 0
        """Freed, and being zeroed before anyone else gets them."""
        self.pinned_bytes = 0
        self.departures = 0
        """Blobs that have ceased to be readable here so far."""
        self.expelled_bytes = 0
        """Evicted so far, in whole pages."""
        self.dirty_bytes: Callable[[], int] = lambda: 0
        """How much may leave once it has been written to SSD."""
        self.on_settled: Callable[[Record], None] = lambda record: None
        """Called whenever a record's standing may have changed."""
        self.on_hidden: Callable[[Record], None] = lambda record: None
        """Called when a record's bytes in DRAM have ceased to be readable."""
        self.on_used: Callable[[Record], None] = lambda record: None
        """Called whenever a record's time of last use has changed."""
        self.is_superseded: Callable[[Record], bool] = lambda record: False
        """Whether the blob's context was replaced by another, so that it is not worth keeping."""

    @property
    def gate(self) -> Gate:
        """Who decides about blobs that are in DRAM alone."""
        return self._eviction.gate

    @gate.setter
    def gate(self, gate: Gate) -> None:
        self._eviction.gate = gate

    @property
    def capacity_bytes(self) -> int:
        """What DRAM holds."""
        return self._dram.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What puts can have at once, or once it is wiped."""
        return self._dram.available_bytes() + self.wiping_bytes

    def padded(self, nbytes: int) -> int:
        """What `nbytes` take up here."""
        return self._dram.padded(nbytes)

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return len(self._turns)

    @property
    def put_waits(self) -> int:
        """Puts that have had to wait for room so far."""
        return self._turns.waited

    @property
    def expects_room(self) -> bool:
        """Room will come: bytes are being wiped, or may leave once they are on SSD, or a search for
        some that may leave is under way."""
        return self.wiping_bytes > 0 or self.dirty_bytes() > 0 or self._search.active

    def could_hold(self, records: Sequence[Record]) -> bool:
        """Whether all fit at once, if nobody else held any room."""
        wanted = sum(self._dram.padded(record.nbytes) for record in records)
        return wanted <= self._dram.capacity_bytes

    def pin(self, record: Record) -> None:
        """Keep the record's DRAM bytes, and its ancestors', until `unpin`."""
        record.pins += 1
        if record.pins == 1:
            self.pinned_bytes += record.nbytes
            self._policy.withdraw(record)

    def unpin(self, record: Record, *, used: bool = True) -> None:
        """Undo one `pin`; counts as a use unless the store itself had the pin."""
        assert record.pins > 0
        record.pins -= 1
        if used:
            self._use(record, self._clock())
        if record.pins == 0:
            self.pinned_bytes -= record.nbytes
            self.settle(record)

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

    def settle(self, record: Record) -> None:
        """Bring the record's standing up to date: free useless bytes, else offer or withdraw."""
        node: Record | None = record
        while node is not None:  # freeing one may make its parent's bytes useless
            node = self._settle(node)

    def show(self, record: Record) -> None:
        """Make the bytes in the record's extent readable; a hole is none any more."""
        assert record.dram is not None
        if not record.packed:
            self._policy.enter(record, record.nbytes)
        record.show_in_dram(record.dram)
        self._index.mend(record)
        if not record.counted:
            self._count(record)

    def hide(self, record: Record, why: str = "corrupt") -> None:
        """Give the bytes in DRAM to nobody any more; those who have them keep them."""
        if record.packed:
            self.unlist(record)
            self._counters.moved("dram>none", why, record)
            self._stories.note(record, "dram>none", why)
        record.hide_in_dram()
        self.departures += 1
        self.on_hidden(record)

    def unlist(self, record: Record) -> None:
        """A blob leaves, or was dropped while somebody reads it: it is none of the policy's now."""
        if record.packed and record.counted:  # else it has left the tree, and the policy with it
            self._policy.withdraw(record)
            self._policy.leave(record)

    def take(self, records: Sequence[Record], *, loading: bool, patient: bool = False) -> bool:
        """Give every record an extent, evicting if need be; all or none.

        Cold blobs that have to be written to SSD first are passed over for warmer ones,
        unless `patient`.

        False leaves everything as it was, but where free room lies in pieces
        (cold blobs may have left for the first few records) or is being wiped
        (see `wiping_bytes`: it is there in a moment).
        """
        wanted = sum(self._dram.padded(record.nbytes) for record in records)
        while wanted and (short := self._short(wanted, loading)) > 0:
            victims = self._eviction.victims(short, urgent=loading, patient=patient)
            self._expel(victims)
            # Looking for victims may have freed what was put aside.
            if not victims and self._short(wanted, loading) >= short:
                self.gate.pressed(short=True)
                return False
        taken: list[Record] = []
        for record in records:
            extent = self._allocate(record.nbytes, loading)
            if extent is None:
                self._untake(taken)
                return False
            record.dram = extent
            self._search.taken(extent.offset)
            taken.append(record)
        self.gate.pressed(short=False)
        return True

    async def take_or_wait(self, records: Sequence[Record], deadline_s: float) -> str:
        """`take` for a put, waiting for room until the clock reads `deadline_s`; "" or why not.

        Room that is being wiped is waited for in any case. Raises Busy if too many wait.
        """
        wanted = sum(self._dram.padded(record.nbytes) for record in records)
        if wanted > self._dram.room_for_puts_bytes:
            return "too_large"

        if await self._take_in_turn(records, deadline_s):
            return ""
        if self.wiping_bytes:
            await self.wiped()
            if await self._take_in_turn(records, deadline_s):
                return ""
        return "full"

    async def _take_in_turn(self, records: Sequence[Record], deadline_s: float) -> bool:
        """`take` when it is one's turn; patient at first, while there is time."""
        patient_until_s = min(self._clock() + PATIENCE_S, deadline_s)
        timer: asyncio.TimerHandle | None = None

        def attempt() -> bool:
            nonlocal timer
            patient = self._clock() < patient_until_s
            taken = self.take(records, loading=False, patient=patient)
            if patient and not taken and timer is None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(PATIENCE_S, self._turns.notify)
            return taken

        try:
            if await self._turns.wait(attempt, deadline_s):
                return True
        finally:
            if timer is not None:
                timer.cancel()
        # Time is up, and it was patient to the end.
        return timer is not None and not self._turns and self.take(records, loading=False)

    async def take_staging(self, record: Record) -> bool:
        """`take` for one record of the store's own, which waits for nothing but wipes."""
        while not self.take([record], loading=True):
            if not self.wiping_bytes:
                return False
            await self.wiped()
        return True

    async def close(self) -> None:
        """Look for room no longer, and wait for the wipes in flight."""
        await self._search.close()
        await self.wiped()

    async def wiped(self) -> None:
        """Wait for the wipes in flight."""
        if self._wipes:
            await asyncio.wait(self._wipes)

    async def wait_to_load(self, attempt: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until `attempt` to load finds room, or sees that none will come; False: time is up.

        Raises Busy if too many wait.
        """
        return await self._load_turns.wait(attempt, deadline_s)

    def notify(self) -> None:
        """Room may have come, or will not: let the first who wait try, loads before puts."""
        self._load_turns.notify()
        self._turns.notify()

    def give_back(self, record: Record) -> None:
        """Free the extent, if any, of a record that was never made readable."""
        if record.dram is not None:
            self._free(record)

    def reclaim(self, record: Record) -> bool:
        """Free bytes that nobody is given any more, if nobody has them; whether there are none.

        Leases on what continues the record cover its bytes without a pin of their own.
        """
        assert not record.packed
        if record.dram is not None and not record.pins and not _held_from_below(record):
            parent = self._free(record)
            if parent is not None:
                self.settle(parent)
        return record.dram is None

    def hand_over(self, record: Record, to: Record) -> None:
        """Make the bytes of `record`, which was never shown, readable under `to` instead."""
        assert not record.packed
        assert to.dram is None
        to.dram, record.dram = record.dram, None
        self.show(to)

    def demote(self, record: Record, why: str = "asked") -> bool:
        """Free the DRAM bytes of a blob that is on SSD too, if nothing holds them.

        One that is not is written, so that they may be freed later.
        """
        if record.ssd is False:
            self.gate.save(record)
            return False
        if not self._evictable(record):
            return False
        self._leave_tree(record)
        self._expel([record], why)
        return True

    def coldest(self) -> Iterator[Record]:
        """Blobs whose turn to leave comes first, roughly in order, what they bare included.

        What changes while it runs may show or not.
        """
        left: dict[Record, int] = {}
        for leaf in self._policy.victims():
            node: Record | None = leaf
            while node is not None:
                yield node
                node = self._bared_by(node, left)

    def _short(self, wanted: int, loading: bool) -> int:
        return wanted - self._dram.available_bytes(staging=loading) - self.wiping_bytes

    def _use(self, record: Record, now_s: float) -> None:
        if now_s > record.last_used:
            record.last_used = now_s
            self.on_used(record)

    def _settle(self, record: Record, *, quiet: bool = False) -> Record | None:
        """Settle one record; its parent, if that is the next to settle.

        `quiet` while somebody looks for victims: two who wait for room would wake each
        other for ever.
        """
        parent = None
        if self._useless(record):
            self._policy.withdraw(record)
            self.hide(record, "asked")
            parent = self._free(record)
        elif self._evictable(record):
            self._policy.offer(record, record.last_used, record.nbytes)
            if not quiet:
                self.notify()
        else:
            self._policy.withdraw(record)
        if not record.gone:
            self.on_settled(record)
        return parent

    def _useless(self, record: Record) -> bool:
        """Dropped, hidden, or a load or a draft that failed; and nobody reads or writes it."""
        unreadable = record.gone or (record.packed == b"" and record.fill is None)
        held = record.pins or record.dram_children
        return record.dram is not None and unreadable and not held

    def _evictable(self, record: Record) -> bool:
        return (
            record.packed != b""
            and not record.gone
            and not record.pins
            and not record.dram_children
            and not record.dirty
            and record.fill is None
            and (record.ssd is not False or may_be_lost(record) or self.gate.waits(record))
        )

    def _offer_quietly(self, record: Record) -> None:
        self._settle(record, quiet=True)

    def _leave_tree(self, record: Record) -> None:
        self._policy.withdraw(record)
        if record.ssd is False and record.parent is not None:
            record.parent.disown(record)
        parent = self._uncount(record)
        if parent is not None:
            self._settle(parent, quiet=True)

    def _rejoin_tree(self, record: Record) -> None:
        if record.ssd is False and record.parent is not None:
            record.parent.adopt(record)
        self._count(record)
        self._settle(record, quiet=True)
        if record.parent is not None:
            self._settle(record.parent, quiet=True)

    def _bared_by(self, node: Record, left: dict[Record, int]) -> Record | None:
        """The parent, if it may leave too once `node` and its siblings in `left` have left."""
        parent = node.parent
        if parent is None:
            return None
        left[parent] = left.get(parent, parent.dram_children) - 1
        busy = parent.gone or parent.pins or parent.dirty or parent.fill is not None
        return None if left[parent] or busy or not parent.packed else parent

    def _expel(self, victims: Sequence[Record], why: str = "") -> None:
        """Free the bytes of blobs that left the tree; those that are nowhere else are dropped."""
        for record in victims:
            self._policy.withdraw(record)  # its child's going may have offered it again
            self._policy.leave(record)
            self.expelled_bytes += self._dram.padded(record.nbytes)
            self.hide(record, why or self._why_expelled(record))
            self._free(record)
            if record.ssd is not False:
                self._counters.demoted += 1
                continue
            self._counters.dropped += 1
            self._counters.lost_unsaved += record.unsaved
            above = self._index.discard(record)
            if above is not None:
                self.settle(above)

    def _expel_together(self, records: Sequence[Record]) -> bool:
        """Let all of them go, what continues others before them; whether all may."""
        left: list[Record] = []
        for record in records:
            if not self._evictable(record) or self.gate.waits(record):
                for each in reversed(left):
                    self._rejoin_tree(each)
                return False
            self._leave_tree(record)
            left.append(record)
        self._expel(left)
        return True

    def _why_expelled(self, record: Record) -> str:
        if record.ssd is not False:
            return "kept_on_ssd"
        if record.retention is Retention.VOLATILE:
            return "volatile"
        if self.is_superseded(record):
            return "superseded"
        return "unsaved" if record.unsaved else self.gate.why_lost(record)

    def _untake(self, records: Sequence[Record]) -> None:
        for record in records:
            assert record.dram is not None
            self._dram.free(record.dram)  # unused: nothing of the record's to wipe
            record.dram = None

    def _allocate(self, nbytes: int, loading: bool) -> Extent | None:
        try:
            return self._dram.allocate(nbytes, staging=loading)
        except Full:
            if self.wiping_bytes:
                return None
        # Enough in total, but not in one piece.
        padded = self._dram.padded(nbytes)
        victims = self._eviction.victims_in_one_piece(padded, urgent=loading)
        if victims is None:
            self._search.begin(padded)
        if not victims:
            return None
        self._expel(victims)
        try:
            return self._dram.allocate(nbytes, staging=loading)
        except Full:
            assert self.wiping_bytes
            return None

    def _free(self, record: Record) -> Record | None:
        """Give the record's extent back; its parent, if no more of its children have bytes."""
        extent, record.dram = record.dram, None
        assert extent is not None
        if record.retention is not Retention.VOLATILE:
            self._dram.free(extent)
        elif extent.nbytes <= WIPE_INLINE_BYTES:
            self._dram.free(extent, wipe=True)
        else:
            self._wipe(extent)
        self.notify()
        return self._uncount(record)

    def _wipe(self, extent: Extent) -> None:
        """Zero and free an extent on a worker thread."""
        nbytes = self._dram.padded(extent.nbytes)

        def done(wipe: asyncio.Future[None]) -> None:
            self._wipes.discard(wipe)
            self.wiping_bytes -= nbytes
            wipe.result()
            self.notify()

        self.wiping_bytes += nbytes
        loop = asyncio.get_running_loop()
        wipe = loop.run_in_executor(self._pool, lambda: self._dram.free(extent, wipe=True))
        self._wipes.add(wipe)
        wipe.add_done_callback(done)

    def _count(self, record: Record) -> None:
        record.counted = True
        parent = record.parent
        if parent is not None:
            parent.dram_children += 1
            if parent.dram_children == 1:
                self._policy.withdraw(parent)

    def _uncount(self, record: Record) -> Record | None:
        """Undo `_count`, if it was done; the parent, if it has no such children any more."""
        if not record.counted:
            return None
        record.counted = False
        parent = record.parent
        if parent is None:
            return None
        parent.dram_children -= 1
        self._use(parent, record.last_used)
        return None if parent.dram_children else parent


def may_be_lost(record: Record) -> bool:
    """Nobody was promised to find a blob whose only copy is in DRAM."""
    durable = record.retention is Retention.DURABLE
    return not (record.has_children or record.heirs or durable)


def _held_from_below(record: Record) -> bool:
    """Whether anything that continues `record` and has bytes in DRAM is pinned or dropped."""
    level = [record]
    for node in level:
        below = [child for child in node.children() if child.counted]
        if len(below) != node.dram_children or any(child.pins for child in below):
            return True  # who counts and is no child any more was dropped, and is still read
        level.extend(below)
    return False
