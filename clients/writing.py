"""Putting blobs: written in place, or copied from the caller's buffers window by window."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from blobstore.clients.bound import BoundNamespace, Share
from blobstore.clients.buffers import Buffer, buffers_for
from blobstore.clients.link import Ticket
from blobstore.clients.operations import ask_in, hints_of
from blobstore.clients.steps import Call, Operation, Work, reason
from blobstore.clients.windows import windows
from blobstore.clients.writer import DURABLE, NO_PARTS, WriterBase, check_durable
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.hint import Hint
from blobstore.keys import ID_BYTES, Keys, packed_ids
from blobstore.namespace import WriterGroup
from blobstore.protocol import KEYS_MAX, NO_EXTENT, TEXT_BYTES_MAX, TOKENS_MAX, Reserve, Reserved

W = TypeVar("W", bound=WriterBase)


@dataclass(frozen=True, slots=True)
class PutTerms:
    """How blobs are put: what the first one continues, and what is to become of them."""

    parent: bytes | None
    retention: str
    hint: Hint | None
    group: WriterGroup | None
    tokens: bytes = b""
    """Ids of all blobs as u32 LE, if they are told."""
    text: str = ""

    def of_run(self, ns: BoundNamespace, keys: Keys, window: range) -> PutTerms:
        """The same for some of the blobs, of which `keys` are all."""
        if not window.start:
            parent, text = self.parent, self.text
        else:
            parent, text = keys[window.start - 1], ""
        run = slice(*(at * ns.tokens_per_blob * ID_BYTES for at in (window.start, window.stop)))
        return replace(self, parent=parent, tokens=self.tokens[run], text=text)


def packed_tokens(ns: BoundNamespace, keys: Keys, token_ids: object) -> bytes:
    """The ids of what `keys` stand for, as u32 LE; b"" if they are not told (None).

    Ids of a last run that `keys` leave out, as `ns.keys` does without `tail`, may follow.
    Raises InvalidRequest for another number of them.
    """
    if token_ids is None or not keys:
        return b""
    ids = packed_ids(token_ids)
    wanted = ns.leading_tokens(keys, len(keys))
    spare = 0 if keys.tail_tokens else ns.tokens_per_blob - 1
    if not wanted <= ids.nbytes // ID_BYTES <= wanted + spare:
        raise InvalidRequest(
            f"{ids.nbytes // ID_BYTES} token ids for {len(keys)} blobs of {wanted} tokens: "
            "give those of the blobs that are put"
        )
    return bytes(ids[: wanted * ID_BYTES])


def checked_text(text: str) -> str:
    """`text`, or InvalidRequest if it cannot be kept."""
    try:
        nbytes = len(text.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"a text is a str of whole characters, found {error}") from error
    if nbytes > TEXT_BYTES_MAX:
        raise InvalidRequest(f"a text of {nbytes} bytes: {TEXT_BYTES_MAX} are kept at most")
    return text


def reserve(
    call: Call, kind: type[W], ns: BoundNamespace, keys: Keys, terms: PutTerms
) -> Operation[W]:
    """A writer for `keys`; after a fault, one that has nothing to write to but its own memory."""
    numbers = parts_written(ns, terms)
    check_parent(keys, terms.parent)
    if len(terms.tokens) > TOKENS_MAX * ID_BYTES:
        raise InvalidRequest(
            f"{len(terms.tokens) // ID_BYTES} token ids in a put that takes {TOKENS_MAX}: put the "
            "context in several runs, or with put_from"
        )
    if not keys or not numbers:
        nothing = nothing_lent(len(keys), NO_PARTS)
        return kind(ns, keys, numbers, terms.retention, None, nothing)
    try:
        reserved = yield from ask_in(ns, _request(call, ns, keys, numbers, terms), Reserved)
    except BlobStoreError as error:
        nothing = nothing_lent(len(keys), reason(error))
        return kind(ns, keys, numbers, terms.retention, None, nothing)
    return kind(ns, keys, numbers, terms.retention, call.link, reserved)


def put_from(
    call: Call,
    ns: BoundNamespace,
    keys: Keys,
    buffers: object,
    terms: PutTerms,
    lent_bytes_max: int,
) -> Operation[list[str]]:
    """Put all of `buffers`; the result of each blob, "refused" from the first that is.

    A window is copied while the one before it is digested. Raises if `terms` say
    durable and a blob is refused; those before it are stored.
    """
    numbers = parts_written(ns, terms)
    share = Share(ns, keys, numbers)
    sources = buffers_for(buffers, share.sizes, writable=False)
    results: list[str] = []
    reasons: list[str] = []
    sealing: _Sealing | None = None
    blobs_max = KEYS_MAX
    if terms.tokens:
        blobs_max = min(max(1, TOKENS_MAX // ns.tokens_per_blob), KEYS_MAX)
    for window in windows(share.blob_sizes, lent_bytes_max, blobs_max):
        chunk = keys[window.start : window.stop]
        run = terms.of_run(ns, keys, window)
        writer = yield from reserve(call, WriterBase, ns, chunk, run)
        if sealing is not None and writer.reasons[0] == ORPHAN:
            # The parent is being sealed; this daemon wants to see it first.
            writer.abort()
            yield from sealing.finish(results, reasons)
            sealing = None
            writer = yield from reserve(call, WriterBase, ns, chunk, run)
        yield Work(partial(_fill, writer, window, share, sources))
        if sealing is not None:
            yield from sealing.finish(results, reasons)
        if results and results[-1] == "refused":
            writer.abort()
            sealing = None
            break
        sealing = _Sealing(writer, (yield from writer._post_seal()))
    if sealing is not None:
        yield from sealing.finish(results, reasons)
    missing = len(keys) - len(results)
    results += ["refused"] * missing
    reasons += [ORPHAN] * missing
    if terms.retention == DURABLE:
        check_durable(results, reasons)
    return results


@dataclass(slots=True)
class _Sealing:
    """A window under way to being published."""

    writer: WriterBase
    ticket: Ticket | None

    def finish(self, results: list[str], reasons: list[str]) -> Operation[None]:
        """Wait for it, and add what became of its blobs."""
        yield from self.writer._take_in_seal(self.ticket)
        results += self.writer.results
        reasons += self.writer.reasons


ORPHAN = "orphan"
"""The daemon's reason: the blob that this one continues is not held."""


