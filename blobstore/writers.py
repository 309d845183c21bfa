"""Writing blobs: reserve, seal, abort, expire.

Room for a batch is lent all or none. Sealing digests the bytes on worker
threads and publishes blobs root side first; only then may anyone see them.
Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from blobstore.counters import Counters
from blobstore.digest import payload_digest, piece_digests
from blobstore.drafts import (
    Draft,
    DraftKey,
    Reservation,
    Slot,
    new_draft,
    seal_parts,
    withdraw_draft,
)
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.holder import Holder
from blobstore.index import Index, NamespaceState, Record, Retention
from blobstore.residency import Residency
from blobstore.writeback import Writeback

INLINE_DIGEST_BYTES = 256 << 10
"""Below this a digest takes less time than handing it to a thread (xxh3: 20 GB/s)."""

SLOTS_MAX = 100_000
"""Keys of one reservation."""

Digests = tuple[bytes, bytes]
"""Piece digests and payload digest."""


class Writers:
    """All reservations of the store."""

    def __init__(
        self,
        index: Index,
        residency: Residency,
        writeback: Writeback | None,
        arena: memoryview,
        counters: Counters,
        pool: Executor,
        lanes: int,
        clock: Callable[[], float],
        ttl_s: float,
        lent_bytes_max: int,
    ) -> None:
        self._index = index
        self._residency = residency
        self._writeback = writeback
        self._arena = arena
        self._counters = counters
        self._pool = pool
        self._lanes = lanes
        self._clock = clock
        self.ttl_s = ttl_s
        self._lent_bytes_max = lent_bytes_max
        self._group_drafts: dict[DraftKey, Draft] = {}
        self._live: dict[int, Reservation] = {}
        self._next_id = 1

    @property
    def count(self) -> int:
        """Reservations that may still be sealed."""
        return len(self._live)

    async def reserve(
        self,
        holder: Holder,
        ns: NamespaceState,
        keys: Sequence[bytes],
        *,
        parent_key: bytes = b"",
        tail_tokens: int = 0,
        retention: Retention = Retention.STANDARD,
        timeout_s: float = 0.0,
        group: tuple[str, int] | None = None,
        parts: tuple[int, ...] = (),
    ) -> Reservation:
        """Lend extents for the keys that are new, all or none, waiting up to `timeout_s` for room.

        Slots that got no extent say why. Raises InvalidRequest for a request
        that contradicts the layout, Busy when too many wait.
        """
        sizes = self._sizes(ns, len(keys), tail_tokens, parts)
        reservation = Reservation(
            self._next_id, holder, ns, None, retention, [], self._clock() + self.ttl_s
        )
        self._next_id += 1
        parent = None
        if parent_key:
            parent = ns.blobs.get(parent_key)
            if parent is None or parent.hole:
                reservation.slots = [Slot(None, None, "orphan") for _ in keys]
                return self._register(reservation)
            self._keep(reservation, parent)
        reservation.parent = parent
        try:
            await self._fill_slots(reservation, keys, sizes, timeout_s, group, parts)
        except BaseException:
            self._let_go(reservation)
            raise
        return self._register(reservation)

    def _sizes(
        self, ns: NamespaceState, n: int, tail_tokens: int, parts: tuple[int, ...]
    ) -> list[tuple[int, int]]:
        """Tokens and bytes of each of `n` blobs."""
        per_blob = ns.namespace.tokens_per_blob
        if not 0 < n <= SLOTS_MAX:
            raise InvalidRequest(f"a reservation takes 1 to {SLOTS_MAX} keys, found {n}")
        if not 0 <= tail_tokens < per_blob:
            raise InvalidRequest(f"tail of {tail_tokens} tokens in blobs of {per_blob}")
        n_parts = len(ns.layout.parts(per_blob))
        if parts and not 0 <= min(parts) <= max(parts) < n_parts:
            raise InvalidRequest(f"parts {min(parts)} to {max(parts)} of a layout of {n_parts}")
        sizes = [(per_blob, ns.nbytes(per_blob))] * n
        if tail_tokens:
            sizes[-1] = (tail_tokens, ns.nbytes(tail_tokens))
        return sizes

    async def _fill_slots(
        self,
        reservation: Reservation,
        keys: Sequence[bytes],
        sizes: Sequence[tuple[int, int]],
        timeout_s: float,
        group: tuple[str, int] | None,
        parts: tuple[int, ...],
    ) -> None:
        ns, previous = reservation.ns, reservation.parent
        fresh: list[Record] = []
        wanted: list[Record | Draft] = []
        for key, (tokens, nbytes) in zip(keys, sizes, strict=True):
            existing = ns.blobs.get(key)
            if existing is not None and not existing.hole:
                self._keep(reservation, existing)
                wanted.append(existing)
                previous = existing
                continue
            draft = self._group_drafts.get((ns.id, key, *group)) if group else None
            if draft is not None:
                wanted.append(draft)
                previous = draft.record
                continue
            record = Record(ns, key, previous, nbytes, tokens)
            record.retention = reservation.retention
            fresh.append(record)
            wanted.append(record)
            previous = record
        reason = await self._room(reservation.holder, fresh, timeout_s)
        known = set(map(id, fresh))
        for item in wanted:
            if isinstance(item, Record) and id(item) not in known:
                reservation.slots.append(Slot(None, item, "exists", parts))
            elif reason:
                reservation.slots.append(Slot(None, None, reason, parts))
            else:
                draft = item if isinstance(item, Draft) else self._draft(item, group)
                self._lend(reservation.holder, draft)
                reservation.slots.append(Slot(draft, None, "", parts))

    async def _room(self, holder: Holder, fresh: Sequence[Record], timeout_s: float) -> str:
        nbytes = sum(record.nbytes for record in fresh)
        if nbytes > self._lent_bytes_max:
            return "too_large"
        if holder.lent_bytes + nbytes > self._lent_bytes_max:
            return "lent_bytes"
        if not fresh:
            return ""
        holder.lent_bytes += nbytes  # counted while waiting, so that waiting cannot exceed the cap
        try:
            return await self._residency.take_or_wait(
                fresh, loading=False, deadline_s=self._clock() + timeout_s
            )
        finally:
            holder.lent_bytes -= nbytes

    def _draft(self, record: Record, group: tuple[str, int] | None) -> Draft:
        if group is None:
            return new_draft(record, None)
        group_key = (record.ns.id, record.key, *group)
        draft = self._group_drafts.get(group_key)
        if draft is not None:  # another rank came while this one waited for room
            self._residency.give_back(record)
            return draft
        draft = self._group_drafts[group_key] = new_draft(record, group_key)
        return draft

    def _register(self, reservation: Reservation) -> Reservation:
        self._live[reservation.reservation_id] = reservation
        reservation.holder.reservations[reservation.reservation_id] = reservation
        return reservation

    def seal_parts(
        self, holder: Holder, reservation_id: int, index: int, parts: Sequence[int]
    ) -> None:
        """Readers who follow the blob in slot `index` may have these parts."""
        slot = self._reservation(holder, reservation_id).slots[index]
        if slot.draft is not None and not slot.draft.dead:
            allowed = slot.parts or range(len(slot.draft.record.ns.layout.parts(1)))
            if any(part not in allowed for part in parts):
                raise InvalidRequest(f"parts {list(parts)} are not this writer's")
            seal_parts(slot.draft, parts)

    async def seal(
        self,
        holder: Holder,
        reservation_id: int,
        digests: Sequence[bytes] = (),
        alive: Sequence[int] = (),
    ) -> tuple[list[str], list[str]]:
        """Digest and publish; results and reasons per slot. Ends the reservation.

        `alive` are slots whose extents the writer may still touch: these are
        published from a copy. A durable blob is on SSD when this returns, or
        its result is "refused" with the error's code (it then stays in DRAM).
        """
        reservation = self._reservation(holder, reservation_id)
        self._forget(reservation)
        complete = self._take_back(reservation, frozenset(alive))
        try:
            records = await self._published_records(complete)
            made = await self._digests([r for r in records if r is not None])
            answers = self._publish_all(reservation, complete, records, made, digests)
        except BaseException:
            for draft in complete:
                self._kill(draft, "io_error")
            raise
        finally:
            self._let_go(reservation)
        if reservation.retention is Retention.DURABLE:
            await self._make_durable(reservation, answers)
        for slot, (result, _) in zip(reservation.slots, answers, strict=True):
            self._counters.put_blobs[result] += 1
            if result == "stored" and slot.draft is not None:
                self._counters.put_bytes += slot.draft.record.nbytes
        return [result for result, _ in answers], [reason for _, reason in answers]

    def abort(self, holder: Holder, reservation_id: int, alive: Sequence[int] = ()) -> None:
        """Give up a reservation: nothing of it becomes visible."""
        reservation = self._reservation(holder, reservation_id)
        self._counters.aborted_reservations += not reservation.expired
        self._forget(reservation)
        self._end(reservation, "aborted")
        self._take_back(reservation, frozenset(alive))

    def expire(self) -> None:
        """End reservations past their time; what they lent stays lent until handed back."""
        now_s = self._clock()
        for reservation in [r for r in self._live.values() if r.expires_s <= now_s]:
            self._counters.expired_reservations += 1
            self.give_up(reservation, "expired")

    def give_up(self, reservation: Reservation, reason: str) -> None:
        """Nothing of it will become visible; its extents stay lent until handed back."""
        if not reservation.expired:
            reservation.expired = True
            del self._live[reservation.reservation_id]
            self._end(reservation, reason)

    def holder_gone(self, holder: Holder) -> None:
        """The process has exited: everything lent to it comes back."""
        for reservation in list(holder.reservations.values()):
            self.give_up(reservation, "writer_gone")
            self._forget(reservation)
            self._take_back(reservation, frozenset())
        self.acknowledge(holder, list(holder.kept))

    def acknowledge(self, holder: Holder, offsets: Sequence[int]) -> int:
        """The holder no longer has views of the extents at `offsets`; how many those were."""
        found = [record for o in offsets if (record := holder.kept.pop(o, None)) is not None]
        for record in found:
            holder.lent_bytes -= record.nbytes
            self._residency.unpin(record)
        return len(found)

    def _reservation(self, holder: Holder, reservation_id: int) -> Reservation:
        reservation = holder.reservations.get(reservation_id)
        if reservation is None:
            raise InvalidRequest(f"reservation {reservation_id} is unknown, or was ended")
        return reservation

    def _forget(self, reservation: Reservation) -> None:
        del reservation.holder.reservations[reservation.reservation_id]
        self._live.pop(reservation.reservation_id, None)

    def _end(self, reservation: Reservation, reason: str) -> None:
        self._let_go(reservation)
        for slot in reservation.slots:
            if slot.draft is not None:
                self._kill(slot.draft, reason)

    def _keep(self, reservation: Reservation, record: Record) -> None:
        self._residency.keep(record)
        reservation.kept.append(record)

    def _let_go(self, reservation: Reservation) -> None:
        kept, reservation.kept = reservation.kept, []
        for record in kept:
            self._residency.unkeep(record)

    def _lend(self, holder: Holder, draft: Draft) -> None:
        if holder not in draft.lenders:
            draft.lenders.add(holder)
            holder.lent_bytes += draft.record.nbytes
            self._residency.pin(draft.record)

    def _take_back(self, reservation: Reservation, alive: frozenset[int]) -> list[Draft]:
        """End the loans of a reservation, but for slots in `alive`; drafts now complete."""
        holder, complete = reservation.holder, []
        for number, slot in enumerate(reservation.slots):
            draft = slot.draft
            if draft is None:
                continue
            record = draft.record
            if not draft.dead:
                seal_parts(draft, slot.parts or tuple(draft.missing))
                draft.copy = draft.copy or number in alive
                if not draft.missing:
                    complete.append(draft)
            if holder in draft.lenders:
                draft.lenders.discard(holder)
                if number in alive and record.nbytes and record.dram is not None:
                    holder.kept[record.dram.offset] = record
                else:
                    holder.lent_bytes -= record.nbytes
                    self._residency.unpin(record)
        return complete

    def _kill(self, draft: Draft, reason: str) -> None:
        """The draft will never be published; its room is free once nobody holds it."""
        if draft.dead:
            return
        self._retire(draft)
        record = draft.record
        record.gone = True
        if record.fill is not None and not record.fill.finished:
            record.fill.fail(reason)
        self._residency.settle(record)
        self._residency.notify()

    def _retire(self, draft: Draft) -> None:
        draft.dead = True
        withdraw_draft(draft.record)
        if draft.group_key is not None:
            self._group_drafts.pop(draft.group_key, None)

    async def _published_records(self, complete: Sequence[Draft]) -> list[Record | None]:
        """For each draft the record to publish: its own, or a copy out of the writer's reach."""
        records: list[Record | None] = []
        for draft in complete:
            own = draft.record
            if not draft.copy and not draft.lenders:
                records.append(own)
                continue
            twin = Record(own.ns, own.key, own.parent, own.nbytes, own.tokens)
            twin.retention = own.retention
            if not self._residency.take([twin], loading=True):
                records.append(None)
                continue
            await asyncio.get_running_loop().run_in_executor(
                self._pool, np.copyto, self._array(twin), self._array(own)
            )
            records.append(twin)
        return records

    async def _digests(self, records: Sequence[Record]) -> dict[Record, Digests]:
        views = [self._view(record) for record in records]
        if sum(view.nbytes for view in views) <= INLINE_DIGEST_BYTES:
            return dict(zip(records, _digest_all(views), strict=True))
        loop = asyncio.get_running_loop()
        shares = [range(lane, len(views), self._lanes) for lane in range(self._lanes)]
        done = await asyncio.gather(
            *(
                loop.run_in_executor(self._pool, _digest_all, [views[i] for i in share])
                for share in shares
                if share
            )
        )
        made = {}
        for share, digests in zip(shares, done, strict=False):
            made.update({records[i]: digest for i, digest in zip(share, digests, strict=True)})
        return made

    def _publish_all(
        self,
        reservation: Reservation,
        complete: Sequence[Draft],
        records: Sequence[Record | None],
        made: dict[Record, Digests],
        digests: Sequence[bytes],
    ) -> list[tuple[str, str]]:
        to_publish = dict(zip(complete, records, strict=True))
        answers: list[tuple[str, str]] = []
        for number, slot in enumerate(reservation.slots):
            if slot.existing is not None:
                given = digests[number] if number < len(digests) else b""
                answers.append(self._compare(slot.existing, given, reservation.retention))
            elif slot.draft is None:
                answers.append(("refused", slot.reason))
            elif slot.draft in to_publish:
                record = to_publish[slot.draft]
                digest = made[record] if record is not None else None
                answers.append(self._publish(slot.draft, record, digest))
            elif slot.draft.dead:
                answers.append(("refused", "expired"))
            else:
                answers.append(("partial", "parts of other ranks are missing"))
        return answers

    def _compare(self, existing: Record, digest: bytes, retention: Retention) -> tuple[str, str]:
        if digest and digest != existing.digest:
            return "divergent", "the key is sealed with other bytes"
        if retention > existing.retention:
            if self._writeback is not None:
                self._writeback.raise_retention(existing, retention)
            else:
                existing.retention = retention
        return "exists", ""

    def _publish(
        self, draft: Draft, record: Record | None, digests: Digests | None
    ) -> tuple[str, str]:
        """Make a complete draft visible under its key, unless another writer was first."""
        if draft.dead:
            return "refused", "expired"
        own = draft.record
        existing = own.ns.blobs.get(own.key)
        answer, shown = ("refused", "full"), None
        if record is not None and digests is not None:
            record.pieces, record.digest = digests
            if existing is not None and not existing.hole:
                answer = self._compare(existing, record.digest, record.retention)
            else:
                answer, shown = self._show(record, existing)
            if own.fill is not None:
                own.fill.finish()  # readers who followed it have every byte
        if shown is own:
            self._retire(draft)
            own.fill = None
        else:
            self._kill(draft, answer[1])
        if shown is not None:
            self._after_publish(shown)
        elif record is not None and record is not own:
            self._residency.give_back(record)
        return answer

    def _show(self, record: Record, hole: Record | None) -> tuple[tuple[str, str], Record | None]:
        """Put sealed bytes into the index: the answer, and the record that now has them."""
        if record.parent is not None:
            parent = record.ns.blobs.get(record.parent.key)
            if parent is None or parent.hole:
                return ("refused", "orphan"), None
            record.parent, record.depth = parent, parent.depth + 1
        record.last_used = self._clock()
        if hole is None:
            self._residency.show(record)
            self._index.add(record)
            return ("stored", ""), record
        if record.pins or hole.dram is not None or record.parent is not hole.parent:
            return ("refused", "busy"), None
        # A hole gets its bytes again; blobs that continue it stay where they are.
        hole.digest, hole.pieces, hole.last_used = record.digest, record.pieces, record.last_used
        hole.nbytes, hole.tokens, hole.retention = record.nbytes, record.tokens, record.retention
        self._residency.hand_over(record, hole)
        self._index.mend(hole)
        return ("stored", ""), hole

    def _after_publish(self, record: Record) -> None:
        self._residency.settle(record)
        if record.parent is not None:
            self._residency.settle(record.parent)
        if self._writeback is not None and record.retention is not Retention.VOLATILE:
            self._writeback.save(record)

    async def _make_durable(self, reservation: Reservation, answers: list[tuple[str, str]]) -> None:
        for number, slot in enumerate(reservation.slots):
            key = slot.existing or (slot.draft and slot.draft.record) or None
            if key is None or answers[number][0] not in ("stored", "exists"):
                continue
            record = reservation.ns.blobs.get(key.key)
            try:
                if self._writeback is None:
                    raise InvalidRequest("a durable put needs an SSD tier, and there is none")
                if record is None:
                    raise InvalidRequest("the blob was dropped before it was durable")
                await self._writeback.save_durably(record)
            except BlobStoreError as error:
                if record is not None:
                    record.retention = min(record.retention, Retention.STANDARD)
                answers[number] = ("refused", error.code)

    def _view(self, record: Record) -> memoryview:
        assert record.dram is not None
        return self._arena[record.dram.offset : record.dram.offset + record.nbytes]

    def _array(self, record: Record) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(self._view(record), np.uint8)


def _digest_all(views: Sequence[memoryview]) -> list[Digests]:
    """Digest payloads (work)."""
    made = []
    for view in views:
        pieces = piece_digests(view)
        made.append((pieces, payload_digest(view.nbytes, pieces)))
    return made
