"""Which blobs are written to SSD, and when: those in DRAM alone are decided about before they go.

While the SSD has room to spare a sealed blob is written at once. Otherwise it waits in
DRAM until it is among the coldest there; then it is either written, and may leave once it
is on SSD, or refused, and may be lost. That happens ahead of need: when little of DRAM is
free or could leave at once, the mover decides about the next in order, within the budget
for writes per second. A put that comes faster waits. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from blobstore.counters import Counters
from blobstore.index import Record, Retention
from blobstore.rate import Rate
from blobstore.residency import Residency, may_be_lost
from blobstore.settings import TieringSettings
from blobstore.stories import Stories
from blobstore.tiering.admission import Admission, Verdict
from blobstore.tiering.budget import Budget
from blobstore.units import MIB

log = logging.getLogger(__name__)

SLICE = 32
"""Blobs looked at between two turns of the loop: a millisecond or two if each is judged."""

CHAIN_MAX = 64
"""Blobs written along with one that is sealed, which continues them: more wait for their turn."""

COMING_BYTES_MAX = 256 * MIB
"""On their way to SSD at once: what is to be durable waits behind them."""

PAUSE_S = 0.005
"""Between two looks, so that blobs are decided about in batches."""

PAUSE_MAX_S = 0.25
"""However long the budget holds everything up: it may have been a large blob's turn."""

PAUSE_SHARE = 4
"""Times what a look took: one that goes far and finds little must not keep the loop busy."""


def written_along(record: Record, longest: float = inf) -> list[Record]:
    """A blob, before it what it continues that is not on SSD: its last `longest` and one more."""
    records = [record]
    node = record.parent
    while node is not None and not node.has_row and not node.dirty and len(records) <= longest:
        records.append(node)
        node = node.parent
    records.reverse()
    return records


@dataclass(slots=True)
class _Chain:
    """What would have to be written together: each continues the one before, and what the first
    continues is on SSD, or on its way there."""

    records: list[Record]
    nbytes: int
    can_be_written: bool

    @classmethod
    def of(cls, record: Record, longest: float = inf) -> _Chain:
        """The chain that ends at `record`, or its last `longest` records and one more."""
        records = written_along(record, longest)
        fit = all(node.packed and node.retention is not Retention.VOLATILE for node in records)
        return cls(records, sum(node.nbytes for node in records), fit)

    def shorten(self) -> None:
        """Without the last of them."""
        self.nbytes -= self.records.pop().nbytes


@dataclass(frozen=True, slots=True)
class _HeldUp:
    """Worth a write that cannot be begun yet: of `nbytes` at most, with what it continues."""

    verdict: Verdict
    nbytes: int


