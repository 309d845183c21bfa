"""Blobs being written: room lent to writers, sealed by digest, then published.

Every blob under a reservation is a draft with an extent of its own; two writers
of one key do not wait for each other, the first to seal wins. The ranks of a
writer group share one draft, which is published when the last part is sealed
and expires as a whole. Nothing of a draft is visible before it is published,
but to readers who asked to follow its parts. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.fill import Fill
from blobstore.hint import Hint
from blobstore.holder import Holder
from blobstore.index import NamespaceState, Record, Retention
from blobstore.residency import Residency

if TYPE_CHECKING:
    from blobstore.text_entry import TextEntry

GroupKey = tuple[bytes, bytes, str, int]
"""Namespace id, key, writer group, epoch."""

Answer = tuple[str, str]
"""Result and reason, as in protocol.Sealed."""


Group = tuple[str, int]
"""Writer group and epoch."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a writer asks for beside room for its keys.

    Args:
        parent_key: of the blob that the first one continues, sealed or still being written.
        tail_tokens: of the last blob, if that is partial; else 0.
        retention: of all of them.
        timeout_s: how long to wait for room.
        group: whose ranks fill the blobs together.
        parts: that this writer seals; empty means all.
        hint: what the put is for.
        tokens: ids of all blobs as u32 LE; empty if they are not told.
        text: the caller's, of the run.
        job: the rebuild that it is for; 0 if none.
    """

    parent_key: bytes = b""
    tail_tokens: int = 0
    retention: Retention = Retention.STANDARD
    timeout_s: float = 0.0
    group: Group | None = None
    parts: tuple[int, ...] = ()
    hint: Hint | None = None
    tokens: bytes = b""
    text: str = ""
    job: int = 0


@dataclass(slots=True, eq=False)
class Draft:
    """One blob being written, by one writer or by the ranks of a group."""

    record: Record
    missing: set[int]
    """Numbers of the parts that no rank has sealed yet."""
    group_key: GroupKey | None
    expires_s: float
    """When a draft of a group is given up, whoever still writes to it."""
    lenders: set[int] = field(default_factory=set)
    """Reservations whose writers may still touch the extent."""
    copy: bool = False
    """Some writer may touch it even after its seal: publish from a copy."""
    closing: bool = False
    """Every part is there, and it is being published."""
    answer: Answer | None = None
    """What became of it; later seals get nothing else."""
    remade: TextEntry | None = None
    """What is known of the blob that a runner makes again here; None for an ordinary put."""


@dataclass(slots=True)
class Slot:
    """One key of a reservation: a draft to write, a sealed blob, or a refusal."""

    draft: Draft | None
    existing: Record | None
    reason: str
    parts: tuple[int, ...] = ()
    """Parts that this writer seals; empty means all."""


@dataclass(slots=True, eq=False)
class Reservation:
    """What one writer was lent at once."""

    reservation_id: int
    holder: Holder
    ns: NamespaceState
    retention: Retention
    expires_s: float
    slots: list[Slot] = field(default_factory=list)
    hint: Hint | None = None
    kept: list[Record] = field(default_factory=list)
    """Sealed blobs kept from vanishing while this writer compares or continues them."""
    expired: bool = False
    job_id: int = 0
    """The rebuild that it is for; 0: it is an ordinary put."""
    tokens: bytes = b""
    """Token ids of its blobs, one after the other, as u32 LE; empty if they were not told."""
    text: str = ""
    """The caller's, of the run that it writes."""


class Drafts:
    """All drafts of the store, until it is known what became of them."""

    def __init__(self, residency: Residency, clock: Callable[[], float], ttl_s: float) -> None:
        self._residency = residency
        self._clock = clock
        self.ttl_s = ttl_s
        self._of_groups: dict[GroupKey, Draft] = {}
        self._remade: set[Draft] = set()

    def open(
        self, record: Record, group_key: GroupKey | None, remade: TextEntry | None = None
    ) -> Draft:
        """A draft of `record`, which has an extent; none of its parts are sealed."""
        parts = record.ns.layout.parts(record.tokens)
        record.fill = Fill([part.offset + part.nbytes for part in parts])
        record.ns.drafts.setdefault(record.key, []).append(record)
        draft = Draft(record, set(range(len(parts))), group_key, self._clock() + self.ttl_s)
        draft.remade = remade
        if remade is not None:
            self._remade.add(draft)
        if group_key is not None:
            self._of_groups[group_key] = draft
        return draft

    def of_group(self, group_key: GroupKey | None) -> Draft | None:
        """The draft that the ranks of a group share, if there is one."""
        return self._of_groups.get(group_key) if group_key is not None else None

    def join(self, draft: Draft, retention: Retention) -> None:
        """Another rank of the group will write to the draft."""
        draft.expires_s = self._clock() + self.ttl_s
        draft.record.retention = max(draft.record.retention, retention)

    def expired(self) -> list[Draft]:
        """Drafts of groups of which no rank was heard for too long."""
        now_s = self._clock()
        return [d for d in self._of_groups.values() if d.expires_s <= now_s and not d.closing]

    def seal_parts(self, draft: Draft, parts: Sequence[int], *, readable: bool = True) -> None:
        """Count parts as written; if `readable`, readers who follow the blob may have them."""
        draft.expires_s = self._clock() + self.ttl_s
        fill = draft.record.fill
        for part in parts:
            draft.missing.discard(part)
            if fill is not None and readable:
                fill.mark(part, part + 1)

    def kill(self, draft: Draft, answer: Answer) -> None:
        """It is not published: its room is free once nobody holds it. Again is harmless."""
        if draft.answer is not None:
            return
        self._retire(draft, answer)
        record = draft.record
        record.gone = True
        if record.fill is not None and not record.fill.finished:
            record.fill.fail(_why_no_more(answer))
        self._residency.settle(record)

    def forget(self, ns: NamespaceState, keys: Container[bytes]) -> None:
        """Nothing that a runner makes again of `keys` is published, sealed or not."""
        for draft in [d for d in self._remade if d.record.ns is ns and d.record.key in keys]:
            self.kill(draft, ("refused", "cancelled"))

    def published(self, draft: Draft, answer: Answer) -> None:
        """Its record is in the index now."""
        self._retire(draft, answer)
        draft.record.fill = None

    def _retire(self, draft: Draft, answer: Answer) -> None:
        draft.answer = answer
        self._remade.discard(draft)
        record = draft.record
        same_key = record.ns.drafts[record.key]
        same_key.remove(record)
        if not same_key:
            del record.ns.drafts[record.key]
        if draft.group_key is not None:
            del self._of_groups[draft.group_key]


def _why_no_more(answer: Answer) -> str:
    """What readers are told who follow a draft that is not published."""
    result, reason = answer
    if result == "refused":
        return reason
    return "divergent" if result == "divergent" else "moved"  # to the blob under the key
