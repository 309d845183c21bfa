"""Reading blobs: leases on what is in DRAM, loads for what is on SSD, waits for what is written.

A lease gives the leading blobs of a chain, exactly as many as are readable, and
pins as few records as hold them all (a leaf holds its ancestors). Used on the
event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from blobstore.chains import Chains
from blobstore.counters import Counters
from blobstore.errors import Busy, InvalidRequest
from blobstore.fill import Fill
from blobstore.hint import Hint
from blobstore.holder import Holder, Lease
from blobstore.index import Index, NamespaceState, Record
from blobstore.loader import Loader
from blobstore.named_keys import split
from blobstore.recall import Recall, Recalled
from blobstore.residency import Residency
from blobstore.uses import Uses

CHAINS_OF_A_GET_MAX = 64
"""Of which a use is noted, where keys were put as roots of their own."""

RECALLS_MAX = 2
"""Of one get: what proves damaged when it is loaded is rebuilt in a second attempt."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a get gave: `extents` packed, the tier each blob came from, why it ends there."""

    lease_id: int
    extents: bytes
    reason: str
    served: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A get that cannot be answered at once."""

    holder: Holder
    ns: NamespaceState
    keys: bytes
    key_bytes: int
    deadline_s: float
    stream: bool
    follow: bool
    """Blobs that are being written count as held."""
    hint: Hint | None
    job: int
    """The rebuild that a runner reads for: that is no use, and no hit."""

    def chain(self) -> list[bytes]:
        """The keys one by one."""
        return split(self.keys, self.key_bytes)


class Readers:
    """All leases of the store."""

    def __init__(
        self,
        index: Index,
        residency: Residency,
        loader: Loader | None,
        counters: Counters,
        uses: Uses,
        clock: Callable[[], float],
        leases_per_holder_max: int,
        recall: Recall,
    ) -> None:
        self._index = index
        self._residency = residency
        self._loader = loader
        self._counters = counters
        self._uses = uses
        self._clock = clock
        self._leases_per_holder_max = leases_per_holder_max
        self._recall = recall
        self._chains = Chains(lambda: residency.departures)
        self._next_id = 1
        self.count = 0

    def get(
        self,
        holder: Holder,
        ns: NamespaceState,
        keys: bytes,
        key_bytes: int,
        *,
        timeout_s: float,
        stream: bool = False,
        wait_for_writers: bool = False,
        hint: Hint | None = None,
        job: int = 0,
    ) -> Found | Awaitable[Found]:
        """Lease the leading blobs: at once if all are in DRAM, else once they are or time is up.

        With `stream` the answer comes when room is reserved; follow it by `wait`. For the
        runner that works on a `job` nothing is rebuilt.
        """
        if len(holder.leases) >= self._leases_per_holder_max:
            raise Busy(f"this client holds {len(holder.leases)} leases, the most it may")
        self._counters.gets += not job
        leaf = ns.blobs.get(keys[-key_bytes:])
        if leaf is not None and leaf.packed:
            n = len(keys) // key_bytes
            extents = self._chains.extents(leaf, keys, n)
            if extents is not None:
                if not job:
                    self._note_warm(leaf, n, hint)
                lease_id = self._lease(holder, [leaf], [])
                self._residency.pin(leaf)
                return Found(lease_id, extents, "", {"dram": n})
        deadline_s = self._clock() + timeout_s
        asked = _Asked(holder, ns, keys, key_bytes, deadline_s, stream, wait_for_writers, hint, job)
        return self._get_slowly(asked)

    async def wait(
        self, holder: Holder, lease_id: int, index: int, start: int, end: int, timeout_s: float
    ) -> str:
        """Wait until bytes of blob `index` of a lease are readable ("") or why they are not."""
        lease = holder.leases.get(lease_id)
        if lease is None:
            raise InvalidRequest(f"lease {lease_id} is unknown, or was released")
        if not lease.items:
            return ""
        if not 0 <= index < len(lease.items):
            raise InvalidRequest(f"blob {index} of a lease of {len(lease.items)}")
        record = lease.items[index]
        if record.packed:
            return ""
        fill = record.fill
        if fill is None:
            return "gone" if record.gone else "failed"
        why = await _within(fill.wait(start, end), timeout_s)
        return "" if fill.is_ready(start, end) else fill.failure or why

    def release(self, holder: Holder, lease_ids: Sequence[int]) -> int:
        """End leases; unknown ones are ignored. How many were ended."""
        ended = 0
        for lease_id in lease_ids:
            lease = holder.leases.pop(lease_id, None)
            if lease is not None:
                ended += 1
                self.count -= 1
                for record in lease.pins:
                    self._residency.unpin(record)
        return ended

    def prefetch(self, ns: NamespaceState, keys: bytes, key_bytes: int) -> int:
        """Start to load leading blobs that are on SSD alone; how many are on their way."""
        items = self._items(ns, keys, key_bytes, wait_for_writers=False)
        for record in items:
            self._residency.pin(record)
        started = 0
        if self._loader is not None:
            started = self._loader.begin_ahead(
                filter(_is_cold, items), lambda record: self._let_go(items, items.index(record))
            )
        for record in items:
            self._residency.unpin(record)
        return started

    async def _get_slowly(self, asked: _Asked) -> Found:
        """Once what a runner should make has come back, and what is on SSD, or will not."""
        recalled: list[Recalled] = []
        try:
            while not asked.job and self._recall.possible(asked.ns):
                recalled.append(
                    await self._recall.bring(
                        asked.ns, asked.chain(), asked.deadline_s, follow=asked.follow
                    )
                )
                found = await self._give(asked, recalled, again=len(recalled) < RECALLS_MAX)
                if found is not None:
                    return found
                recalled[-1].wanted.release()  # what was damaged is mended only if nobody holds it
            found = await self._give(asked, recalled, again=False)
            assert found is not None
            return found
        finally:
            for each in recalled:
                each.wanted.release()

    async def _give(
        self, asked: _Asked, recalled: Sequence[Recalled], *, again: bool
    ) -> Found | None:
        """A lease on what is or becomes readable of what is held now.

        None, if `again` is allowed and a copy on SSD turned out bad: it may be rebuilt.
        """
        ns, n_asked = asked.ns, len(asked.keys) // asked.key_bytes
        items = self._items(ns, asked.keys, asked.key_bytes, wait_for_writers=asked.follow)
        reason = (recalled[-1].why if recalled else "") or "absent"
        if self._recall.never_loads(ns) and any(map(_is_cold, items)):
            items, reason = list(takewhile(lambda record: not record.cold, items)), "not_loaded"
        origins = [_came_from(record, recalled) or _origin(record) for record in items]
        used_s = [_last_use(record) for record in items]  # loads touch them
        n_held = len(items)
        reason = "" if n_held == n_asked else reason
        for record in items:  # nothing of the chain may be evicted while it is put together
            self._residency.pin(record)
        try:
            await self._begin_loads(items, asked.stream, asked.deadline_s)
            n, why = await self._readable(items, asked.stream, asked.follow, asked.deadline_s)
            if n < n_held:
                reason = why or "no_room"
            if reason == "corrupt" and again:
                return None
            leading, origins = items[:n], origins[:n]
            if not asked.job:
                self._count(leading, origins, n_asked - n, reason)
                last = asked.keys[-asked.key_bytes :] if n < n_asked else b""
                self._note_use(leading, used_s, n_asked, asked.hint, last)
            unsealed = any(not record.packed for record in leading)
            pins = list(leading) if unsealed else _pins(leading)
            for record in pins:
                self._residency.pin(record)
            lease_id = self._lease(asked.holder, pins, leading if unsealed else []) if n else 0
            return Found(lease_id, _extents(leading), reason, dict(Counter(origins)))
        finally:
            for record in items:
                self._residency.unpin(record)

    def _note_warm(self, leaf: Record, n: int, hint: Hint | None) -> None:
        """Count a chain of `n` blobs that is in DRAM, and note its use."""
        ns, before = leaf.ns, n - 1  # only the last of a chain may be partial
        self._count_hits(
            "dram",
            n,
            before * ns.full_bytes + leaf.nbytes,
            before * ns.namespace.tokens_per_blob + leaf.tokens,
        )
        self._uses.got(leaf, n, n, hint)

    def _note_use(
        self,
        leading: Sequence[Record],
        used_s: Sequence[float | None],
        n_asked: int,
        hint: Hint | None,
        asked: bytes,
    ) -> None:
        """Note a use of each chain that `leading` is made of: mostly one."""
        ends = _pins(leading)[-CHAINS_OF_A_GET_MAX:]
        before = dict(zip(leading, used_s, strict=False))
        for end in ends[:-1]:
            self._uses.got(end, end.depth, end.depth, hint, before[end])
        if ends:
            self._uses.got(ends[-1], len(leading), n_asked, hint, before[ends[-1]], asked)

    def _items(
        self, ns: NamespaceState, keys: bytes, key_bytes: int, *, wait_for_writers: bool
    ) -> list[Record]:
        """The leading blobs that are held, or (if waited for) being written."""
        items: list[Record] = []
        for start in range(0, len(keys), key_bytes):
            key = keys[start : start + key_bytes]
            record = ns.blobs.get(key)
            if record is None or record.hole:
                drafts = ns.drafts.get(key) if wait_for_writers else None
                if not drafts:
                    break
                record = drafts[0]
            elif record.dram is not None and record.packed == b"" and record.fill is None:
                self._residency.reclaim(record)  # of a load that failed, or put aside
            items.append(record)
        return items

    async def _begin_loads(self, items: list[Record], stream: bool, deadline_s: float) -> None:
        """Start the loads, waiting for room that is on its way; what finds none is cut off."""
        if self._loader is None or not any(map(_is_cold, items)):
            return

        def attempt() -> bool:
            return self._begin_all(items, stream=stream) or not self._residency.expects_room

        if self._residency.could_hold(items):
            with suppress(Busy):
                await self._residency.wait_to_load(attempt, deadline_s)
        while True:
            self._begin(items, stream=stream)
            waits = self._residency.wiping_bytes and self._clock() < deadline_s
            if not waits or not any(map(_is_cold, items)):
                return
            await self._residency.wiped()

    def _begin_all(self, items: Sequence[Record], *, stream: bool) -> bool:
        """Start to load what is on SSD alone, as far as there is room; whether all found some."""
        assert self._loader is not None
        cold = [record for record in items if _is_cold(record)]
        return not cold or self._loader.begin(cold, stream=stream) == len(cold)

    def _begin(self, items: list[Record], *, stream: bool) -> None:
        """Start to load what is on SSD alone, as far as there is room.

        `items` are pinned. If room is short they are cut and unpinned from the end, so
        that a chain's end does not keep its head out.
        """
        while self._loader is not None:
            cold = [record for record in items if _is_cold(record)]
            n = self._loader.begin(cold, stream=stream) if cold else 0
            if n == len(cold) or self._residency.wiping_bytes:
                break
            if not self._let_go(items, items.index(cold[n])):
                break

    def _let_go(self, items: list[Record], short: int) -> bool:
        """Cut off the end of `items` that holds as much as is missing from `short` on; if any."""
        missing = sum(record.nbytes for record in items[short:] if _is_cold(record))
        n, freed = len(items), 0
        while n > short + 1 and freed < missing:
            n -= 1
            if _is_cold(items[n]):
                missing -= items[n].nbytes
            elif items[n].packed:
                freed += items[n].nbytes
        if not freed:
            return False
        for record in items[n:]:
            self._residency.unpin(record, used=False)
        del items[n:]
        return True

    async def _readable(
        self, items: list[Record], stream: bool, follow: bool, deadline_s: float
    ) -> tuple[int, str]:
        """How many leading items a lease may give, and why no more.

        Items that were replaced while they were waited for are exchanged in place.
        """
        fills = [record.fill for record in items]  # they tell why even when all is over
        for n, fill in enumerate(fills):
            why = await self._wait_for(items, n, fill, stream, follow, deadline_s)
            if why:
                return n, why
        return len(items), ""

    async def _wait_for(
        self,
        items: list[Record],
        n: int,
        fill: Fill | None,
        stream: bool,
        follow: bool,
        deadline_s: float,
    ) -> str:
        """Wait until a lease may give item `n`: "", or why it may not."""
        while not (record := items[n]).packed:
            if fill is not None and not fill.ended:
                if stream:
                    return ""
                late = await _within(fill.wait_end(), deadline_s - self._clock())
                if late:
                    return late
                continue
            heir = _heir(record, follow) if record.gone else None
            if heir is None:
                return (fill.failure if fill is not None else "") or _why_not(record)
            self._residency.pin(heir)
            items[n], fill = heir, heir.fill
            self._residency.unpin(record)
        return ""

    def _lease(self, holder: Holder, pins: list[Record], items: list[Record]) -> int:
        lease_id = self._next_id
        self._next_id += 1
        holder.leases[lease_id] = Lease(lease_id, pins, items)
        self.count += 1
        return lease_id

    def _count(
        self, given: Sequence[Record], origins: Sequence[str], n_missed: int, reason: str
    ) -> None:
        for tier in set(origins):
            of_tier = [r for r, origin in zip(given, origins, strict=True) if origin == tier]
            nbytes, tokens = sum(r.nbytes for r in of_tier), sum(r.tokens for r in of_tier)
            self._count_hits(tier, len(of_tier), nbytes, tokens)
        if reason:
            self._counters.missed_blobs[reason] += n_missed

    def _count_hits(self, tier: str, n: int, nbytes: int, tokens: int) -> None:
        counters = self._counters
        counters.hit_blobs[tier] += n
        counters.hit_bytes[tier] += nbytes
        counters.hit_tokens[tier] += tokens


def _origin(record: Record) -> str:
    if record.packed:
        return "dram"
    return "ssd" if record.ssd is not False else "writer"


def _came_from(record: Record, recalled: Sequence[Recalled]) -> str:
    """Where it was before it was brought back for this get; "" if it was not."""
    tiers = (each.wanted.origin(record.key) for each in reversed(recalled))
    return next(filter(None, tiers), "")


def _last_use(record: Record) -> float | None:
    """None of what is being written: its use is to be put."""
    return None if _origin(record) == "writer" else record.last_used


def _is_cold(record: Record) -> bool:
    return record.cold


def _why_not(record: Record) -> str:
    if record.gone:
        return "gone"
    if record.ssd is False:
        return "failed"
    return "no_room" if record.dram is None else "busy"


def _heir(record: Record, follow: bool) -> Record | None:
    """What is readable now under the key of a draft or blob that is gone, or may become so."""
    held = record.ns.blobs.get(record.key)
    if held is not None and held.packed:
        return held
    drafts = record.ns.drafts.get(record.key) if follow else None
    return drafts[0] if drafts else None


def _pins(items: Sequence[Record]) -> list[Record]:
    """The records that hold all of `items`: those which the next one does not continue."""
    inner = [before for before, record in pairwise(items) if record.parent is not before]
    return [*inner, *items[-1:]]


def _extents(items: Sequence[Record]) -> bytes:
    return b"".join(record.extent_bytes() for record in items)


async def _within(work: Coroutine[Any, Any, object], remaining_s: float) -> str:
    """Await `work` for at most `remaining_s`: "" or "deadline"."""
    try:
        await asyncio.wait_for(work, max(remaining_s, 0.0))
    except TimeoutError:
        return "deadline"
    return ""
