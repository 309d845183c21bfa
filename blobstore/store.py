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
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

from blobstore import gauges, listing
from blobstore.adoption import adopt_rows
from blobstore.client_pins import ClientPins
from blobstore.contexts import Contexts
from blobstore.counters import Counters
from blobstore.divergence import Divergences
from blobstore.drafts import Drafts
from blobstore.errors import BlobStoreError, Busy, InvalidRequest
from blobstore.estimates import Estimates
from blobstore.explanation import explained, leaving_next
from blobstore.hint import Hint
from blobstore.holder import Holder
from blobstore.index import Index, NamespaceState, Record
from blobstore.loader import Loader
from blobstore.losses import Losses
from blobstore.named_keys import checked, split
from blobstore.namespace import Namespace
from blobstore.pools import HASH_LANES, Pools
from blobstore.readers import Found, Readers
from blobstore.rebuilds import Rebuilds
from blobstore.recall import Recall
from blobstore.residency import WAITERS_MAX, Residency
from blobstore.scrub import Scrub
from blobstore.sealing import Sealing
from blobstore.sessions import Sessions
from blobstore.settings import StoreSettings
from blobstore.stories import Stories
from blobstore.superseded import Superseded
from blobstore.terms import Terms
from blobstore.text_calls import TextCalls
from blobstore.texts import Texts
from blobstore.tiering.arena import Arena
from blobstore.tiering.disk import Disk
from blobstore.tiering.dram import DramTier
from blobstore.tiering.ssd import SsdTier
from blobstore.tiers import arena_of, plan_of
from blobstore.turns import Turns
from blobstore.uses import Uses
from blobstore.writeback import Writeback
from blobstore.writers import Writers

log = logging.getLogger(__name__)

