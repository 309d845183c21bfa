"""Writing blobs: reserve, seal, abort, expire.

Room for a batch is lent all or none, and comes back when its writer hands it
back or exits, whatever became of the reservation meanwhile. Digesting and
publishing is `Sealing`'s affair. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from blobstore.counters import Counters
from blobstore.drafts import Answer, Asked, Draft, Drafts, Group, Reservation, Slot
from blobstore.errors import BlobStoreError, Full, InvalidRequest, SizeMismatch
from blobstore.holder import Holder
from blobstore.index import NamespaceState, Record, Retention
from blobstore.put_texts import Entries, check_told, entries_of
from blobstore.residency import Residency
from blobstore.sealing import Sealing
from blobstore.uses import Uses
from blobstore.writeback import Writeback

if TYPE_CHECKING:
    from blobstore.text_entry import TextEntry

SLOTS_MAX = 100_000
"""Keys of one reservation."""


class Jobs(Protocol):
    """The rebuilds under way."""

    def entry(self, job_id: int, ns: NamespaceState, key: bytes) -> TextEntry | None:
        """What is known of a blob that a live job still has to make; None: it has not."""
        ...

    def made(self, job_id: int, key: bytes) -> None:
        """A job's blob is sealed."""
        ...


class Notes(Protocol):
    """Where texts are kept."""

    def note(self, ns: NamespaceState, entries: Entries, *, only_new: bool = False) -> None:
        """Keep them, or with `only_new` those of which none is kept yet."""
        ...