class Mover:
    """Decides about blobs in DRAM alone; implements Gate.

    `write` queues a blob for SSD, and what it continues, for a reason; `free_bytes` is
    the room there that nobody has been promised.
    """

    def __init__(
        self,
        residency: Residency,
        admission: Admission[Record],
        write: Callable[[Record, str], None],
        free_bytes: Callable[[], int],
        counters: Counters,
        stories: Stories,
        clock: Callable[[], float],
        settings: TieringSettings,
    ) -> None:
        self._residency = residency
        self._admission = admission
        self._write = write
        self._free_bytes = free_bytes
        self._counters = counters
        self._stories = stories
        self._clock = clock
        self._low_bytes = int(residency.capacity_bytes * settings.dram_low)
        self._high_bytes = int(residency.capacity_bytes * settings.dram_high)
        self._coming_bytes_max = min(self._high_bytes, COMING_BYTES_MAX)
        self._budget = Budget.per_second(settings.demote_rate or None)
        self._rate = Rate(clock)
        self._waiting: dict[Record, _HeldUp | None] = {}
        """Not written and not refused; with what was decided, if the budget held it up."""
        self._waiting_bytes = 0
        self._refused: dict[Record, float] = {}
        """In DRAM alone and may be lost, by what was decided at that time."""
        self._refused_end: _Chain | None = None
        """The end of this chain was refused last: what it continued is likely to be the next."""
        self._coming: set[Record] = set()
        self.coming_bytes = 0
        self._ready_bytes = 0
        """Could leave at once when the mover last looked."""
        self._expelled_before = 0
        self._unfinished = False
        """The last look ended early, since no more could be written for now."""
        self._held_s = 0.0
        """How long the budget holds up what was decided last."""
        self._wanted = asyncio.Event()

    def sealed(self, record: Record) -> None:
        """A blob is in DRAM alone: write it now if SSD has room to spare, else let it wait."""
        if record.parent not in self._waiting:
            chain = _Chain.of(record, CHAIN_MAX)
            if not chain.can_be_written:
                self._refuse(record, "parent")
                return
            waits = any(node in self._waiting for node in chain.records[:-1])
            if len(chain.records) <= CHAIN_MAX and not waits and self._has_room(chain):
                self._write(record, "room")
                return
        self._wait(record)

    def used(self, record: Record) -> None:
        """A blob in DRAM alone was used: what was decided about it before that is void."""
        if record in self._waiting or record.last_used <= self._refused.get(record, -inf):
            return
        volatile = record.retention is Retention.VOLATILE
        busy = record.dirty or record.unsaved or record.gone
        if record.packed and not (volatile or busy):
            self._wait(record)

    def let_go(self, record: Record) -> None:
        """The blob had to leave SSD: as far as that goes it may leave DRAM too."""
        if record.packed:
            self._refused[record] = self._clock()

    def queued(self, record: Record) -> None:
        """The blob will be written, whoever decided that."""
        self.forget(record)
        self._refused_end = None
        self._admission.wrote(record.nbytes, self._clock())
        self._rate.note(record.nbytes)

    def unwritten(self, record: Record) -> None:
        """The blob could not be written: no budget for writes per day is spent on that."""
        self._admission.unwrote(record.nbytes)

    def ended(self, record: Record) -> None:
        """The blob was written, or could not be."""
        if record in self._coming:
            self._coming.discard(record)
            self.coming_bytes -= record.nbytes
            self._ready_bytes += record.nbytes
            if self._unfinished:
                self._wanted.set()

    def forget(self, record: Record) -> None:
        """There is nothing to decide about the blob any more."""
        self._refused.pop(record, None)
        if self._refused_end is not None and self._refused_end.records[-1] is not record:
            self._refused_end = None
        if record in self._waiting:
            del self._waiting[record]
            self._waiting_bytes -= record.nbytes

    def waits(self, record: Record) -> bool:
        """As Gate.waits."""
        return record in self._waiting

    def may_leave(self, record: Record, *, urgent: bool) -> bool:
        """As Gate.may_leave."""
        if record in self._waiting:
            self._ready_bytes = 0  # the mover lags behind: less is ready than it saw
        return self._may_leave(record, urgent=urgent)

    def save(self, record: Record) -> None:
        """As Gate.save."""
        if record in self._waiting or record in self._refused:
            self._write(record, "asked")

    def why_lost(self, record: Record) -> str:
        """As Gate.why_lost."""
        return "refused"

    def pressed(self, *, short: bool) -> None:
        """As Gate.pressed."""
        if short:
            self._ready_bytes = 0
        if self._available_bytes() < self._low_bytes:
            self._wanted.set()

    def decide_all(self, deadline_s: float) -> None:
        """The store is closing: have what is worth it written, the latest used first."""
        for record in sorted(self._waiting, key=lambda record: -record.last_used):
            if self._clock() >= deadline_s:
                break
            if record not in self._waiting or self._residency.is_superseded(record):
                continue
            chain = _Chain.of(record)
            if chain.can_be_written and self._ask(chain).admit:
                self._write(record, "close")

    async def run(self) -> None:
        """Decide ahead of need until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            started_s = self._clock()
            try:
                held_s = await self._look()
            except Exception:  # puts can do without, and whatever it met may pass
                log.exception("looking ahead in DRAM failed")
                held_s = 0.0
            taken_s = self._clock() - started_s
            pause_s = max(PAUSE_S, min(held_s, PAUSE_MAX_S), PAUSE_SHARE * taken_s)
            await asyncio.sleep(pause_s)
            if held_s:
                self._wanted.set()

    def standing(self, record: Record) -> dict[str, Any]:
        """What has been decided about a blob, for people."""
        refused_s = self._refused.get(record)
        return {
            "waits": record in self._waiting,
            "coming": record in self._coming,
            "refused_ago_s": None if refused_s is None else self._clock() - refused_s,
        }

    def stats(self) -> dict[str, Any]:
        """Gauges by name."""
        return {
            "waiting_blobs": len(self._waiting),
            "waiting_bytes": self._waiting_bytes,
            "coming_bytes": self.coming_bytes,
            "ready_bytes": max(self._available_bytes() - self.coming_bytes, 0),
            "demote_bytes_per_s": self._rate.per_s(),
            "puts_waited": self._residency.put_waits,
        }

    async def _look(self) -> float:
        """Decide about the coldest until enough may leave; how long the budget says to wait."""
        self._expelled_before = self._residency.expelled_bytes
        self._ready_bytes = 0
        self._unfinished = False
        for n, record in enumerate(self._residency.coldest(), 1):
            if self._available_bytes() >= self._high_bytes:
                break
            if self._may_leave(record, urgent=False):
                self._ready_bytes += self._residency.padded(record.nbytes)
            elif record in self._waiting:  # written later, when more may be
                self._unfinished = True
                return self._held_s
            if n % SLICE == 0:
                await asyncio.sleep(0)
        return 0.0

    def _may_leave(self, record: Record, *, urgent: bool) -> bool:
        if record not in self._waiting:
            return True
        self._decide(record, urgent=urgent)
        return record not in self._waiting and not record.dirty and may_be_lost(record)

    def _available_bytes(self) -> int:
        """Free, or free to leave, or about to be."""
        left_bytes = self._residency.expelled_bytes - self._expelled_before
        ready_bytes = max(self._ready_bytes - left_bytes, 0) + self.coming_bytes
        return self._residency.free_bytes + ready_bytes

    def _decide(self, record: Record, *, urgent: bool) -> None:
        """Have a waiting blob written, or refuse it; or neither, while the budget is spent."""
        if self._residency.is_superseded(record):
            self._refuse(record, "superseded")
            return
        held_up = self._waiting[record]
        if held_up is not None and not urgent and self._is_held_up(held_up.nbytes):
            return
        chain = self._chain(record)
        if not chain.can_be_written:
            self._refuse(record, "parent")
            return
        verdict = held_up.verdict if held_up is not None else self._ask(chain)
        if not verdict.admit:
            self._refuse(record, verdict.reason, verdict.detail)
            self._refused_end = chain
        elif urgent:
            self._demote(chain)
        elif self._is_held_up(chain.nbytes):
            self._waiting[record] = _HeldUp(verdict, chain.nbytes)
        else:
            self._spend(chain)
            self._demote(chain)

    def _is_held_up(self, nbytes: int) -> bool:
        """Whether so much must wait: for the budget, or for what is on its way to SSD."""
        self._held_s = self._budget.wait_s(nbytes, self._clock())
        return self._held_s > 0 or self.coming_bytes >= self._coming_bytes_max

    def _demote(self, chain: _Chain) -> None:
        self._write(chain.records[-1], "worth")
        for node in chain.records:
            if node.dirty:
                self._coming.add(node)
                self.coming_bytes += node.nbytes

    def _refuse(self, record: Record, reason: str, detail: str = "") -> None:
        self.forget(record)
        record.unsaved = False  # a later use may have it decided about anew
        self._refused[record] = self._clock()
        if not may_be_lost(record):
            self._residency.settle(record)  # it was offered because it might be written
        self._counters.refused("ssd", reason, record)
        told = f"{reason}: {detail}" if detail else reason
        self._stories.note(record, "refused ssd", told)

    def _wait(self, record: Record) -> None:
        assert record not in self._waiting
        self._refused.pop(record, None)
        record.unsaved = False
        self._waiting[record] = None
        self._waiting_bytes += record.nbytes
        if not may_be_lost(record):  # it may go all the same, once it is on SSD
            self._residency.settle(record)

    def _has_room(self, chain: _Chain) -> bool:
        verdict = self._ask(chain)
        return verdict.admit and verdict.reason == "room" and self._spend(chain)

    def _ask(self, chain: _Chain) -> Verdict:
        return self._admission.decide(
            chain.records, chain.nbytes, self._free_bytes(), self._clock()
        )

    def _spend(self, chain: _Chain) -> bool:
        return self._budget.take(chain.nbytes, self._clock())

    def _chain(self, record: Record) -> _Chain:
        known, self._refused_end = self._refused_end, None
        if known is not None and known.records[-2:-1] == [record]:
            known.shorten()
            return known
        return _Chain.of(record)