TICK_S = 0.5
MAINTAIN_S = 60.0
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
        texts: Texts,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        threads: Callable[[int, str], Executor],
    ) -> None:
        self.settings = settings
        self.arena = arena
        self.texts = texts
        self.boot_id = secrets.randbits(63) | 1
        self.counters = Counters(clock=clock)
        self.stories = Stories(clock)
        self.sessions = Sessions()
        self.index = Index()
        self._clock = clock
        self._wall_clock = wall_clock
        self._ssd = ssd
        self._dram = DramTier(arena, staging_bytes=settings.staging_quota_bytes)
        self._pools = pools = Pools.of(threads, settings.io_threads)
        self.plan = plan_of(settings, self._dram, ssd)
        self.index.on_discarded = self._forget
        self.uses = Uses(
            self.plan.use, self.sessions, self.counters.ages.reused, clock,
            asyncio.get_running_loop().call_later,
        )  # fmt: skip
        self._order_tiers()
        self.pins = ClientPins(self.residency, clock)
        self.losses = Losses(self.index, self.residency, self.counters, self.pins)
        self.estimates = Estimates()
        self.rebuilds = Rebuilds(
            self.index, self.residency, texts, self.estimates, clock,
            jobs_max=settings.rebuild.jobs_max,
        )  # fmt: skip
        self._loader: Loader | None = None
        self._writeback: Writeback | None = None
        if ssd is not None:
            self._connect(ssd)
        drafts = Drafts(self.residency, clock, settings.reservation_ttl_s)
        self._recall_from(texts, drafts)
        self._readers = Readers(
            self.index, self.residency, self._loader, self.counters, self.uses, clock,
            settings.max_leases_per_client, self.recall,
        )  # fmt: skip
        self.contexts = Contexts(
            self.index, self.sessions, self.superseded, self.uses, self._readers, self.recall,
            texts,
        )  # fmt: skip
        self._sealing = Sealing(
            self.index, self.residency, drafts, self._writeback, arena.view, pools.hash,
            HASH_LANES, clock, self.stories, self.counters, self.divergences,
        )  # fmt: skip
        self._sealing.on_diverged = self.text_calls.diverged
        self._sealing.on_shown = self.recall.shown
        self._writers = Writers(
            self.residency, drafts, self._sealing, self._writeback, self.counters, self.uses, clock,
            settings.lent_quota_bytes, self.rebuilds, texts,
        )  # fmt: skip
        self._scrub = Scrub(
            ssd, arena.view, self.index, self.residency, self.losses.quarantine,
            self.losses.quarantine_dram, pools.read, clock,
        )  # fmt: skip
        self._holders: dict[object, Holder] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._maintain_at_s = clock() + MAINTAIN_S
        self._started_s = clock()

    def _order_tiers(self) -> None:
        """Let the plan say who leaves which tier, but for contexts that were replaced."""
        self.superseded = Superseded(
            self.index, self.sessions, self._clock, self.settings.tiering.supersede_grace_s
        )
        self.uses.on_got = self.superseded.used
        self._orders = [self.superseded.first_out(self.plan.dram)]
        if self.plan.ssd is not None:
            self._orders.append(self.superseded.first_out_of_ssd(self.plan.ssd))
        self.residency = Residency(
            self._dram, self._orders[0], self.index, self.counters, self._pools.hash, self._clock,
            self.stories,
        )  # fmt: skip
        self.residency.is_superseded = self.superseded.goes_first
        self.superseded.on_marked = self.residency.settle

    def _connect(self, ssd: SsdTier) -> None:
        """Let blobs move between DRAM and `ssd`."""
        settings, pools, clock = self.settings, self._pools, self._clock
        self._writeback = writeback = Writeback(
            ssd, self.arena.view, self.residency, self.index, self._orders[1], self.counters,
            pools.write, pools.sync, pools.commit, pools.trim, settings.io_threads,
            self.losses.quarantine_dram, clock, self._wall_offset_s,
            stories=self.stories, admission=self.plan.admission, settings=settings.tiering,
        )  # fmt: skip
        self._loader = Loader(
            ssd, self.arena.view, self.residency, self.counters, pools.read, settings.io_threads,
            self.losses.quarantine, writeback.save, clock,
            stories=self.stories, estimate=self.estimates.fetch,
            promote_rate=settings.tiering.promote_rate, fetch_rate=settings.tiering.fetch_rate,
        )  # fmt: skip
        self.losses.writeback = writeback
        self.residency.dirty_bytes = lambda: writeback.dirty_bytes
        self.residency.on_settled = writeback.settle
        writeback.superseded_bytes = lambda: self.superseded.ssd_bytes
        self.residency.on_used = writeback.note_use

    def _recall_from(self, texts: Texts, drafts: Drafts) -> None:
        """Let blobs come back from what is known of their tokens."""
        self.recall = Recall(self.residency, self._loader, texts, self.rebuilds, self._clock)
        self.text_calls = TextCalls(
            self.index, texts, self.losses, self.recall, self.rebuilds, drafts,
            self._pools.hash,
        )  # fmt: skip
        self.divergences = Divergences(
            self.text_calls.divergence, self.counters, self.stories, self._clock
        )

    def _wall_offset_s(self) -> float:
        """The wall clock's reading less that of the store's clock."""
        return self._wall_clock() - self._clock()

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
            arena = await loop.run_in_executor(None, lambda: arena_of(settings))
            undo.callback(arena.close)
            texts = await Texts.open(
                settings.rebuild, settings.data_dir if ssd is not None else None,
                threads=threads, clock=clock, wall_clock=wall_clock,
            )  # fmt: skip
            try:
                store = cls(settings, arena, ssd, texts, clock, wall_clock, threads)
                if ssd is not None:
                    offset_s = store._wall_offset_s()
                    load = partial(store.sessions.load, settings.data_dir, clock(), offset_s)
                    await loop.run_in_executor(None, load)
                    await loop.run_in_executor(None, store.superseded.load, settings.data_dir)
                store._adopt()
            except BaseException:
                await texts.close()
                raise
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
        await self.residency.close()
        await self.recall.close()
        self.rebuilds.close()
        await self.texts.close()
        loop = asyncio.get_running_loop()
        self.uses.close()
        for work in (*self._unsaved(), self.plan.close):
            await loop.run_in_executor(None, work)
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

    async def declare(self, encoded: bytes, terms: Terms | None = None) -> bytes:
        """Declare a namespace by its canonical encoding; its id. `terms` change what holds for it.

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
                    await work(self._pools.write, self._ssd.declare, namespace.id, encoded)
                except BlobStoreError as error:
                    log.warning("a namespace is not on disk yet: %s", str(error))
        if terms is not None:
            await self.texts.tell(self.index.namespace(namespace.id), terms)
        return namespace.id

    def match(
        self, namespace_id: bytes, keys: bytes, key_bytes: int, *, hint: Hint | None = None
    ) -> tuple[int, int, float]:
        """Leading blobs held, how many of them in DRAM, seconds to have them all there."""
        state = checked(self.index, namespace_id, keys, key_bytes)
        self.counters.matches += 1
        n = self.index.leading(state, keys, key_bytes)
        warm = self.index.warm(state, keys, key_bytes, n)
        eta_s = 0.0
        if warm < n and self._loader is not None:
            eta_s = self._loader.estimate_s((n - warm) * state.full_bytes)
        n_missed = len(keys) // key_bytes - n
        if n and (n_missed or hint is not None):
            leaf = state.blobs[keys[(n - 1) * key_bytes : n * key_bytes]]
            self.uses.matched(leaf, n_missed, hint, keys[-key_bytes:])
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
        hint: Hint | None = None,
        job: int = 0,
    ) -> Found | Awaitable[Found]:
        """Lease the leading blobs (see Readers.get)."""
        state = checked(self.index, namespace_id, keys, key_bytes)
        return self._readers.get(
            holder, state, keys, key_bytes,
            timeout_s=timeout_s, stream=stream, wait_for_writers=wait_for_writers, hint=hint,
            job=job,
        )  # fmt: skip

    @property
    def readers(self) -> Readers:
        """Leases."""
        return self._readers

    @property
    def writers(self) -> Writers:
        """Reservations."""
        return self._writers

    @property
    def holders(self) -> Collection[Holder]:
        """The processes that are attached."""
        return self._holders.values()

    def state(self, namespace_id: bytes) -> NamespaceState:
        """The declared namespace with this id; UnknownNamespace otherwise."""
        return self.index.namespace(namespace_id)

    def split(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> list[bytes]:
        """The packed keys one by one, checked."""
        checked(self.index, namespace_id, keys, key_bytes)
        return split(keys, key_bytes)

    def exists(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> bytes:
        """One byte per key: 1 if held."""
        get = checked(self.index, namespace_id, keys, key_bytes).blobs.get
        return bytes(
            (record := get(key)) is not None and record.held for key in split(keys, key_bytes)
        )

    def drop(self, namespace_id: bytes, keys: bytes, key_bytes: int, tier: str = "") -> int:
        """Free the blobs and all that continue them (those under a lease when it ends).

        With `tier` "dram", only DRAM copies of blobs that are on SSD too; those that wait in
        DRAM to be written there are written now, and leave when they are named again. How many
        blobs it took effect on.
        """
        blobs = checked(self.index, namespace_id, keys, key_bytes).blobs
        if tier not in ("", "dram"):
            raise InvalidRequest(f"unknown tier {tier!r}: use dram, or none for all")
        named = [record for key in split(keys, key_bytes) if (record := blobs.get(key))]
        if tier:
            return sum(self.residency.demote(record) for record in reversed(named))
        dropped = 0
        for record in named:
            if not record.gone:
                dropped += self.losses.drop(record)
        return dropped

    def pin(self, namespace_id: bytes, keys: bytes, key_bytes: int, ttl_s: float) -> int:
        """Keep the blobs that are held from eviction for `ttl_s`; 0 ends it. How many."""
        blobs = checked(self.index, namespace_id, keys, key_bytes).blobs
        found = [r for key in split(keys, key_bytes) if (r := blobs.get(key)) and r.held]
        for record in found:
            if ttl_s > 0:
                self.pins.pin(record, ttl_s)
            else:
                self.pins.unpin(record)
        return len(found)

    def prefetch(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> int:
        """Start to bring the leading blobs into DRAM; how many are on their way."""
        state = checked(self.index, namespace_id, keys, key_bytes)
        return self.contexts.prefetch_keys(state, keys, key_bytes)

    def stat(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> list[dict[str, Any]]:
        """Facts about each blob, for people; {} where nothing is known."""
        blobs = checked(self.index, namespace_id, keys, key_bytes).blobs
        now_s = self._clock()
        return [
            listing.blob_facts(record, now_s) if (record := blobs.get(key)) is not None else {}
            for key in split(keys, key_bytes)
        ]

    def explain(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> list[dict[str, Any]]:
        """Why each blob is where it is, for people; {} where nothing is known."""
        blobs = checked(self.index, namespace_id, keys, key_bytes).blobs
        now_s = self._clock()
        self.uses.drain()
        leaving = leaving_next(*self._orders)
        answers = []
        for key in split(keys, key_bytes):
            record = blobs.get(key)
            session = self.sessions.facts_of(record, now_s) if record is not None else {}
            standing = self._writeback.mover.standing(record) if record and self._writeback else {}
            if record is not None:
                standing |= self.superseded.standing(record)
            pinned_s = self.pins.left_s(record) if record is not None else None
            answers.append(
                explained(
                    namespace_id, key, record, now_s, self.stories, self.plan, leaving, session,
                    standing, pinned_s,
                )
            )  # fmt: skip
        return answers

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
        tiers = {"dram": gauges.of_dram(self._dram, self.settings)}
        if self._ssd is not None:
            tiers["ssd"] = gauges.of_ssd(self._ssd, self._writeback)
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
            "pinned_by_clients": {"blobs": len(self.pins), "bytes": self.pins.nbytes},
            "lent_bytes": sum(holder.lent_bytes for holder in self._holders.values()),
            "tiers": tiers,
            "sessions": self.sessions.stats(),
            "superseded": self.superseded.stats(),
            "uses": self.uses.stats(),
            "plan": self.plan.stats(),
            "mover": gauges.of_moves(self._writeback, self._loader),
            "ages": self.counters.ages.as_dict(),
            "texts": self.texts.stats(),
            "rebuild": {
                **self.rebuilds.stats(),
                "estimates": self.estimates.stats(),
                "divergences": self.divergences.stats(),
            },
            "counters": self.counters.as_dict(),
        }

    def tick(self) -> None:
        """What is due by the clock: expiries and maintenance."""
        self._writers.expire()
        self.pins.expire()
        self.texts.tick()
        self.rebuilds.tick()
        now_s = self._clock()
        if self._writeback is not None:
            self._writeback.retry()
        if now_s >= self._maintain_at_s:
            self._maintain_at_s = now_s + MAINTAIN_S
            for saving in self._unsaved():
                asyncio.get_running_loop().run_in_executor(self._pools.write, saving)
            if self._ssd is not None and self._writeback is not None:
                self._writeback.persist_uses()
                work = asyncio.get_running_loop().run_in_executor
                work(self._pools.write, self._ssd.maintain).add_done_callback(_log_fault)
        self.plan.tick(now_s)  # last: it is what the others can do without

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:  # expiries must go on, whatever one of them met
                log.exception("what was due by the clock failed")

    def _unsaved(self) -> Iterator[Callable[[], None]]:
        """Work that saves what is new of contexts; it belongs to what is on SSD."""
        for kept in (self.sessions, self.superseded) if self._ssd is not None else ():
            work = kept.unsaved(self.settings.data_dir, self._wall_offset_s())
            if work is not None:
                yield work

    def _adopt(self) -> None:
        """Know what is on SSD."""
        if self._ssd is not None and self._writeback is not None:
            adopt_rows(self._ssd, self.index, self._wall_offset_s())
            self._writeback.adopt(self.index.records())
            self.superseded.adopt(self._wall_offset_s())

    def _forget(self, record: Record) -> None:
        """It has gone from the index, and so from every order."""
        self.residency.unlist(record)
        self.uses.forget(record)
        self.superseded.forget(record)
        self.sessions.lost(record)
        self.plan.forget(record)


def _log_fault(maintenance: asyncio.Future[None]) -> None:
    if not maintenance.cancelled() and (fault := maintenance.exception()) is not None:
        log.error("maintenance of the ssd failed", exc_info=fault)