class Writers:
    """All reservations of the store."""

    def __init__(
        self,
        residency: Residency,
        drafts: Drafts,
        sealing: Sealing,
        writeback: Writeback | None,
        counters: Counters,
        uses: Uses,
        clock: Callable[[], float],
        lent_bytes_max: int,
        jobs: Jobs,
        texts: Notes,
    ) -> None:
        self._residency = residency
        self._drafts = drafts
        self._sealing = sealing
        self._writeback = writeback
        self._counters = counters
        self._uses = uses
        self._clock = clock
        self._lent_bytes_max = lent_bytes_max
        self._jobs = jobs
        self._texts = texts
        self._live: dict[int, Reservation] = {}
        self._next_id = 1

    @property
    def ttl_s(self) -> float:
        """How long a reservation lasts."""
        return self._drafts.ttl_s

    @property
    def count(self) -> int:
        """Reservations that may still be sealed."""
        return len(self._live)

    async def reserve(
        self, holder: Holder, ns: NamespaceState, keys: Sequence[bytes], asked: Asked
    ) -> Reservation:
        """Lend extents for the keys that are new, all or none, waiting for room if so asked.

        For a job also for keys that are on SSD alone. Slots that got no extent say why. Raises
        InvalidRequest for a request that contradicts the layout, Busy when too many wait.
        """
        sizes = self._sizes(ns, keys, asked.parent_key, asked.tail_tokens, asked.parts)
        check_told(asked.tokens, asked.text, sum(n_tokens for n_tokens, _ in sizes))
        _check_group(ns, asked)
        deadline_s = self._clock() + asked.timeout_s
        reservation = Reservation(
            self._next_id, holder, ns, asked.retention, self._clock() + self._drafts.ttl_s,
            hint=asked.hint, job_id=asked.job, tokens=asked.tokens, text=asked.text,
        )  # fmt: skip
        self._next_id += 1
        parent = _held_or_written(ns, asked.parent_key) if asked.parent_key else None
        try:
            if parent is not None:
                _check_continued(parent, keys)
                self._keep(reservation, parent)
            if asked.parent_key and parent is None:
                reservation.slots = [Slot(None, None, "orphan") for _ in keys]
            else:
                wanted = self._plan(reservation, parent, keys, sizes, asked.group)
                await self._fill_slots(reservation, wanted, deadline_s, asked.group, asked.parts)
                reservation.slots += [Slot(None, None, "cancelled") for _ in keys[len(wanted) :]]
        except BaseException:
            self._let_go(reservation)
            raise
        self._live[reservation.reservation_id] = reservation
        holder.reservations[reservation.reservation_id] = reservation
        return reservation

    def seal_parts(
        self, holder: Holder, reservation_id: int, index: int, parts: Sequence[int]
    ) -> None:
        """Readers who follow the blob in slot `index` may have these parts.

        Raises InvalidRequest for parts that are not this writer's.
        """
        slots = self._reservation(holder, reservation_id).slots
        if not 0 <= index < len(slots):
            raise InvalidRequest(f"blob {index} of a reservation of {len(slots)}")
        slot = slots[index]
        if slot.draft is None or slot.draft.answer is not None:
            return
        allowed = slot.parts or range(slot.draft.record.ns.layout.n_parts)
        if any(part not in allowed for part in parts):
            raise InvalidRequest(f"parts {list(parts)} are not this writer's")
        self._drafts.seal_parts(slot.draft, parts)

    async def seal(
        self,
        holder: Holder,
        reservation_id: int,
        digests: Sequence[bytes] = (),
        alive: Sequence[int] = (),
        unwritten: Sequence[int] = (),
    ) -> tuple[list[str], list[str]]:
        """Digest and publish; results and reasons per slot. Ends the reservation.

        `alive` are slots whose extents the writer may still touch: these are
        published from a copy; `unwritten` are refused. A durable blob is on SSD
        when this returns, or its result is "refused" with the error's code (it
        then stays in DRAM).
        """
        reservation = self._reservation(holder, reservation_id)
        self._forget(reservation)
        complete = self._take_back(reservation, frozenset(alive), frozenset(unwritten))
        try:
            await self._sealing.seal(complete)
            answers = self._answers(reservation, complete, digests)
        finally:
            self._let_go(reservation)
        stored, existed = entries_of(reservation, answers)
        if stored:
            self._texts.note(reservation.ns, stored)
        if existed:
            self._texts.note(reservation.ns, existed, only_new=True)
        if reservation.job_id:  # nobody has used anything: who waits for it will
            self._counters.rebuilt_blobs.update(result for result, _ in answers)
            self._tell_job(reservation, answers)
        else:
            await self._note_put(reservation, answers)
        return [result for result, _ in answers], [reason for _, reason in answers]

    def _tell_job(self, reservation: Reservation, answers: Sequence[Answer]) -> None:
        for slot, (result, _) in zip(reservation.slots, answers, strict=True):
            record = slot.draft.record if slot.draft is not None else slot.existing
            if record is not None and result in ("stored", "exists", "divergent"):
                self._jobs.made(reservation.job_id, record.key)

    def abort(self, holder: Holder, reservation_id: int, alive: Sequence[int] = ()) -> None:
        """Give up a reservation: nothing of it becomes visible."""
        reservation = self._reservation(holder, reservation_id)
        self._counters.aborted_reservations += not reservation.expired
        self.give_up(reservation, "aborted")
        self._forget(reservation)
        self._take_back(reservation, frozenset(alive))

    def reclaim(
        self, holder: Holder, reservation_ids: Iterable[int], viewed: frozenset[int]
    ) -> None:
        """Abort reservations; the holder has views of the extents at the offsets `viewed`."""
        for reservation_id in reservation_ids:
            slots = self._reservation(holder, reservation_id).slots
            records = [slot.draft.record if slot.draft is not None else None for slot in slots]
            alive = [
                number
                for number, record in enumerate(records)
                if record is not None and record.dram is not None and record.dram.offset in viewed
            ]
            self.abort(holder, reservation_id, alive)

    def prolong(self, reservation: Reservation) -> None:
        """Its writer makes progress: it lasts as long again from now."""
        reservation.expires_s = self._clock() + self._drafts.ttl_s

    def expire(self) -> None:
        """End reservations past their time; what they lent stays lent until handed back."""
        now_s = self._clock()
        for reservation in [r for r in self._live.values() if r.expires_s <= now_s]:
            self._counters.expired_reservations += 1
            self.give_up(reservation, "expired")
        for draft in self._drafts.expired():
            self._drafts.kill(draft, ("refused", "expired"))

    def give_up(self, reservation: Reservation, reason: str) -> None:
        """Nothing of it will become visible; its extents stay lent until handed back."""
        if reservation.expired:
            return
        reservation.expired = True
        del self._live[reservation.reservation_id]
        self._let_go(reservation)
        for slot in reservation.slots:
            # What is closing has every part, whoever leaves now.
            if slot.draft is not None and not slot.draft.closing:
                self._drafts.kill(slot.draft, ("refused", reason))

    def holder_gone(self, holder: Holder) -> None:
        """The process has exited: everything lent to it comes back."""
        for reservation in list(holder.reservations.values()):
            self.give_up(reservation, "writer_gone")
            self._forget(reservation)
            self._take_back(reservation, frozenset())
        for offset, records in list(holder.kept.items()):
            self.acknowledge(holder, [offset] * len(records))

    def acknowledge(self, holder: Holder, offsets: Sequence[int]) -> int:
        """The holder no longer has views of the extents at `offsets`; how many those were."""
        found = 0
        for offset in offsets:
            records = holder.kept.get(offset)
            if records:
                found += 1
                self._come_back(holder, records.pop())
                if not records:
                    del holder.kept[offset]
        return found

    def _sizes(
        self,
        ns: NamespaceState,
        keys: Sequence[bytes],
        parent_key: bytes,
        tail_tokens: int,
        parts: tuple[int, ...],
    ) -> list[tuple[int, int]]:
        """Tokens and bytes of each blob."""
        per_blob = ns.namespace.tokens_per_blob
        if not 0 < len(keys) <= SLOTS_MAX:
            raise InvalidRequest(f"a reservation takes 1 to {SLOTS_MAX} keys, found {len(keys)}")
        if len({parent_key, *keys}) <= len(keys):
            raise InvalidRequest("a key is named twice: the keys of a chain differ")
        if not 0 <= tail_tokens < per_blob:
            raise InvalidRequest(f"tail of {tail_tokens} tokens in blobs of {per_blob}")
        n_parts = ns.layout.n_parts
        if parts and not 0 <= min(parts) <= max(parts) < n_parts:
            raise InvalidRequest(f"parts {min(parts)} to {max(parts)} of a layout of {n_parts}")
        sizes = [(per_blob, ns.nbytes(per_blob))] * len(keys)
        if tail_tokens:
            sizes[-1] = (tail_tokens, ns.nbytes(tail_tokens))
        return sizes

    def _plan(
        self,
        reservation: Reservation,
        parent: Record | None,
        keys: Sequence[bytes],
        sizes: Sequence[tuple[int, int]],
        group: Group | None,
    ) -> list[Record | Draft]:
        """For each key the sealed blob, the group's draft, or a new record without room.

        Of a job's keys the leading ones that it still has to make.
        """
        ns, job, previous = reservation.ns, reservation.job_id, parent
        wanted: list[Record | Draft] = []
        for key, (tokens, nbytes) in zip(keys, sizes, strict=True):
            if job:
                entry = self._jobs.entry(job, ns, key)
                if entry is None:
                    break
                if nbytes != ns.nbytes(entry.n_tokens):
                    raise SizeMismatch(
                        f"blob {key.hex()[:12]} has {entry.n_tokens} tokens, not {tokens}"
                    )
                tokens = entry.n_tokens
            existing = _held(ns, key)
            draft = self._drafts.of_group((ns.id, key, *group)) if group else None
            if existing is not None:
                self._keep(reservation, existing)
            if existing is not None and not (job and existing.cold):
                wanted.append(existing)
                previous = existing
            elif draft is not None:
                if draft.record.tokens != tokens:
                    raise SizeMismatch(
                        f"blob {key.hex()[:12]} has {draft.record.tokens} tokens for other "
                        f"ranks of the group, {tokens} for this one"
                    )
                wanted.append(draft)
                previous = draft.record
            else:
                previous = Record(ns, key, previous, nbytes, tokens)
                previous.retention = reservation.retention
                wanted.append(previous)
        return wanted

    async def _fill_slots(
        self,
        reservation: Reservation,
        wanted: Sequence[Record | Draft],
        deadline_s: float,
        group: Group | None,
        parts: tuple[int, ...],
    ) -> None:
        holder = reservation.holder
        sealed = set(reservation.kept)
        fresh = [item for item in wanted if isinstance(item, Record) and item not in sealed]
        shared = [item.record for item in wanted if isinstance(item, Draft)]
        nbytes = sum(record.nbytes for record in (*fresh, *shared))
        reason = await self._room(holder, nbytes, fresh, deadline_s)
        left = 0 if reason else nbytes
        for item in wanted:
            slot = self._slot(reservation, item, sealed, reason, group)
            slot.parts = parts
            reservation.slots.append(slot)
            if slot.draft is not None:
                left -= slot.draft.record.nbytes
                slot.draft.lenders.add(reservation.reservation_id)
                self._residency.pin(slot.draft.record)
        self._owe(holder, -left)  # what others of the group sealed or gave up meanwhile

    def _slot(
        self,
        reservation: Reservation,
        item: Record | Draft,
        sealed: set[Record],
        reason: str,
        group: Group | None,
    ) -> Slot:
        """What became of one planned key while the writer waited for room."""
        ns = reservation.ns
        record = item.record if isinstance(item, Draft) else item
        if record in sealed:
            return Slot(None, record, "exists")
        if reason:
            return Slot(None, None, reason)
        group_key = (ns.id, record.key, *group) if group else None
        draft = item if isinstance(item, Draft) else self._drafts.of_group(group_key)
        existing, job = _held(ns, record.key), reservation.job_id
        entry = self._jobs.entry(job, ns, record.key) if job else None
        again = entry is not None and existing is not None and existing.cold
        if (existing is None or again) and draft is None and (entry is not None or not job):
            return Slot(self._drafts.open(record, group_key, entry), None, "")
        if isinstance(item, Record):
            self._residency.give_back(item)
        if job and entry is None:
            return Slot(None, None, "cancelled")
        if existing is not None:
            self._keep(reservation, existing)
            return Slot(None, existing, "exists")
        assert draft is not None
        if draft.answer is not None or draft.closing:
            return Slot(None, None, "busy" if draft.closing else "expired")
        self._drafts.join(draft, reservation.retention)
        return Slot(draft, None, "")

    async def _room(
        self, holder: Holder, nbytes: int, fresh: Sequence[Record], deadline_s: float
    ) -> str:
        """Count `nbytes` as lent and take extents for `fresh`; "", or why neither was done."""
        if nbytes > self._lent_bytes_max:
            return "too_large"

        def attempt() -> bool:
            if holder.lent_bytes + nbytes > self._lent_bytes_max:
                return False
            self._owe(holder, nbytes)
            return True

        if nbytes and not await holder.turns.wait(attempt, deadline_s):
            return "lent_bytes"
        reason = "full"
        try:
            reason = await self._residency.take_or_wait(fresh, deadline_s) if fresh else ""
        finally:
            if reason:
                self._owe(holder, -nbytes)
        return reason

    def _owe(self, holder: Holder, nbytes: int) -> None:
        holder.lent_bytes += nbytes
        if nbytes < 0:
            holder.turns.notify()

    def _come_back(self, holder: Holder, record: Record) -> None:
        """A loan has ended."""
        self._residency.unpin(record, used=False)
        self._owe(holder, -record.nbytes)

    def _take_back(
        self,
        reservation: Reservation,
        alive: frozenset[int],
        unwritten: frozenset[int] = frozenset(),
    ) -> list[Draft]:
        """End the loans of a reservation, but for slots in `alive`; drafts now complete."""
        holder, complete = reservation.holder, list[Draft]()
        for number, slot in enumerate(reservation.slots):
            draft = slot.draft
            if draft is None:
                continue
            record = draft.record
            if number in unwritten and not draft.closing:  # in the extent are others' bytes
                self._drafts.kill(draft, ("refused", "unwritten"))
            elif draft.answer is None and not draft.closing:
                parts = slot.parts or tuple(draft.missing)
                # What completes it is readable once it is published, what may change never.
                readable = number not in alive and not draft.missing.issubset(parts)
                self._drafts.seal_parts(draft, parts, readable=readable)
                draft.copy = draft.copy or number in alive
                if not draft.missing:
                    complete.append(draft)
            draft.lenders.discard(reservation.reservation_id)
            if number in alive and record.nbytes and record.dram is not None:
                holder.kept.setdefault(record.dram.offset, []).append(record)
            else:
                self._come_back(holder, record)
        return complete

    def _reservation(self, holder: Holder, reservation_id: int) -> Reservation:
        reservation = holder.reservations.get(reservation_id)
        if reservation is None:
            raise InvalidRequest(f"reservation {reservation_id} is unknown, or was ended")
        return reservation

    def _forget(self, reservation: Reservation) -> None:
        del reservation.holder.reservations[reservation.reservation_id]
        self._live.pop(reservation.reservation_id, None)

    def _keep(self, reservation: Reservation, record: Record) -> None:
        self._residency.keep(record)
        reservation.kept.append(record)

    def _let_go(self, reservation: Reservation) -> None:
        kept, reservation.kept = reservation.kept, []
        for record in kept:
            self._residency.unkeep(record)

    def _answers(
        self, reservation: Reservation, sealed_here: Sequence[Draft], digests: Sequence[bytes]
    ) -> list[Answer]:
        answers: list[Answer] = []
        for number, slot in enumerate(reservation.slots):
            draft = slot.draft
            if slot.existing is not None:
                given = digests[number] if number < len(digests) else b""
                answers.append(self._sealing.compare(slot.existing, given, reservation.retention))
            elif draft is None:
                answers.append(("refused", slot.reason))
            elif draft.answer is None:
                answers.append(("partial", "parts of other ranks are missing"))
            elif draft.answer[0] == "stored" and draft not in sealed_here:
                answers.append(("exists", ""))  # another rank's seal was the one that stored it
            else:
                answers.append(draft.answer)
        return answers

    async def _note_put(self, reservation: Reservation, answers: list[Answer]) -> None:
        """Tell of a put that has its answers, and make it durable if that was asked for."""
        self._note_use(reservation, answers)
        if reservation.retention is Retention.DURABLE:
            await self._make_durable(reservation, answers)
        for slot, (result, _) in zip(reservation.slots, answers, strict=True):
            self._counters.put_blobs[result] += 1
            if result == "stored" and slot.draft is not None:
                self._counters.put_bytes += slot.draft.record.nbytes

    def _note_use(self, reservation: Reservation, answers: Sequence[Answer]) -> None:
        """Tell of what was stored: a run of the chain, from its first blob to its last."""
        blobs = reservation.ns.blobs
        stored = [
            record
            for slot, (result, _) in zip(reservation.slots, answers, strict=True)
            if result == "stored" and slot.draft is not None
            if (record := blobs.get(slot.draft.record.key)) is not None
        ]
        if stored:
            leaf = stored[-1]
            self._uses.stored(leaf, leaf.depth - stored[0].depth + 1, reservation.hint)

    async def _make_durable(self, reservation: Reservation, answers: list[Answer]) -> None:
        for number, slot in enumerate(reservation.slots):
            if answers[number][0] not in ("stored", "exists"):
                continue
            named = slot.existing or (slot.draft.record if slot.draft is not None else None)
            assert named is not None
            record = reservation.ns.blobs.get(named.key)
            try:
                if self._writeback is None:
                    raise InvalidRequest("a durable put needs an SSD tier, and there is none")
                if record is None:  # a full disk left it in DRAM alone, or somebody dropped it
                    raise Full("the blob had to leave before it was durable")
                await self._writeback.save_durably(record)
            except BlobStoreError as error:
                answers[number] = ("refused", error.code)


