"""Group commit: whatever has been written by now becomes durable in one transaction.

Parents go before or with their children. Removals travel in the same
transactions, and their bytes are freed after them. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from blobstore.backoff import Backoff
from blobstore.errors import BlobStoreError, Full, StorageFailed
from blobstore.index import NamespaceState, Record, Retention
from blobstore.tiering.row import HOLE
from blobstore.tiering.ssd import Row, SsdTier
from blobstore.tiering.tier import Extent

log = logging.getLogger(__name__)

ROWS_PER_COMMIT_MAX = 1024
TOUCHES_PER_COMMIT_MAX = 4096


@dataclass(frozen=True, slots=True)
class Written:
    """A blob whose bytes are on the disk, or go into the catalogue, and whose row is not yet."""

    record: Record
    extent: Extent | None
    why: str
    """The reason, for counters, why it was written."""


@dataclass(frozen=True, slots=True)
class _Removal:
    namespace_id: bytes
    key: bytes
    extent: Extent | bool


class Outcomes(Protocol):
    """Who is told what became of a blob; a fault leaves nothing of it on the disk."""

    def saved(self, item: Written) -> None:
        """Its row is durable."""
        ...

    def not_saved(self, item: Written, error: BlobStoreError) -> None:
        """It is not on the disk, and its extent was freed."""
        ...

    def failed(self, error: BlobStoreError) -> None:
        """A commit failed; told before what that means for each blob."""
        ...

    def rewritten(self, record: Record, error: BlobStoreError | None) -> None:
        """Its row says now how long it must be kept (or not, but will be tried again)."""
        ...


class Committer:
    """Commits to one SSD tier, one transaction at a time."""

    def __init__(
        self,
        ssd: SsdTier,
        outcomes: Outcomes,
        view: Callable[[Record], memoryview],
        backoff: Backoff,
        commit_pool: Executor,
        trim_pool: Executor,
        wall_offset_s: Callable[[], float],
    ) -> None:
        self._ssd = ssd
        self._outcomes = outcomes
        self._view = view
        self._backoff = backoff
        self._commit_pool = commit_pool
        self._trim_pool = trim_pool
        self._wall_offset_s = wall_offset_s
        self._written: list[Written] = []
        self._removals: list[_Removal] = []
        self._declared: set[NamespaceState] = set()
        self._rewrites: set[Record] = set()
        self._rewriting: set[Record] = set()
        """Rewrites in the commit under way."""
        self._hollows: dict[Record, Extent | bool] = {}
        """Rows to be written without payload, and where that lies."""
        self._used: set[Record] = set()
        """Used since their rows were written: at most all that are on SSD."""
        self._uses_due = False
        self._busy = False
        self._removing = False
        self._trimming: asyncio.Future[None] | None = None
        self._trim_again = False
        self.leaving_bytes = 0
        """Removed, and not free yet."""
        self._wanted = asyncio.Event()
        self._rounds: list[asyncio.Future[None]] = []

    @property
    def pending(self) -> bool:
        """Something waits for a commit, or is in one; times of use do not count."""
        waiting = self._written or self._removals or self._rewrites or self._hollows
        return bool(waiting or self._busy or self._trimming)

    @property
    def removing(self) -> bool:
        """Bytes are on their way out: a round that ends may have freed some."""
        return bool(self._removing or self._removals or self._trimming or self._due_hollows())

    def add(self, item: Written) -> None:
        """Commit a row for the blob as soon as its parent has one, or comes along."""
        self._written.append(item)
        self._wanted.set()

    def remove(self, record: Record) -> None:
        """Take the blob's row off the disk, then its bytes; it counts as gone from there now."""
        assert record.ssd is not False
        self._used.discard(record)
        self._rewrites.discard(record)
        self._removals.append(_Removal(record.ns.id, record.key, record.ssd))
        self.leaving_bytes += _nbytes(record.ssd)
        record.leave_ssd()
        self._wanted.set()

    def hollow(self, record: Record) -> None:
        """Take the blob's payload off the disk; its row stays, as a stub.

        While the blob is dirty its row waits for the new payload.
        """
        assert record.ssd is not False
        self._used.discard(record)
        self._rewrites.discard(record)
        self._hollows[record] = record.ssd
        self.leaving_bytes += _nbytes(record.ssd)
        record.leave_ssd()
        record.stub = True
        self._wanted.set()

    def remove_stub(self, record: Record) -> None:
        """Take the row of a blob that has no payload off the disk."""
        record.stub = False
        place = self._hollows.pop(record, False)
        self._removals.append(_Removal(record.ns.id, record.key, place))
        self._wanted.set()

    def rewrite(self, record: Record) -> None:
        """Write the row of a blob that is on SSD anew."""
        self._rewrites.add(record)
        self._wanted.set()

    def rewriting(self, record: Record) -> bool:
        """Whether a rewrite of the record's row is still to be committed."""
        return record in self._rewrites or record in self._rewriting

    def note_use(self, record: Record) -> None:
        """Bring the record's time of last use to disk some time."""
        if record.ssd is not False:
            self._used.add(record)

    def persist_uses(self) -> None:
        """Bring times of last use to disk now, so that a restart knows them."""
        if self._used:
            self._uses_due = True
            self._wanted.set()

    def look_again(self) -> None:
        """A parent that others wait for was given up."""
        self._wanted.set()

    async def round(self, *, now: bool = True) -> None:
        """Wait for the end of a commit, asking for one if `now`; raises what it failed with."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rounds.append(over)
        if now:
            self._wanted.set()
        await over

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            batch = self._committable()
            error = None
            if batch or self._has_work():
                error = await self._commit(batch)
                if self._written or self._has_work():
                    self._wanted.set()
            elif self._trimming is not None:
                continue  # its end is the round's
            self._end_round(error)
            if error is not None:
                await asyncio.sleep(self._backoff.pause_s)

    async def close(self) -> None:
        """Bring the last times of use to disk; `run` must have ended."""
        self._end_round(StorageFailed("the store is closing"))
        while self._used:
            self._uses_due = True
            if await self._commit([]) is not None:
                return

    def _has_work(self) -> bool:
        """Besides new rows."""
        due = self._removals or self._rewrites or self._uses_due or self._due_hollows()
        return bool(due)

    def _due_hollows(self, coming: Set[Record] = frozenset()) -> dict[Record, Extent | bool]:
        """Payloads to give up now: a blob that is being saved anew keeps its row until then."""
        if not self._hollows:
            return {}
        return {r: at for r, at in self._hollows.items() if not r.dirty or r in coming}

    def _end_round(self, error: BlobStoreError | None) -> None:
        rounds, self._rounds = self._rounds, []
        for over in rounds:
            if over.done():
                continue
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(error)

    def _committable(self) -> list[Written]:
        """Written blobs whose parent is on SSD or comes along."""
        batch: list[Written] = []
        coming: set[Record] = set()
        later: list[Written] = []
        for item in sorted(self._written, key=lambda item: item.record.depth):
            record, parent = item.record, item.record.parent
            if record.gone or not _can_be_reached(parent, coming):
                self._not_saved(item, Full("its parent is not on ssd"))
            elif parent is not None and not parent.has_row and parent not in coming:
                later.append(item)
            elif len(batch) < ROWS_PER_COMMIT_MAX:
                batch.append(item)
                coming.add(record)
            else:
                later.append(item)
        self._written = later
        return batch

    async def _commit(self, batch: list[Written]) -> BlobStoreError | None:
        removals, self._removals = self._removals, []
        rewrites, self._rewrites = self._rewrites, set()
        hollows = self._due_hollows({item.record for item in batch})
        self._hollows = {r: at for r, at in self._hollows.items() if r not in hollows}
        offset_s = self._wall_offset_s()
        add: list[tuple[Row, memoryview | None]] = [
            (_row(record, None, offset_s)._replace(retention=HOLE), None) for record in hollows
        ]
        add += [(_row(item.record, item.extent, offset_s), self._inline(item)) for item in batch]
        add += [(_row(record, record.ssd, offset_s), None) for record in rewrites]
        said = {r: r.retention for r in (*(item.record for item in batch), *rewrites)}
        remove = [(removal.namespace_id, removal.key) for removal in removals]
        touch = [(r.ns.id, r.key, r.last_used + offset_s) for r in self._uses()]
        leaving = [*(removal.extent for removal in removals), *hollows.values()]
        spaces = {record.ns for record in said} - self._declared

        def work() -> None:
            for space in spaces:
                self._ssd.declare(space.id, space.namespace.encode())
            self._ssd.commit(add, remove, touch)
            self._free(leaving)

        self._rewriting = rewrites
        self._busy, self._removing = True, bool(removals or hollows)
        error: BlobStoreError | None = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._commit_pool, work)
        except Exception as fault:
            error = typed(fault)
            self._outcomes.failed(error)
            self._removals = removals + self._removals
            self._keep_hollows(hollows)
            self._rewrites |= {record for record in rewrites if record.ssd is not False}
            for item in batch:
                self._not_saved(item, error)
        else:
            self._backoff.success()
            self._declared |= spaces
            self._rewrites |= _outdated(said, rewrites)
            for item in batch:
                self._outcomes.saved(item)
            self.leaving_bytes -= sum(map(_nbytes, leaving))
            if leaving:
                self._trim()
        finally:
            self._busy = self._removing = False
            self._rewriting = set()
        for record in rewrites:
            self._outcomes.rewritten(record, error)
        return error

    def _keep_hollows(self, hollows: Mapping[Record, Extent | bool]) -> None:
        """They could not be committed: again next time, if they are still wanted."""
        for record, place in hollows.items():
            if record.stub:
                self._hollows[record] = place
            else:
                self._removals.append(_Removal(record.ns.id, record.key, place))

    def _inline(self, item: Written) -> memoryview | None:
        return self._view(item.record) if item.extent is None else None

    def _uses(self) -> list[Record]:
        """Some of the records whose times of use are due."""
        if not self._uses_due:
            return []
        uses = [self._used.pop() for _ in range(min(len(self._used), TOUCHES_PER_COMMIT_MAX))]
        self._uses_due = bool(self._used)
        return uses

    def _not_saved(self, item: Written, error: BlobStoreError) -> None:
        if item.extent is not None:
            self._free([item.extent])
            self._trim()
        self._outcomes.not_saved(item, error)

    def _free(self, extents: Iterable[Extent | bool]) -> None:
        """Give back what nobody can find any more (work)."""
        for extent in extents:
            if isinstance(extent, Extent):
                try:
                    self._ssd.free(extent)
                except Exception:
                    log.exception("an extent could not be freed")

    def _trim(self) -> None:
        """Punch holes on a thread of their own: writes need not wait for them."""
        self._trim_again = self._trimming is not None
        if self._trimming is None:
            loop = asyncio.get_running_loop()
            self._trimming = loop.run_in_executor(self._trim_pool, self._ssd.trim)
            self._trimming.add_done_callback(self._trimmed)

    def _trimmed(self, trim: asyncio.Future[None]) -> None:
        self._trimming = None
        if not trim.cancelled() and (fault := trim.exception()) is not None:
            log.error("freed space could not be given back", exc_info=fault)
        if self._trim_again:
            self._trim()
        self._wanted.set()  # who waits for room looks again


def typed(fault: Exception) -> BlobStoreError:
    """`fault` as one of ours; what nobody foresaw is logged, and costs one batch only."""
    if isinstance(fault, BlobStoreError):
        return fault
    log.error("write-back failed", exc_info=fault)
    return StorageFailed(f"{type(fault).__name__}: {fault}")


def _nbytes(place: Extent | bool) -> int:
    return place.nbytes if isinstance(place, Extent) else 0


def _outdated(said: Mapping[Record, Retention], rewritten: Set[Record]) -> set[Record]:
    """Records whose retention was raised, or given up, while a commit of it was under way."""
    return {
        record
        for record, was in said.items()
        if record.retention is not was and (record.ssd is not False or record not in rewritten)
    }


def _can_be_reached(parent: Record | None, coming: set[Record]) -> bool:
    """The parent is on SSD, or on its way there."""
    if parent is None:
        return True
    return not parent.gone and (parent.has_row or parent.dirty or parent in coming)


def _row(record: Record, place: Extent | bool | None, wall_offset_s: float) -> Row:
    return Row(
        namespace=record.ns.id,
        key=record.key,
        parent=b"" if record.parent is None else record.parent.key,
        tokens=record.tokens,
        nbytes=record.nbytes,
        digest=record.digest,
        pieces=record.pieces,
        extent=place if isinstance(place, Extent) else None,
        retention=record.retention.name.lower(),
        last_used_wall_s=record.last_used + wall_offset_s,
    )
