"""Keeping blobs on SSD: what is to be there is written as soon as a lane is free, several at once.

Which blobs, and when, is the mover's to say, commits are the committer's, room is the
SSD's own affair. A blob that cannot be written stays in DRAM, counted as unsaved. Used on
the event loop only, but for the methods marked as work.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from itertools import islice

from blobstore.backoff import Backoff
from blobstore.committer import Committer, Written, typed
from blobstore.counters import Counters
from blobstore.digest import PIECE_BYTES, first_bad_piece
from blobstore.errors import BlobStoreError, Corrupt, Full, InvalidRequest, StorageFailed
from blobstore.index import Index, Record, Retention
from blobstore.mover import Mover
from blobstore.residency import Residency
from blobstore.settings import TieringSettings
from blobstore.ssd_room import SsdRoom
from blobstore.stories import Stories
from blobstore.tiering.admission import Admission
from blobstore.tiering.policy import Policy
from blobstore.tiering.ssd import INLINE_BYTES_MAX, SsdTier
from blobstore.tiering.tier import Extent

UNIT_BYTES = 4 * PIECE_BYTES
"""Checked and written at a time."""

SHARES = 4
"""Threads that write one blob: it is durable sooner, and few puts keep the disk busy
(4 in flight: 0.85 of the disk's rate against 0.73 with one thread for each)."""

SYNCED_ALONE_BYTES = 4 * PIECE_BYTES
"""Blobs of this size are synced while others are committed; smaller ones share a sync."""

RETRIES_MAX = 64
"""Blobs queued again at once when the disk works again; more follow when these are saved."""

FLUSHES = 3
"""How often a closing store tries to write what could not be written."""


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
        sync_pool: Executor,
        commit_pool: Executor,
        trim_pool: Executor,
        lanes: int,
        on_corrupt: Callable[[Record], None],
        clock: Callable[[], float],
        wall_offset_s: Callable[[], float],
        *,
        stories: Stories,
        admission: Admission[Record],
        settings: TieringSettings,
    ) -> None:
        self._ssd = ssd
        self._arena = arena
        self._residency = residency
        self._index = index
        self._counters = counters
        self._stories = stories
        self._pool = pool
        self._sync_pool = sync_pool
        self._lanes = lanes
        self._on_corrupt = on_corrupt
        self._clock = clock
        self._backoff = Backoff(clock)
        self._committer = Committer(
            ssd, self, self._view, self._backoff, commit_pool, trim_pool, wall_offset_s
        )
        self._room = SsdRoom(ssd, self._committer, index, residency, policy, counters, stories)
        self.mover = Mover(
            residency, admission, self.write, self._free_bytes, counters, stories, clock,
            settings,
        )  # fmt: skip
        residency.gate = self.mover
        self._room.on_evicted = self.mover.let_go
        index.on_stub_gone = self._committer.remove_stub
        self._queue: deque[tuple[Record, str]] = deque()
        self._unsaved: dict[Record, None] = {}
        """In DRAM and to be tried again, the longest waiting first."""
        residency.on_hidden = self._forget
        self._durable: dict[Record, list[asyncio.Future[None]]] = {}
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy = 0
        self.dirty_bytes = 0
        self.superseded_bytes: Callable[[], int] = lambda: 0
        """On SSD, of contexts that were replaced: they go before all others."""
        self.settle = self._room.settle
        self.persist_uses = self._committer.persist_uses

    def start(self) -> None:
        """Start the lanes, the committer and the mover."""
        spawn = asyncio.get_running_loop().create_task
        self._tasks = [spawn(self._lane()) for _ in range(self._lanes)]
        self._tasks.append(spawn(self._committer.run()))
        self._tasks.append(spawn(self.mover.run()))

    async def close(self, flush_s: float) -> None:
        """Write what is dirty, and what would be in time, for at most `flush_s`, then stop."""
        deadline_s = self._clock() + flush_s
        for _ in range(FLUSHES):
            self._backoff.ask_again()
            self.mover.decide_all(deadline_s)
            self._try_again(len(self._unsaved), self.write)
            await self._drain(deadline_s)
            if not self._unsaved:
                break
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for record in list(self._durable):
            self._tell(record, StorageFailed("the store is closing"))
        await self._committer.close()

    def adopt(self, records: Iterable[Record]) -> None:
        """These were on SSD when the store was opened."""
        for record in records:
            if record.ssd is not False:
                self._room.enter(record)
                if not record.has_children:
                    self.settle(record)

    def save(self, record: Record, why: str = "") -> None:
        """Bring a sealed blob to SSD, at once or when its room in DRAM is needed.

        What others on SSD continue is written at once, and nothing while the disk fails.
        """
        if record.dirty or record.ssd is not False:
            return
        if record.retention is Retention.DURABLE:
            self.write(record, "durable")
        elif record.stub or self._backoff.active:
            self.write(record, "repair")
        else:
            self.mover.sealed(record)

    def write(self, record: Record, why: str) -> None:
        """Queue a sealed blob, and ancestors that are not on SSD, root side first."""
        chain: list[Record] = []
        node: Record | None = record
        while node is not None and node.ssd is False and not node.dirty:
            if node.stub and node is not record:
                break
            if node.retention is Retention.VOLATILE or not node.packed:
                self._give_up(record, Full("what it continues cannot be on ssd"), "parent")
                self._residency.settle(record)
                return
            chain.append(node)
            node = node.parent
        if chain and self._backoff.active:
            self._give_up(record, Full("the ssd is full or failing"), "failing")
            self._residency.settle(record)
            return
        for node in reversed(chain):
            self._queue.append((node, "retry" if node.unsaved else why))
            self.mover.queued(node)
            node.dirty = True
            node.unsaved = False
            self._unsaved.pop(node, None)
            self.dirty_bytes += node.nbytes
            self._residency.settle(node)
        self._work.set()

    def note_use(self, record: Record) -> None:
        """The record's time of last use has changed."""
        if record.ssd is False:
            self.mover.used(record)
        else:
            self._committer.note_use(record)

    def retry(self) -> None:
        """Try again what could not be written, once the disk may work: one first, then more."""
        if self._unsaved and not self._backoff.active and len(self._queue) < RETRIES_MAX:
            self._try_again(1 if self._backoff.pause_s else RETRIES_MAX, self.save)

    async def save_durably(self, record: Record) -> None:
        """Return once the blob is on SSD and committed.

        Raises Full, StorageFailed or InvalidRequest if that cannot be; the blob
        then stays in DRAM as a standard one, unless it was durable and lost its copy.
        """
        try:
            await self._saved_durably(record)
        except BlobStoreError:
            if not record.stub:
                record.retention = min(record.retention, Retention.STANDARD)
            self._residency.settle(record)
            raise

    def raise_retention(self, record: Record, retention: Retention) -> None:
        """Keep the record for longer than was asked so far."""
        was_volatile = record.retention is Retention.VOLATILE
        record.retention = retention
        if record.ssd is not False:
            self._committer.rewrite(record)
            self.settle(record)
        elif was_volatile:
            self.save(record)

    def remove(self, record: Record, why: str = "asked") -> None:
        """Take the blob's copy, if any, off the disk: its row first, then its bytes.

        Who waits for it to be durable is told. The caller settles the record.
        """
        self.mover.forget(record)
        self._room.remove(record, why)
        self._tell(record, Full("it was dropped before it was durable"))

    def hollow(self, record: Record, why: str = "corrupt") -> None:
        """The copy on the disk is of no use: let go of it, but keep a row for what continues it.

        The row stays as it is while the blob is saved anew, and is replaced in one commit.
        The caller settles the record, and saves it if it can.
        """
        self._room.hollow(record, why)

    def saved(self, item: Written) -> None:
        """As Outcomes.saved."""
        record = item.record
        record.show_on_ssd(True if item.extent is None else item.extent)
        record.stub = False
        self._counters.saved_blobs += 1
        self._counters.saved_bytes += record.nbytes
        self._counters.moved("dram>ssd", item.why, record)
        self._stories.note(record, "dram>ssd", item.why)
        if record.gone:
            self.remove(record)
        else:
            self._room.enter(record)
            self._index.mend(record)
        self._end(record, None)
        self._residency.unpin(record, used=False)
        self.retry()

    def not_saved(self, item: Written, error: BlobStoreError) -> None:
        """As Outcomes.not_saved."""
        self._end(item.record, error)
        self._residency.unpin(item.record, used=False)

    def rewritten(self, record: Record, error: BlobStoreError | None) -> None:
        """As Outcomes.rewritten."""
        if error is not None or not self._committer.rewriting(record):
            self._tell(record, error)

    def failed(self, error: BlobStoreError) -> None:
        """As Outcomes.failed."""
        self._counters.ssd_errors += isinstance(error, StorageFailed)
        self._backoff.fault()

    async def _saved_durably(self, record: Record) -> None:
        if record.ssd is not False and not self._committer.rewriting(record):
            return
        node: Record | None = record
        while node is not None and node.ssd is False:
            if node.retention is Retention.VOLATILE:
                raise InvalidRequest("a durable blob cannot continue a volatile one")
            node = node.parent
        self._backoff.ask_again()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._durable.setdefault(record, []).append(done)
        if record.ssd is False and not record.dirty:
            self.write(record, "durable")
        await done

    def _pending(self) -> bool:
        return bool(self._queue or self._busy or self._committer.pending)

    async def _drain(self, deadline_s: float) -> None:
        while self._pending() and (left_s := deadline_s - self._clock()) > 0:
            with suppress(BlobStoreError, TimeoutError):
                await asyncio.wait_for(self._committer.round(now=False), left_s)

    def _free_bytes(self) -> int:
        """On SSD, less what is on its way there, and what is kept free for the next writes.

        What replaced contexts take is as good as free: it leaves for whatever comes.
        """
        free_bytes = self._ssd.free_bytes + self.superseded_bytes()
        return free_bytes - self.dirty_bytes - self._room.ahead_bytes

    def _try_again(self, n: int, save: Callable[[Record, str], None]) -> None:
        for record in list(islice(self._unsaved, n)):
            if record in self._unsaved:  # not saved along with what continues it
                del self._unsaved[record]  # to come last if it is given up again
                save(record, "retry")

    def _forget(self, record: Record) -> None:
        self._unsaved.pop(record, None)
        self.mover.forget(record)

    async def _lane(self) -> None:
        while True:
            while not self._queue:
                self._work.clear()
                await self._work.wait()
            record, why = self._queue.popleft()
            if record.gone or not record.packed:
                self.mover.unwritten(record)
                self._end(record, Full("lost before it was written"))
                self._committer.look_again()
                continue
            self._busy += 1
            self._residency.pin(record)
            try:
                self._committer.add(Written(record, await self._write(record), why))
            except Exception as fault:
                self._not_written(record, typed(fault))
            finally:
                self._busy -= 1

    def _not_written(self, record: Record, error: BlobStoreError) -> None:
        self.mover.unwritten(record)
        if isinstance(error, Corrupt):
            self._on_corrupt(record)
        else:
            self.failed(error)
        self.not_saved(Written(record, None, ""), error)
        self._committer.look_again()  # what waits for this one must give up too

    async def _write(self, record: Record) -> Extent | None:
        """Write the payload; its extent, or None if it goes into the catalogue."""
        if record.nbytes <= INLINE_BYTES_MAX:
            _check(record, self._view(record), 0)
            return None
        for last in (False, True):
            extent = await self._room.take(record.nbytes)
            try:
                await self._write_shares(record, extent)
                if record.nbytes >= SYNCED_ALONE_BYTES:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._sync_pool, self._ssd.sync, extent)
            except (Corrupt, StorageFailed) as error:
                self._ssd.free(extent)
                # A disk that others filled has less room than we were given: shed, once.
                if last or not _is_full(error) or not self._shed(record.nbytes):
                    raise
                await self._committer.round()
            else:
                return extent
        raise AssertionError("unreachable")

    def _shed(self, nbytes: int) -> bool:
        return self._room.shed(2 * nbytes) or self._room.shed(nbytes)

    async def _write_shares(self, record: Record, extent: Extent) -> None:
        """Write the payload on several threads; none is at work when this raises."""
        loop = asyncio.get_running_loop()
        units = range(0, record.nbytes, UNIT_BYTES)
        size = -(-len(units) // SHARES)
        shares = [
            loop.run_in_executor(
                self._pool, self._write_checked, record, extent, units[first : first + size]
            )
            for first in range(0, len(units), size)
        ]
        await asyncio.wait(shares)
        await asyncio.gather(*shares)

    def _write_checked(self, record: Record, extent: Extent, units: range) -> None:
        """Check the bytes of units against their digests and write them (work).

        In turns, so that one thread's disk works while another's processor does.
        """
        view = self._view(record)
        for start in units:
            unit = view[start : start + UNIT_BYTES]
            _check(record, unit, start)
            self._ssd.write(extent, start, unit)

    def _end(self, record: Record, error: BlobStoreError | None) -> None:
        """The record is no longer dirty: saved, or given up."""
        if record.dirty:
            record.dirty = False
            self.dirty_bytes -= record.nbytes
        if error is None:
            self.rewritten(record, None)
        else:
            self._give_up(record, error, "full" if isinstance(error, Full) else "failing")
        self.mover.ended(record)
        self._residency.settle(record)
        self._residency.notify()

    def _give_up(self, record: Record, error: BlobStoreError, why: str) -> None:
        self.mover.forget(record)
        wanted = record.packed and not record.gone and record.retention is not Retention.VOLATILE
        if wanted:
            if not record.unsaved:
                self._counters.unsaved += 1
                self._counters.refused("ssd", why, record)
                self._stories.note(record, "refused ssd", why)
            record.unsaved = True
            self._unsaved[record] = None
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

    def _view(self, record: Record) -> memoryview:
        assert record.dram is not None
        return self._arena[record.dram.offset : record.dram.offset + record.nbytes]


def _is_full(error: BlobStoreError) -> bool:
    return isinstance(error, StorageFailed) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _check(record: Record, data: memoryview, start: int) -> None:
    """Raise Corrupt if `data`, which lies at `start` of the payload, fails its digests."""
    if first_bad_piece(data, start // PIECE_BYTES, record.pieces) is not None:
        raise Corrupt(f"blob {record.key.hex()[:12]} in dram fails its digest")
