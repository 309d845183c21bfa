"""Putting blobs over HTTP: from memory of this process, or straight from the caller's.

What is held already is not sent: its digest is compared here. Everything else goes in the
order of the chain, since a daemon takes only what continues a blob that it holds.
Ranks cannot fill a blob together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np

from blobstore.clients.bound import BoundNamespace, Share
from blobstore.clients.buffers import Buffer, HostBuffer, buffers_for
from blobstore.clients.http_answers import error_of, result_of
from blobstore.clients.http_exchange import Exchange, HttpOperation, Transfers
from blobstore.clients.http_landing import Landing
from blobstore.clients.http_reading import fetch, slot
from blobstore.clients.http_verbs import NoteTexts, blob_path, hint_lines
from blobstore.clients.operations import STAT_KEYS, ask_in, declaration, hints_of
from blobstore.clients.steps import Call, Work, ask, reason
from blobstore.clients.writer import (
    DURABLE,
    NO_PARTS,
    RETENTIONS,
    WriterBase,
    check_durable,
    digest_of,
)
from blobstore.clients.writing import (
    ORPHAN,
    PutTerms,
    check_parent,
    nothing_lent,
    parts_written,
)
from blobstore.errors import BlobStoreError, InvalidRequest, UnknownNamespace
from blobstore.keys import Keys
from blobstore.protocol import KEYS_MAX, TOKENS_MAX, Declared, Done, Report, Stat

_RESULTS = {201: "stored", 200: "exists", 409: "divergent"}
_TOO_LARGE = 413
_HELD = ("stored", "exists")
_EXISTS, _REFUSED, _UNWRITTEN = "exists", "refused", "unwritten"

W = TypeVar("W", bound=WriterBase)


@dataclass(frozen=True, slots=True)
class _Held:
    """A blob that the daemon holds already."""

    digest: bytes
    retention: str

    def keeps(self, retention: str) -> bool:
        """Whether nothing is to be done to keep it as long as `retention` asks for."""
        return _rank(self.retention) >= _rank(retention)


def reserve(
    call: Call, kind: type[W], ns: BoundNamespace, keys: Keys, terms: PutTerms
) -> HttpOperation[W]:
    """A writer of private memory for `keys`, which is sent when it is sealed."""
    numbers = _checked(ns, keys, terms)
    if not keys or not numbers:
        nothing = nothing_lent(len(keys), NO_PARTS)
        return kind(ns, keys, numbers, terms.retention, None, nothing)
    try:
        held = yield from _held(ns, keys)
    except BlobStoreError as error:
        nothing = nothing_lent(len(keys), reason(error))
        return kind(ns, keys, numbers, terms.retention, None, nothing)
    reserved = nothing_lent(len(keys), "")
    reserved.reasons = [_EXISTS if known else "" for known in held]
    writer = kind(ns, keys, numbers, terms.retention, None, reserved)
    writer._send = partial(_send, _Chain(ns, keys, terms, held, call.daemon_timeout_s()))
    return writer


def put_from(
    call: Call,
    ns: BoundNamespace,
    keys: Keys,
    buffers: object,
    terms: PutTerms,
    lent_bytes_max: int,
) -> HttpOperation[list[str]]:
    """Send all of `buffers`; the result of each blob, "refused" from the first that is.

    Raises if `terms` say durable and a blob is refused; those before it are stored.
    """
    numbers = _checked(ns, keys, terms)
    share = Share(ns, keys, numbers)
    sources = buffers_for(buffers, share.sizes, writable=False)
    if not keys or not numbers:
        return ["partial"] * len(keys)
    try:
        held = yield from _held(ns, keys)
    except BlobStoreError as error:
        results, reasons = [_REFUSED] * len(keys), [reason(error)] * len(keys)
    else:
        chain = _Chain(ns, keys, terms, held, call.daemon_timeout_s())
        results, reasons = yield from chain.put([partial(_on_host, source) for source in sources])
    if terms.retention == DURABLE:
        check_durable(results, reasons)
    return results


Source = Callable[[], HttpOperation[memoryview]]
"""Gives the payload of a blob when it is its turn."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """Blobs to be put, in order."""

    ns: BoundNamespace
    keys: Keys
    terms: PutTerms
    held: Sequence[_Held | None]
    timeout_s: float
    was_held: Sequence[_Held | None] = ()
    """Where the caller was told that there is nothing to write."""

    def put(self, sources: Sequence[Source | None]) -> HttpOperation[tuple[list[str], list[str]]]:
        """Results and reasons; a source is None where nothing was written.

        From the first that is refused nothing is sent: it would continue that one.
        """
        results: list[str] = []
        reasons: list[str] = []
        for index, source in enumerate(sources):
            result, why = yield from self._put_one(index, source)
            results.append(result)
            reasons.append(why)
            if result == _REFUSED:
                rest = sources[len(results) :]
                results += [_REFUSED] * len(rest)
                if why == _UNWRITTEN:
                    reasons += [ORPHAN if source else _UNWRITTEN for source in rest]
                else:
                    reasons += [why] * len(rest)
                break
        yield from self._tell(results)
        return results, reasons

    def _tell(self, results: Sequence[str]) -> HttpOperation[None]:
        """Say which tokens the blobs that are held now stand for; a fault changes nothing else."""
        n = next((at for at, result in enumerate(results) if result not in _HELD), len(results))
        if not self.terms.tokens or self.terms.retention == "volatile":
            return
        # Half of the ids, and as many keys as may be, fit into one body however long the ids are.
        step = min(max(1, TOKENS_MAX // 2 // self.ns.tokens_per_blob), KEYS_MAX)
        for start in range(0, n, step):
            window = range(start, min(start + step, n))
            some = self.keys[window.start : window.stop]
            told = self.terms.of_run(self.ns, self.keys, window)
            request = NoteTexts(self.ns.id, some.packed, some.key_bytes, told.tokens, told.text)
            try:
                yield from ask_in(self.ns, request, Done)
            except BlobStoreError:  # also where they are not those of the keys: as in place
                return

    def _put_one(self, index: int, source: Source | None) -> HttpOperation[tuple[str, str]]:
        held = self.held[index]
        if held is None:
            if source is not None:
                return (yield from self._send(index, (yield from source())))
            return _REFUSED, "gone" if any(self.was_held[index : index + 1]) else _UNWRITTEN
        if held.keeps(self.terms.retention):
            if source is None:
                return _EXISTS, ""
            digest = yield Work(partial(digest_of, (yield from source())))
            return (_EXISTS, "") if digest == held.digest else ("divergent", _DIVERGENT)
        if source is not None:
            return (yield from self._send(index, (yield from source())))
        if self.terms.retention == DURABLE:
            return (yield from self._keep_longer(index))
        return _EXISTS, ""

    def _keep_longer(self, index: int) -> HttpOperation[tuple[str, str]]:
        """Put what is held once more: to be durable it must be sent."""
        memory = np.empty(self.ns.layout.nbytes(self.ns.tokens(self.keys, index)), np.uint8).data
        landing = Landing(partial(slot, memory))
        chunk = self.keys[index : index + 1]
        n, why = yield from fetch(self.timeout_s, self.ns, chunk, [landing])
        if not n or landing.nbytes != memory.nbytes:
            return _REFUSED, why or "gone"
        return (yield from self._send(index, memory))

    def _send(self, index: int, payload: memoryview) -> HttpOperation[tuple[str, str]]:
        exchange = self._exchange(index, payload)
        yield Transfers([exchange], 1)
        error = _error_of(exchange)
        if isinstance(error, UnknownNamespace):  # it restarted since it was asked
            try:
                yield from ask(declaration(self.ns), Declared)
            except BlobStoreError as why:
                return _REFUSED, reason(why)
            exchange = self._exchange(index, payload)
            yield Transfers([exchange], 1)
            error = _error_of(exchange)
        if error is None:
            result = _RESULTS[exchange.answered.status]
            return result, _DIVERGENT if result == "divergent" else ""
        if exchange.head is not None and exchange.head.status == _TOO_LARGE:
            return _REFUSED, "too_large"
        if type(error) is InvalidRequest and self.terms.retention == DURABLE:
            return _REFUSED, error.code  # as a daemon without SSD answers; check_durable raises
        return _REFUSED, reason(error)

    def _exchange(self, index: int, payload: memoryview) -> Exchange:
        query = {"retention": self.terms.retention, "timeout_s": f"{self.timeout_s:.3f}"}
        parent = self.keys[index - 1] if index else self.terms.parent
        if parent is not None:
            query["parent"] = parent.hex()
        if self.keys.tail_tokens and index == len(self.keys) - 1:
            query["tokens"] = str(self.keys.tail_tokens)
        path = f"{blob_path(self.ns.id, self.keys[index])}?{urlencode(query)}"
        lines = hint_lines(hints_of(self.terms.hint))
        return Exchange("PUT", path, payload, "application/octet-stream", lines)


_DIVERGENT = "the key is sealed with other bytes"


def _error_of(exchange: Exchange) -> BlobStoreError | None:
    """Why a put was refused; None if it has a result."""
    if exchange.error is None:
        expected = _RESULTS.get(exchange.answered.status)
        if expected is not None and expected == result_of(exchange):
            return None
    return error_of(exchange)


def _send(
    chain: _Chain, writer: WriterBase, payloads: dict[int, memoryview]
) -> HttpOperation[None]:
    """What sealing a writer is over HTTP."""
    if any(chain.held):  # and may not be any more
        try:
            held = yield from _held(chain.ns, chain.keys)
        except BlobStoreError as error:
            writer.results = [_REFUSED] * len(writer)
            writer.reasons = [reason(error)] * len(writer)
            return
        chain = replace(chain, held=held, was_held=chain.held)
    sources: list[Source | None] = [
        partial(_at_hand, payloads[index]) if index in payloads else None
        for index in range(len(writer))
    ]
    writer.results, writer.reasons = yield from chain.put(sources)


def _at_hand(payload: memoryview) -> HttpOperation[memoryview]:
    return payload
    yield  # a generator, as of memory that must be copied first


def _on_host(buffer: Buffer) -> HttpOperation[memoryview]:
    if isinstance(buffer, HostBuffer):
        return buffer.on_host()
    copied: memoryview = yield Work(buffer.on_host)
    return copied


def _checked(ns: BoundNamespace, keys: Keys, terms: PutTerms) -> tuple[int, ...]:
    """The parts that are written, all or none; raises the caller's mistakes."""
    numbers = parts_written(ns, terms)
    check_parent(keys, terms.parent)
    if numbers and len(numbers) < ns.layout.n_parts:
        raise InvalidRequest(
            f"over HTTP blobs are put whole, this shard writes {len(numbers)} of "
            f"{ns.layout.n_parts} parts: ranks fill blobs together on the daemon's machine"
        )
    if len({terms.parent, *keys}) <= len(keys):
        raise InvalidRequest("a key is named twice: the keys of a chain differ")
    if terms.retention not in RETENTIONS:
        raise InvalidRequest(
            f"unknown retention {terms.retention!r}: use volatile, standard or durable"
        )
    return numbers


def _rank(retention: str) -> int:
    return RETENTIONS.index(retention) if retention in RETENTIONS else -1


def _held(ns: BoundNamespace, keys: Keys) -> HttpOperation[list[_Held | None]]:
    """What the daemon holds of `keys` already."""
    held: list[_Held | None] = []
    for start in range(0, len(keys), STAT_KEYS):
        some = keys[start : start + STAT_KEYS]
        stat = Stat(ns.id, some.packed, some.key_bytes)
        report = (yield from ask_in(ns, stat, Report)).body
        facts = report.get("blobs")
        known = facts if isinstance(facts, list) and len(facts) == len(some) else [{}] * len(some)
        held += map(_of_facts, known)
    return held


def _of_facts(facts: Any) -> _Held | None:
    if not isinstance(facts, dict) or not facts.get("tiers"):
        return None
    try:
        return _Held(bytes.fromhex(facts["digest"]), facts["retention"])
    except (KeyError, TypeError, ValueError):
        return None
