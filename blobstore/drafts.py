"""Blobs being written: room lent to writers, sealed by digest, then published.

Every blob under a reservation is a draft with an extent of its own; two writers
of one key do not wait for each other, the first to seal wins. The ranks of a
writer group share one draft, which is published when the last part is sealed
and expires as a whole. Nothing of a draft is visible before it is published,
but to readers who asked to follow its parts. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blobstore.fill import Fill
from blobstore.holder import Holder
from blobstore.index import NamespaceState, Record, Retention

DraftKey = tuple[bytes, bytes, str, int]
"""Namespace id, key, writer group, epoch."""


@dataclass(slots=True, eq=False)
class Draft:
    """One blob being written, by one writer or by the ranks of a group."""

    record: Record
    missing: set[int]
    """Numbers of the parts that no rank has sealed yet."""
    group_key: DraftKey | None
    lenders: set[Holder] = field(default_factory=set)
    copy: bool = False
    """Some writer may still write: publish from a copy."""
    dead: bool = False
    """Aborted, expired or published: later seals get nothing."""


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
    parent: Record | None
    retention: Retention
    slots: list[Slot]
    expires_s: float
    kept: list[Record] = field(default_factory=list)
    """Sealed blobs kept from vanishing while this writer compares or continues them."""
    expired: bool = False


def new_draft(record: Record, group_key: DraftKey | None) -> Draft:
    """A draft of `record`, none of whose parts are sealed."""
    parts = record.ns.layout.parts(record.tokens)
    record.fill = Fill([part.offset + part.nbytes for part in parts])
    record.ns.drafts.setdefault(record.key, []).append(record)
    return Draft(record, set(range(len(parts))), group_key)


def withdraw_draft(record: Record) -> None:
    """Readers can no longer find the draft `record` by its key."""
    drafts = record.ns.drafts.get(record.key)
    if drafts and record in drafts:
        drafts.remove(record)
        if not drafts:
            del record.ns.drafts[record.key]


def seal_parts(draft: Draft, parts: Sequence[int]) -> None:
    """Count parts as written; readers who follow the blob may have them."""
    fill = draft.record.fill
    for part in parts:
        draft.missing.discard(part)
        if fill is not None:
            fill.mark(part, part + 1)