def _check_group(ns: NamespaceState, asked: Asked) -> None:
    """Raise InvalidRequest for a group that does not say what it needs to, or may not be."""
    if asked.group and not asked.parts and ns.layout.n_parts > 1:
        raise InvalidRequest("a member of a writer group names the parts that it writes")
    if asked.group and asked.job:
        raise InvalidRequest("a rebuild is one runner's, not a group's")


def _check_continued(parent: Record, keys: Sequence[bytes]) -> None:
    """Raise InvalidRequest for what cannot be a chain: its blobs are packed and counted alike."""
    name, per_blob = parent.key.hex()[:12], parent.ns.namespace.tokens_per_blob
    if parent.tokens < per_blob:
        raise InvalidRequest(
            f"blob {name} is partial, {parent.tokens} tokens of {per_blob}: nothing continues it"
        )
    if len(parent.key) != len(keys[0]):
        raise InvalidRequest(
            f"the keys of a chain have one length: {len(parent.key)} bytes is that of blob {name}, "
            f"{len(keys[0])} that of those which are to continue it"
        )


def _held(ns: NamespaceState, key: bytes) -> Record | None:
    """The blob under `key`, unless its bytes were lost."""
    record = ns.blobs.get(key)
    return record if record is not None and not record.hole else None


def _held_or_written(ns: NamespaceState, key: bytes) -> Record | None:
    """The blob under `key`, or somebody's draft of it."""
    drafts = ns.drafts.get(key)
    return _held(ns, key) or (drafts[0] if drafts else None)
