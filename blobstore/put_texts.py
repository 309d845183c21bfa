"""The texts of what was put: token ids of a reservation, cut to its blobs once it is sealed."""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.drafts import Answer, Reservation, Slot
from blobstore.errors import InvalidRequest
from blobstore.index import NamespaceState, Record, Retention
from blobstore.keys import ID_BYTES
from blobstore.namespace import Namespace
from blobstore.protocol import TEXT_BYTES_MAX
from blobstore.text_entry import TextEntry

Entries = dict[bytes, TextEntry]
"""By key."""


def check_told(tokens: bytes, text: str, n_tokens: int) -> None:
    """Raise InvalidRequest unless `tokens` are the ids of `n_tokens`, or none at all."""
    if tokens and len(tokens) != ID_BYTES * n_tokens:
        raise InvalidRequest(f"{len(tokens) / ID_BYTES:g} token ids for blobs of {n_tokens} tokens")
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise InvalidRequest(f"a text of {len(text)} characters: at most {TEXT_BYTES_MAX} bytes")


def entries_of(reservation: Reservation, answers: Sequence[Answer]) -> tuple[Entries, Entries]:
    """What is to be kept of the texts: of blobs that were stored, and of those that existed.

    Nothing of volatile blobs. The caller's text goes with the first blob that is new.
    """
    stored: Entries = {}
    existed: Entries = {}
    if reservation.tokens:
        for number, (slot, (result, _)) in enumerate(zip(reservation.slots, answers, strict=True)):
            record = _held(reservation.ns, slot)
            if record is None or record.retention is Retention.VOLATILE:
                continue
            if result == "stored":
                text = "" if stored else reservation.text
                stored[record.key] = _entry(record, _of_slot(reservation, number, record), text)
            elif result == "exists":
                existed[record.key] = _entry(record, _of_slot(reservation, number, record), "")
    return stored, existed


def entries_told(ns: NamespaceState, keys: Sequence[bytes], tokens: bytes, text: str) -> Entries:
    """What is to be kept of a chain whose `tokens` are told after it was put.

    Of blobs that are held, and not volatile. Raises InvalidRequest unless there are as many
    ids as the blobs have tokens: the last one, if it is not held, any number up to a full one.
    """
    entries: Entries = {}
    per_blob = ns.namespace.tokens_per_blob
    n = 0
    record = None
    for key in keys:
        record = ns.blobs.get(key)
        if record is not None and not record.held:
            record = None
        n_tokens = record.tokens if record is not None else per_blob
        if record is not None and record.retention is not Retention.VOLATILE:
            run = tokens[n * ID_BYTES : (n + n_tokens) * ID_BYTES]
            entries[key] = _entry(record, run, "" if entries else text)
        n += n_tokens
    n_told = len(tokens) // ID_BYTES
    may_be_tail = record is None and n - per_blob < n_told < n
    check_told(tokens, text, n_told if may_be_tail else n)
    return entries


def check_tokens(namespace: Namespace, entries: Entries) -> None:
    """Raise InvalidRequest unless all tokens are those of their keys (work)."""
    for key, entry in entries.items():
        if not entry.belongs_to(namespace, key):
            raise InvalidRequest(f"the token ids told are not those of blob {key.hex()[:12]}")


def _held(ns: NamespaceState, slot: Slot) -> Record | None:
    """What is held now under the key of a slot."""
    named = slot.existing or (slot.draft.record if slot.draft is not None else None)
    record = ns.blobs.get(named.key) if named is not None else None
    return record if record is not None and record.held else None


def _of_slot(reservation: Reservation, number: int, record: Record) -> bytes:
    """The token ids of one blob of a reservation."""
    start = number * record.ns.namespace.tokens_per_blob * ID_BYTES
    return reservation.tokens[start : start + record.tokens * ID_BYTES]


def _entry(record: Record, tokens: bytes, text: str) -> TextEntry:
    per_blob = record.ns.namespace.tokens_per_blob
    parent = record.parent
    return TextEntry(
        parent=b"" if parent is None else parent.key,
        position=0 if parent is None else (parent.depth - 1) * per_blob + parent.tokens,
        tokens=tokens,
        nbytes=record.nbytes,
        digest=record.digest,
        text=text,
    )