def _fill(writer: WriterBase, window: range, share: Share, sources: Sequence[Buffer]) -> None:
    for number, index in enumerate(window):
        writer._fill(number, sources[index], share.runs(index))


def parts_written(ns: BoundNamespace, terms: PutTerms) -> tuple[int, ...]:
    """The parts that are written: a rank's own only together with the others of its group."""
    numbers = ns.writes
    if terms.group is None and len(numbers) < ns.layout.n_parts:
        raise InvalidRequest(
            f"this shard writes {len(numbers)} of {ns.layout.n_parts} parts: name the group that "
            "writes the others, put(..., group=WriterGroup(id, epoch))"
        )
    return numbers


def check_parent(keys: Keys, parent: bytes | None) -> None:
    """InvalidRequest unless `parent` can be what `keys` continue."""
    if parent is not None and (not isinstance(parent, bytes) or len(parent) != keys.key_bytes):
        raise InvalidRequest(f"parent is a key of {keys.key_bytes} bytes, found {parent!r}")


def _request(
    call: Call, ns: BoundNamespace, keys: Keys, numbers: tuple[int, ...], terms: PutTerms
) -> Reserve:
    group = terms.group
    return Reserve(
        ns.id,
        keys.packed,
        keys.key_bytes,
        terms.parent or b"",
        keys.tail_tokens,
        terms.retention,
        call.daemon_timeout_s(),
        group.id if group is not None else "",
        group.epoch if group is not None else 0,
        list(numbers) if group is not None else [],
        hints_of(terms.hint),
        terms.tokens,
        terms.text,
    )


def nothing_lent(n: int, why: str) -> Reserved:
    """For `n` blobs that are written to this process's memory."""
    return Reserved(0, _NO_EXTENT * n, [why] * n, 0.0)


_NO_EXTENT = struct.pack("<QQ", NO_EXTENT, 0)
