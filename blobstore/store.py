"""The store of one node: composes index, tiers and movers behind one set of verbs.

Both doors call it. Everything here runs on one event loop; bytes are moved and
hashed by worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from blobstore import listing
from blobstore.adoption import adopt_rows
from blobstore.counters import Counters
from blobstore.drafts import Drafts
from blobstore.errors import BlobStoreError, Busy, InvalidRequest
from blobstore.holder import Holder
from blobstore.index import Index, NamespaceState, Record
from blobstore.loader import Loader
from blobstore.namespace import Namespace
from blobstore.protocol import KEYS_MAX
from blobstore.readers import Found, Readers
from blobstore.residency import WAITERS_MAX, Residency
from blobstore.scrub import Scrub
from blobstore.sealing import Sealing
from blobstore.settings import StoreSettings
from blobstore.tiering.arena import Arena
from blobstore.tiering.disk import Disk
from blobstore.tiering.dram import DramTier
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.ssd import SsdTier
from blobstore.turns import Turns
from blobstore.writeback import Writeback
from blobstore.writers import Writers

log = logging.getLogger(__name__)

TICK_S = 0.5
MAINTAIN_S = 60.0
HASH_LANES = 2
KEY_BYTES = range(8, 65)
NAMESPACES_MAX = 100_000


def _wall_clock() -> float:
    return datetime.now(UTC).timestamp()


class Store:
    """All blobs of this node. Made by `open`; use it on the loop that opened it.

    Methods that take a `holder` act for one client process (`attach`). Keys of
    one call are packed, root side first, and of equal length.
    """

    def __init__(
        self,
        settings: StoreSettings,
        arena: Arena,
        ssd: SsdTier | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        threads: Callable[[int, str], Executor],
    ) -> None:
        self.settings = settings
        self.arena = arena
        self.boot_id = secrets.randbits(63) | 1
        self.counters = Counters()
        self.index = Index()
        self._clock = clock
        self._wall_clock = wall_clock
        self._ssd = ssd
        self._dram = DramTier(arena, staging_bytes=settings.staging_quota_bytes)
        lanes = settings.io_threads
        self._read_pool = threads(lanes, "read")
        self._write_pool = threads(lanes, "write")
        self._hash_pool = threads(HASH_LANES, "hash")
        self._sync_pool = threads(lanes, "sync")
        self._commit_pool = threads(1, "commit")
        self._trim_pool = threads(1, "trim")
        self._pools = [
            self._read_pool, self._write_pool, self._hash_pool,
            self._sync_pool, self._commit_pool, self._trim_pool,
        ]  # fmt: skip
        self.residency = Residency(
            self._dram, LeafLru(), self.index, self.counters, self._hash_pool, clock
        )
        self._loader: Loader | None = None
        self._writeback: Writeback | None = None
        if ssd is not None:
            self._writeback = Writeback(
                ssd, arena.view, self.residency, self.index, LeafLru(), self.counters,
                self._write_pool, self._sync_pool, self._commit_pool, self._trim_pool, lanes,
                self._quarantine_dram, clock, lambda: wall_clock() - clock(),
            )  # fmt: skip
            self._loader = Loader(
                ssd, arena.view, self.residency, self.counters, self._read_pool, lanes,
                self._quarantine, self._writeback.save, clock,
            )  # fmt: skip
            writeback = self._writeback
            self.residency.dirty_bytes = lambda: writeback.dirty_bytes
            self.residency.on_settled = writeback.settle
            self.residency.on_used = writeback.note_use
        self._readers = Readers(
            self.index, self.residency, self._loader, self.counters, clock,
            settings.max_leases_per_client,
        )  # fmt: skip
        drafts = Drafts(self.residency, clock, settings.reservation_ttl_s)
        self._sealing = Sealing(
            self.index, self.residency, drafts, self._writeback, arena.view, self._hash_pool,
            HASH_LANES, clock,
        )  # fmt: skip
        self._writers = Writers(
            self.residency, drafts, self._sealing, self._writeback, self.counters, clock,
            settings.lent_quota_bytes,
        )  # fmt: skip
        self._scrub = Scrub(
            ssd, arena.view, self.index, self.residency, self._quarantine, self._quarantine_dram,
            self._read_pool, clock,
        )  # fmt: skip
        self._holders: dict[object, Holder] = {}
        self._pinned_until: dict[Record, float] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._maintain_at_s = clock() + MAINTAIN_S
        self._started_s = clock()

    @classmethod
    async def open(
        cls,
        settings: StoreSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = _wall_clock,
        disk: Disk | None = None,
        threads: Callable[[int, str], Executor] = ThreadPoolExecutor,
    ) -> Store:
        """Open and recover the SSD tier, allocate the arena, start the movers.

        `threads` makes pools of so many workers with that prefix to their names.
        Raises SetupError (or a subclass) with nothing left behind.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            ssd = None
            if settings.ssd_bytes:  # first: whether the directory is ours is known at once
                ssd = await loop.run_in_executor(
                    None,
                    lambda: SsdTier.open(
                        settings.data_dir, settings.ssd_bytes, disk=disk, wall_clock=wall_clock
                    ),
                )
                undo.callback(ssd.close)
            arena = await loop.run_in_executor(None, lambda: _make_arena(settings))
            undo.callback(arena.close)
            store = cls(settings, arena, ssd, clock, wall_clock, threads)
            store._adopt()
            undo.pop_all()
        if store._writeback is not None:
            store._writeback.start()
        store._ticker = loop.create_task(store._tick_forever())
        return store

    async def close(self, *, drain_s: float = 10.0) -> None:
        """Write dirty blobs for at most `drain_s`, then stop. The arena is unmapped."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
        await self._sealing.close()
        if self._loader is not None:
            await self._loader.close()
        if self._writeback is not None:
            await self._writeback.close(drain_s)
        await self.residency.wiped()
        loop = asyncio.get_running_loop()
        for pool in self._pools:
            await loop.run_in_executor(None, pool.shutdown)
        if self._ssd is not None:
            await loop.run_in_executor(None, self._ssd.close)
        self.arena.close()

    def attach(self, token: object, *, pid: int, name: str) -> Holder:
        """The holder for one process, made if new; each connection attaches once."""
        holder = self._holders.get(token)
        if holder is None:
            if len(self._holders) >= self.settings.max_clients:
                raise Busy(f"{len(self._holders)} clients are connected, the most there may be")
            turns = Turns(self._clock, WAITERS_MAX)
            holder = self._holders[token] = Holder(token, pid, name, turns)
        holder.connections += 1
        return holder

    def detach(self, holder: Holder, reservation_ids: Iterable[int]) -> None:
        """A connection ended: what it reserved expires. Extents and leases wait for `gone`."""
        holder.connections -= 1
        for reservation_id in reservation_ids:
            reservation = holder.reservations.get(reservation_id)
            if reservation is not None:
                self._writers.give_up(reservation, "writer_gone")

    def gone(self, holder: Holder) -> None:
        """The process has exited: its leases end and all that it was lent comes back."""
        self._readers.release(holder, list(holder.leases))
        self._writers.holder_gone(holder)
        self._holders.pop(holder.token, None)

    async def declare(self, encoded: bytes) -> bytes:
        """Declare a namespace by its canonical encoding; its id.

        A disk that cannot take it now learns of it with the first blob that it
        can take; until then DRAM serves alone.
        """
        namespace = Namespace.decode(encoded)
        if namespace.id not in self.index.namespaces:
            if len(self.index.namespaces) >= NAMESPACES_MAX:
                raise Busy(f"{NAMESPACES_MAX} namespaces are declared, the most there may be")
            self.index.declare(namespace)
            if self._ssd is not None:
                work = asyncio.get_running_loop().run_in_executor
                try:
                    await work(self._write_pool, self._ssd.declare, namespace.id, encoded)
                except BlobStoreError as error:
                    log.warning("a namespace is not on disk yet: %s", str(error))
        return namespace.id

    def match(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> tuple[int, int, float]:
        """Leading blobs held, how many of them in DRAM, seconds to have them all there."""
        state = self._checked(namespace_id, keys, key_bytes)
        self.counters.matches += 1
        n = self.index.leading(state, keys, key_bytes)
        warm = self.index.warm(state, keys, key_bytes, n)
        eta_s = 0.0
        if warm < n and self._loader is not None:
            eta_s = (n - warm) * state.full_bytes / self._loader.bytes_per_s
        return n, warm, eta_s

    def get(
        self,
        holder: Holder,
        namespace_id: bytes,
        keys: bytes,
        key_bytes: int,
        *,
        timeout_s: float,
        stream: bool = False,
        wait_for_writers: bool = False,
    ) -> Found | Awaitable[Found]:
        """Lease the leading blobs (see Readers.get)."""
        state = self._checked(namespace_id, keys, key_bytes)
        return self._readers.get(
            holder, state, keys, key_bytes,
            timeout_s=timeout_s, stream=stream, wait_for_writers=wait_for_writers,
        )  # fmt: skip

    @property
    def readers(self) -> Readers:
        """Leases."""
        return self._readers

    @property
    def writers(self) -> Writers:
        """Reservations."""
        return self._writers

    def state(self, namespace_id: bytes) -> NamespaceState:
        """The declared namespace with this id; UnknownNamespace otherwise."""
        return self.index.namespace(namespace_id)

    def split(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> list[bytes]:
        """The packed keys one by one, checked."""
        self._checked(namespace_id, keys, key_bytes)
        return _split(keys, key_bytes)

    def exists(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> bytes:
        """One byte per key: 1 if held."""
        get = self._checked(namespace_id, keys, key_bytes).blobs.get
        return bytes(
            (record := get(key)) is not None and record.held for key in _split(keys, key_bytes)
        )

    def drop(self, namespace_id: bytes, keys: bytes, key_bytes: int, tier: str = "") -> int:
        """Free the blobs and all that continue them (those under a lease when it ends).

        With `tier` "dram", only DRAM copies of blobs that are on SSD too. How
        many blobs it took effect on.
        """
        blobs = self._checked(namespace_id, keys, key_bytes).blobs
        if tier not in ("", "dram"):
            raise InvalidRequest(f"unknown tier {tier!r}: use dram, or none for all")
        named = [record for key in _split(keys, key_bytes) if (record := blobs.get(key))]
        if tier:
            return sum(self.residency.demote(record) for record in reversed(named))
        dropped = 0
        for record in named:
            if not record.gone:
                dropped += self._drop_subtree(record)
        return dropped

    def pin(self, namespace_id: bytes, keys: bytes, key_bytes: int, ttl_s: float) -> int:
        """Keep the blobs that are held from eviction for `ttl_s`; 0 ends it. How many."""
        blobs = self._checked(namespace_id, keys, key_bytes).blobs
        found = [r for key in _split(keys, key_bytes) if (r := blobs.get(key)) and r.held]
        for record in found:
            if ttl_s > 0:
                if record not in self._pinned_until:
                    self.residency.pin(record)
                self._pinned_until[record] = self._clock() + ttl_s
            elif self._pinned_until.pop(record, None) is not None:
                self.residency.unpin(record, used=False)
        return len(found)

    def prefetch(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> int:
        """Start to bring the leading blobs into DRAM; how many are on their way."""
        state = self._checked(namespace_id, keys, key_bytes)
        return self._readers.prefetch(state, keys, key_bytes)

    def stat(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> list[dict[str, Any]]:
        """Facts about each blob, for people; {} where nothing is known."""
        blobs = self._checked(namespace_id, keys, key_bytes).blobs
        now_s = self._clock()
        return [
            listing.blob_facts(record, now_s) if (record := blobs.get(key)) is not None else {}
            for key in _split(keys, key_bytes)
        ]

    def list_namespaces(
        self, after: bytes = b"", limit: int = NAMESPACES_MAX
    ) -> list[dict[str, Any]]:
        """Facts about declared namespaces, by ascending id from the one after `after` on.

        Costs 2 µs for each that is returned.
        """
        return listing.namespaces(self.index, after, limit)

    def list_blobs(
        self, namespace_id: bytes, after: bytes, limit: int
    ) -> tuple[list[dict[str, Any]], bytes]:
        """A page of facts as of `stat`, by ascending key from the one after `after` on.

        With it comes the `after` of the next page, b"" if this is the last. `limit` is 1 to
        1,000; a page costs 2 µs for each blob on it, however many are held.
        """
        return listing.blobs(self.state(namespace_id), after, limit, self._clock())

    async def verify(self, timeout_s: float) -> dict[str, Any]:
        """Read every blob back and check its digests; a report."""
        return await self._scrub.run(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, as plain values."""
        records = self.index.count()
        tiers = {"dram": self._dram_gauges()}
        if self._ssd is not None:
            tiers["ssd"] = self._ssd_gauges(self._ssd)
        return {
            "boot_id": self.boot_id,
            "uptime_s": self._clock() - self._started_s,
            "blobs": records,
            "namespaces": len(self.index.namespaces),
            "holes": self.index.n_holes,
            "clients": len(self._holders),
            "leases": self._readers.count,
            "reservations": self._writers.count,
            "waiting_for_room": self.residency.waiting,
            "pinned_bytes": self.residency.pinned_bytes,
            "lent_bytes": sum(holder.lent_bytes for holder in self._holders.values()),
            "tiers": tiers,
            "counters": self.counters.as_dict(),
        }

    def _dram_gauges(self) -> dict[str, Any]:
        dram = self._dram
        return {
            "capacity_bytes": dram.capacity_bytes,
            "used_bytes": dram.used_bytes,
            "free_bytes": dram.free_bytes,
            "staging_bytes": dram.staging_bytes,
            "blobs": dram.n_extents,
            "largest_free_bytes": dram.largest_free_bytes,
            "fragmentation": dram.fragmentation,
            "huge_pages": self.settings.huge_pages,
        }

    def _ssd_gauges(self, ssd: SsdTier) -> dict[str, Any]:
        dirty_bytes = self._writeback.dirty_bytes if self._writeback is not None else 0
        return {
            "capacity_bytes": ssd.capacity_bytes,
            "used_bytes": ssd.used_bytes,
            "free_bytes": ssd.free_bytes,
            "dirty_bytes": dirty_bytes,
            **ssd.stats(),
        }

    def tick(self) -> None:
        """What is due by the clock: expiries and maintenance."""
        self._writers.expire()
        now_s = self._clock()
        for record in [r for r, until_s in self._pinned_until.items() if until_s <= now_s]:
            del self._pinned_until[record]
            self.residency.unpin(record, used=False)
        if self._writeback is not None:
            self._writeback.retry()
        if now_s >= self._maintain_at_s:
            self._maintain_at_s = now_s + MAINTAIN_S
            if self._ssd is not None and self._writeback is not None:
                self._writeback.persist_uses()
                work = asyncio.get_running_loop().run_in_executor
                work(self._write_pool, self._ssd.maintain).add_done_callback(_log_fault)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:  # expiries must go on, whatever one of them met
                log.exception("what was due by the clock failed")

    def _adopt(self) -> None:
        """Know what is on SSD."""
        if self._ssd is not None and self._writeback is not None:
            adopt_rows(self._ssd, self.index, self._wall_clock() - self._clock())
            for record in self.index.records():
                if not record.has_children:
                    self._writeback.settle(record)

    def _checked(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> NamespaceState:
        state = self.index.namespaces.get(namespace_id)
        if state is None:
            state = self.index.namespace(namespace_id)  # raises
        if key_bytes not in KEY_BYTES or len(keys) % key_bytes or not keys:
            raise InvalidRequest(
                f"{len(keys)} bytes are not one or more keys of {key_bytes} bytes (8 to 64 each)"
            )
        if len(keys) > KEYS_MAX * key_bytes:
            raise InvalidRequest(f"{len(keys) // key_bytes} keys in a call that takes {KEYS_MAX}")
        return state

    def _drop_subtree(self, top: Record) -> int:
        subtree = self.index.subtree(top)
        above = None
        for record in reversed(subtree):
            if self._pinned_until.pop(record, None) is not None:
                self.residency.unpin(record, used=False)
            if self._writeback is not None:
                self._writeback.remove(record)
            if not record.gone:  # a hole left bare goes with its last child
                above = self.index.discard(record)
            self.residency.settle(record)
        if above is not None:
            self.residency.settle(above)
        return len(subtree)

    def _quarantine(self, record: Record) -> None:
        """The copy on SSD fails its digest: it is removed, and the blob if it was the last copy."""
        if self._writeback is None or record.gone:
            return
        self.counters.corrupt += 1
        if record.packed or record.has_children:
            self._writeback.hollow(record)
        else:
            self._writeback.remove(record)
        if record.packed:
            self._writeback.save(record)
            self.residency.settle(record)
        else:
            self._lose(record)

    def _quarantine_dram(self, record: Record) -> None:
        """The copy in DRAM fails its digest: nobody gets it any more."""
        self.counters.corrupt += 1
        self.residency.hide(record)
        if record.ssd is False and not record.gone:
            self._lose(record)
        else:
            self.residency.settle(record)

    def _lose(self, record: Record) -> None:
        """No copy is left."""
        above = self.index.lose(record)
        self.residency.settle(record)
        if above is not None:
            self.residency.settle(above)


def _log_fault(maintenance: asyncio.Future[None]) -> None:
    if not maintenance.cancelled() and (fault := maintenance.exception()) is not None:
        log.error("maintenance of the ssd failed", exc_info=fault)


def _make_arena(settings: StoreSettings) -> Arena:
    arena = Arena.create(
        settings.dram_bytes,
        directory=settings.arena_directory,
        huge_pages=settings.huge_pages,
        scratch_bytes=settings.scratch_bytes,
    )
    try:
        arena.populate()
    except BaseException:
        arena.close()
        raise
    return arena


def _split(keys: bytes, key_bytes: int) -> list[bytes]:
    return [keys[start : start + key_bytes] for start in range(0, len(keys), key_bytes)]
