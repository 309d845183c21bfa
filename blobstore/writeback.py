"""Keeping blobs on SSD: the dirty queue, group commit, and room on the disk.

Sealed blobs are written as soon as a lane is free, several at once; whatever
has been written by then is committed in one transaction, parents before or with
their children. Removals travel in the same transactions, and their bytes are
freed after them. A blob that cannot be written stays in DRAM, counted as
unsaved. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from blobstore.counters import Counters
from blobstore.digest import first_bad_piece
from blobstore.errors import BlobStoreError, Corrupt, Full, InvalidRequest, StorageFailed
from blobstore.index import Index, Record, Retention
from blobstore.residency import Residency
from blobstore.tiering.policy import Policy
from blobstore.tiering.ssd import INLINE_BYTES_MAX, Row, SsdTier
from blobstore.tiering.tier import Extent
from blobstore.units import MIB

log = logging.getLogger(__name__)

ROWS_PER_COMMIT_MAX = 1024
TOUCHES_PER_COMMIT_MAX = 4096
BACKOFF_S = 0.25
BACKOFF_MAX_S = 4.0


@dataclass(frozen=True, slots=True)
class _Written:
    record: Record
    extent: Extent | None


@dataclass(frozen=True, slots=True)
class _Removal:
    namespace_id: bytes
    key: bytes
    extent: Extent | bool


class Writeback:
    """Writes dirty records to one SSD tier and keeps room there."""

    def __init__(
        self,
        ssd: SsdTier,
        arena: memoryview,
        residency: Residency,
        index: Index,
        policy: Policy[Record],
        counters: Counters,
        pool: Executor,
        lanes: int,
        on_corrupt: Callable[[Record], None],
        clock: Callable[[], float],
        wall_offset_s: Callable[[], float],
    ) -> None:
        self._ssd = ssd
        self._arena = arena
        self._residency = residency
        self._index = index
        self._policy = policy
        self._counters = counters
        self._pool = pool
        self._on_corrupt = on_corrupt
        self._clock = clock
        self._wall_offset_s = wall_offset_s
        self._queue: deque[Record] = deque()
        self._written: list[_Written] = []
        self._removals: list[_Removal] = []
        self._touched: set[Record] = set()
        self._rewrites: set[Record] = set()
        """On SSD, with a row that does not say yet how long they must be kept."""
        self._durable: dict[Record, list[asyncio.Future[None]]] = {}
        self._work = asyncio.Event()
        self._commit_wanted = asyncio.Event()
        self._committed = asyncio.Event()
        self._committer_pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._lanes = lanes
        self._tasks: list[asyncio.Task[None]] = []
        self._busy = 0
        self._touches_due = False
        self._committing = False
        self._removing = False
        """A commit with removals, or the freeing of their bytes, is under way."""
        self._leaving_bytes = 0
        """On their way out, not free yet."""
        self._backoff_s = 0.0
        self._suspended_until_s = 0.0
        self.dirty_bytes = 0

    def start(self) -> None:
        """Start the lanes and the committer."""
        spawn = asyncio.get_running_loop().create_task
        self._tasks = [spawn(self._lane()) for _ in range(self._lanes)]
        self._tasks.append(spawn(self._commit_forever()))

    async def close(self, flush_s: float) -> None:
        """Write what is dirty, for at most `flush_s`, then stop."""
        deadline_s = self._clock() + flush_s
        while self._pending() and self._clock() < deadline_s:
            self._committed.clear()
            self._commit_wanted.set()
            await _wait(self._committed, min(0.5, flush_s))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._touched:
            try:
                await self._commit([])
            except BlobStoreError:
                break
        self._committer_pool.shutdown()

    def save(self, record: Record) -> None:
        """Queue a sealed blob, and ancestors that are not on SSD, root side first."""
        chain: list[Record] = []
        node: Record | None = record
        while node is not None and node.ssd is False and not node.dirty:
            if node.retention is Retention.VOLATILE or not node.packed or self._suspended():
                self._give_up(record, Full("an ancestor of this blob cannot be on ssd"))
                return
            chain.append(node)
            node = node.parent
        for node in reversed(chain):
            node.dirty = True
            node.unsaved = False
            self.dirty_bytes += node.nbytes
            self._residency.settle(node)
            self._queue.append(node)
        self._work.set()

    async def save_durably(self, record: Record) -> None:
        """Return once the blob is on SSD and committed.

        Raises Full, StorageFailed or InvalidRequest if that cannot be; the blob
        then stays in DRAM as a standard one.
        """
        if record.ssd is not False and record not in self._rewrites:
            return
        node: Record | None = record
        while node is not None and node.ssd is False:
            if node.retention is Retention.VOLATILE:
                raise InvalidRequest("a durable blob cannot continue a volatile one")
            node = node.parent
        self._suspended_until_s = 0.0  # somebody waits for it: ask the disk again
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._durable.setdefault(record, []).append(done)
        if record.ssd is not False:
            self._commit_wanted.set()
        elif not record.dirty:
            self.save(record)
        await done

    def raise_retention(self, record: Record, retention: Retention) -> None:
        """Keep the record for longer than was asked so far."""
        was_volatile = record.retention is Retention.VOLATILE
        record.retention = retention
        if record.ssd is not False:
            self._rewrites.add(record)
            self._commit_wanted.set()
            self.settle(record)
        elif was_volatile:
            self.save(record)

    def remove(self, record: Record) -> None:
        """Take the blob's copy off the disk: its row first, then its bytes."""
        if record.ssd is not False:
            self._policy.withdraw(record)
            self._touched.discard(record)
            self._rewrites.discard(record)
            self._removals.append(_Removal(record.ns.id, record.key, record.ssd))
            record.ssd = False
            self._commit_wanted.set()

    def settle(self, record: Record) -> None:
        """Bring the record's standing in the SSD's eviction order up to date."""
        if record.ssd is False:
            return
        self._touched.add(record)
        if record.has_children or record.retention is Retention.DURABLE or record.gone:
            self._policy.withdraw(record)
        else:
            self._policy.offer(record, record.last_used, record.nbytes)

    def persist_touches(self) -> None:
        """Bring recent uses to disk with the next commit, so that a restart knows them."""
        if self._touched:
            self._touches_due = True
            self._commit_wanted.set()

    def _pending(self) -> bool:
        waiting = self._queue or self._written or self._removals or self._rewrites
        return bool(waiting or self._busy or self._committing)

    def _suspended(self) -> bool:
        return self._clock() < self._suspended_until_s

    async def _lane(self) -> None:
        while True:
            while not self._queue:
                self._work.clear()
                await self._work.wait()
            record = self._queue.popleft()
            if record.gone:
                self._end(record, Full("dropped before it was written"))
                continue
            self._busy += 1
            self._residency.pin(record)
            try:
                extent = await self._write(record)
                self._written.append(_Written(record, extent))
                self._commit_wanted.set()
            except Exception as fault:
                error = _typed(fault)
                self._fault(error)
                self._end(record, error)
                if isinstance(error, Corrupt):
                    self._on_corrupt(record)
                self._residency.unpin(record)
                self._commit_wanted.set()  # what waits for this one must give up too
            finally:
                self._busy -= 1

    async def _write(self, record: Record) -> Extent | None:
        """Write the payload; its extent, or None if it goes into the catalogue."""
        if record.nbytes <= INLINE_BYTES_MAX:
            self._check(record)
            return None
        for attempt in (1, 2):
            extent = await self._room(record.nbytes)
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._pool, self._write_checked, record, extent
                )
            except Corrupt:
                self._ssd.free(extent)
                raise
            except StorageFailed:
                self._ssd.free(extent)
                # A disk that others filled has less room than we were given: shed, once.
                if attempt == 2 or not self._shed(2 * record.nbytes):
                    raise
                await self._next_commit()
            else:
                return extent
        raise AssertionError("unreachable")

    def _write_checked(self, record: Record, extent: Extent) -> None:
        """Check the bytes against their digest and write them (work)."""
        self._check(record)
        self._ssd.write(extent, 0, self._view(record))

    def _check(self, record: Record) -> None:
        if first_bad_piece(self._view(record), 0, record.pieces) is not None:
            raise Corrupt(f"blob {record.key.hex()[:12]} in dram fails its digest")

    async def _room(self, nbytes: int) -> Extent:
        while True:
            try:
                extent = self._ssd.allocate(nbytes)
            except Full:
                if not (self._removing or self._removals or self._shed(nbytes)):
                    raise
                await self._next_commit()
            else:
                # Shed ahead of need, so that the next write need not wait for a commit.
                ahead = min(self._ssd.capacity_bytes // 16, 256 * MIB)
                if self._ssd.free_bytes + self._leaving_bytes < ahead:
                    self._shed(nbytes)
                return extent

    def _shed(self, nbytes: int) -> bool:
        """Choose cold leaves to leave the SSD until `nbytes` are on their way out."""
        shed, chosen = 0, list[Record]()
        go_on = True
        while shed < nbytes and go_on:
            chosen.clear()
            for victim in self._policy.victims():
                if shed >= nbytes:
                    break
                if self._may_leave(victim):
                    shed += victim.nbytes
                    chosen.append(victim)
            for victim in chosen:  # which makes leaves of their parents
                self._counters.ssd_evicted += 1
                self.evict(victim)
            go_on = bool(chosen)
        self._leaving_bytes += shed
        return shed > 0

    @staticmethod
    def _may_leave(record: Record) -> bool:
        busy = record.pins or record.heirs or record.dirty or record.fill is not None
        return not busy and not record.has_children

    def evict(self, record: Record) -> None:
        """Give up the copy on SSD; a blob that is nowhere else leaves the index."""
        self.remove(record)
        if record.packed:
            self._residency.settle(record)
            return
        parent = record.parent
        self._index.discard(record)
        if parent is not None and not parent.gone:
            self._residency.settle(parent)

    async def _next_commit(self) -> None:
        self._committed.clear()
        self._commit_wanted.set()
        await self._committed.wait()

    async def _commit_forever(self) -> None:
        while True:
            await self._commit_wanted.wait()
            self._commit_wanted.clear()
            batch = self._committable()
            if not (batch or self._removals or self._rewrites or self._touches_due):
                self._committed.set()
                continue
            self._touches_due, self._committing = False, True
            try:
                await self._commit(batch)
            except BlobStoreError as error:
                self._fault(error)
                await asyncio.sleep(self._backoff_s)
            finally:
                self._committing = False
                self._committed.set()
            if self._written or self._removals:
                self._commit_wanted.set()

    def _committable(self) -> list[_Written]:
        """Written blobs whose parent is on SSD or comes along."""
        batch: list[_Written] = []
        coming: set[Record] = set()
        later: list[_Written] = []
        for item in sorted(self._written, key=lambda item: item.record.depth):
            record, parent = item.record, item.record.parent
            if record.gone or (parent is not None and not self._will_be_on_ssd(parent, coming)):
                self._forsake(item)
            elif parent is not None and parent.ssd is False and parent not in coming:
                later.append(item)
            elif len(batch) < ROWS_PER_COMMIT_MAX:
                batch.append(item)
                coming.add(record)
            else:
                later.append(item)
        self._written = later
        return batch

    @staticmethod
    def _will_be_on_ssd(parent: Record, coming: set[Record]) -> bool:
        return not parent.gone and (parent.ssd is not False or parent.dirty or parent in coming)

    def _forsake(self, item: _Written) -> None:
        if item.extent is not None:
            self._ssd.free(item.extent)
        self._end(item.record, Full("its parent is not on ssd"))
        self._residency.unpin(item.record)

    async def _commit(self, batch: list[_Written]) -> None:
        removals, self._removals = self._removals, []
        leaving, self._leaving_bytes = self._leaving_bytes, 0
        n_touched = min(len(self._touched), TOUCHES_PER_COMMIT_MAX)
        touched = [self._touched.pop() for _ in range(n_touched)]
        rewrites, self._rewrites = self._rewrites, set()
        offset_s = self._wall_offset_s()
        add = [
            (_row(i.record, i.extent, offset_s), None if i.extent else self._view(i.record))
            for i in batch
        ]
        add += [
            (_row(r, r.ssd if isinstance(r.ssd, Extent) else None, offset_s), None)
            for r in rewrites
        ]
        touch = [(r.ns.id, r.key, r.last_used + offset_s) for r in touched if r.ssd is not False]
        self._removing = bool(removals)
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._committer_pool,
                self._ssd.commit,
                add,
                [(removal.namespace_id, removal.key) for removal in removals],
                touch,
            )
        except Exception as fault:
            error = _typed(fault)
            self._removals = removals + self._removals
            self._leaving_bytes += leaving
            self._rewrites |= {record for record in rewrites if record.ssd is not False}
            for record in rewrites:
                self._tell(record, error)
            for item in batch:
                if item.extent is not None:
                    self._ssd.free(item.extent)
                self._end(item.record, error)
                self._residency.unpin(item.record)
            self._removing = False
            raise error from fault
        self._backoff_s = 0.0
        for item in batch:
            self._on_ssd(item)
        for record in rewrites:
            self._tell(record, None)
        await self._free(removals)
        self._removing = False

    async def _free(self, removals: list[_Removal]) -> None:
        extents = [r.extent for r in removals if isinstance(r.extent, Extent)]
        if extents:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(loop.run_in_executor(self._pool, self._ssd.free, extent) for extent in extents)
            )

    def _on_ssd(self, item: _Written) -> None:
        record = item.record
        record.ssd = True if item.extent is None else item.extent
        self._counters.saved_blobs += 1
        self._counters.saved_bytes += record.nbytes
        self._end(record, None)
        if record.gone:
            self.remove(record)
        else:
            self.settle(record)
            if record.parent is not None:
                self.settle(record.parent)
        self._residency.unpin(record)

    def _end(self, record: Record, error: BlobStoreError | None) -> None:
        """The record is no longer dirty: saved, or given up."""
        if record.dirty:
            record.dirty = False
            self.dirty_bytes -= record.nbytes
        if error is None:
            self._tell(record, None)
        else:
            self._give_up(record, error)
        self._residency.settle(record)
        self._residency.notify()

    def _give_up(self, record: Record, error: BlobStoreError) -> None:
        if not record.gone and record.retention is not Retention.VOLATILE and not record.unsaved:
            record.unsaved = True
            self._counters.unsaved += 1
        self._tell(record, error)

    def _tell(self, record: Record, error: BlobStoreError | None) -> None:
        """Answer those who wait for the record to be durable."""
        for done in self._durable.pop(record, ()):
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _fault(self, error: BlobStoreError) -> None:
        """A full or failing disk is left alone for a moment, longer each time."""
        if isinstance(error, Corrupt):
            return
        self._counters.ssd_errors += isinstance(error, StorageFailed)
        self._backoff_s = min(max(BACKOFF_S, 2 * self._backoff_s), BACKOFF_MAX_S)
        self._suspended_until_s = self._clock() + self._backoff_s

    def _view(self, record: Record) -> memoryview:
        assert record.dram is not None
        return self._arena[record.dram.offset : record.dram.offset + record.nbytes]


def _row(record: Record, extent: Extent | None, wall_offset_s: float) -> Row:
    return Row(
        namespace=record.ns.id,
        key=record.key,
        parent=b"" if record.parent is None else record.parent.key,
        tokens=record.tokens,
        nbytes=record.nbytes,
        digest=record.digest,
        pieces=record.pieces,
        extent=extent,
        retention=record.retention.name.lower(),
        last_used_wall_s=record.last_used + wall_offset_s,
    )


def _typed(fault: Exception) -> BlobStoreError:
    """`fault` as one of ours; what nobody foresaw is logged, and costs this batch only."""
    if isinstance(fault, BlobStoreError):
        return fault
    log.error("write-back failed", exc_info=fault)
    return StorageFailed(f"{type(fault).__name__}: {fault}")


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
