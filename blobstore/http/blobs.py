"""One blob over HTTP: PUT, GET, HEAD, DELETE.

A body goes from the socket into the extent that was lent for it, and from there to the
socket; on the way it is counted, and digested where the peer said what to expect. What
ends early, is too long or fails its digest is given back and never seen by anyone.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web

from blobstore.digest import PIECE_BYTES, payload_digest, piece_digests
from blobstore.drafts import Asked, Reservation, Slot
from blobstore.errors import Busy, DeadlineExceeded, Full, InvalidRequest, SizeMismatch
from blobstore.hint import Hint
from blobstore.http import bodies, conditions
from blobstore.http.answers import Refusal, answer, miss
from blobstore.http.context import Context, hex_bytes, hint_of, seconds_of, whole_of
from blobstore.http.sending import Sender
from blobstore.http.tokens import Right
from blobstore.index import NamespaceState, Record, Retention
from blobstore.readers import Found
from blobstore.units import MIB

PATH = "/v1/namespaces/{namespace}/blobs/{key}"
GET_TIMEOUT_S = 10.0
PUT_TIMEOUT_S = 5.0
"""For room, unless the caller says otherwise."""
SEAL_TIMEOUT_S = 300.0
READY_BYTES = MIB
"""Waited for at once where a blob is still on its way from the disk."""
PROLONG_BYTES = MIB
"""An upload that brings so much more may take longer than a reservation lasts."""

RESULTS = {"stored": 201, "exists": 200, "divergent": 409}
DIVERGENT = "other bytes are held under this key, and stay: a key names one payload for good"

log = logging.getLogger(__name__)


class Blobs:
    """The handlers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._seals: set[asyncio.Task[tuple[list[str], list[str]]]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Where they are served."""
        return [
            web.put(PATH, self.put, expect_handler=_not_yet),
            web.get(PATH, self.get, allow_head=False),
            web.head(PATH, self.head),
            web.delete(PATH, self.delete),
        ]

    async def close(self) -> None:
        """Wait for the seals that have begun."""
        while self._seals:
            await asyncio.wait(self._seals)

    async def head(self, request: web.Request) -> web.StreamResponse:
        """The headers of a get, from what is known: nothing is read or leased."""
        ns = self._context.namespace(request, Right.READ)
        record = _held(ns, hex_bytes(request.match_info["key"], "a key"))
        seconds_of(request, GET_TIMEOUT_S)
        if record is None:
            raise miss("absent")
        _check_match(request, record)
        etag = conditions.etag_of(record.digest)
        if conditions.is_unchanged(request.headers, etag):
            return web.Response(status=304, headers={"ETag": etag})
        headers = _facts(record, record.place())
        headers["Content-Length"] = str(record.nbytes)
        return web.Response(headers=headers)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """The bytes, or a range of them."""
        ns = self._context.namespace(request, Right.READ)
        key = hex_bytes(request.match_info["key"], "a key")
        timeout_s = seconds_of(request, GET_TIMEOUT_S)
        hint = hint_of(request)
        record = _held(ns, key)
        if record is not None:
            _check_match(request, record)
            etag = conditions.etag_of(record.digest)
            if conditions.is_unchanged(request.headers, etag):
                return web.Response(status=304, headers={"ETag": etag})
            _span(request, record)  # what cannot be satisfied need not be loaded
        context = self._context
        found = self._store.get(
            context.holder, ns.id, key, len(key), timeout_s=timeout_s, stream=True, hint=hint
        )
        if not isinstance(found, Found):
            found = await found
        if not found.lease_id:
            raise miss(found.reason)
        try:
            return await self._send(request, found, timeout_s)
        finally:
            self._store.readers.release(context.holder, [found.lease_id])

    async def _send(
        self, request: web.Request, found: Found, timeout_s: float
    ) -> web.StreamResponse:
        lease = self._context.holder.leases[found.lease_id]
        record = lease.pins[-1]  # not what the key names now: that may be another blob
        span = _span(request, record)
        start, end = span or (0, record.nbytes)
        reason = await self._ready(found, start, end, timeout_s)
        if reason:
            raise miss(reason)
        headers = _facts(record, next(iter(found.served), "dram"))
        response = web.StreamResponse(status=206 if span else 200, headers=headers)
        response.content_length = end - start
        if span:
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{record.nbytes}"
        await response.prepare(request)
        if start < end:
            assert record.dram is not None
            await self._stream(request, response, found, record.dram.offset, start, end)
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        found: Found,
        offset: int,
        start: int,
        end: int,
    ) -> None:
        context = self._context
        sender = Sender(request, response, context.io_timeout_s)
        view = self._store.arena.view
        try:
            await sender.start()
            for at in range(start, end, READY_BYTES):
                stop = min(at + READY_BYTES, end)
                reason = await self._ready(found, at, stop, context.io_timeout_s)
                if reason:
                    log.warning("a response was broken off: its blob is not to be had: %s", reason)
                    raise bodies.Cut(reason)
                await sender.send(view[offset + at : offset + stop])
        except OSError as error:  # TimeoutError is one
            sender.abort()
            raise bodies.Cut(f"a reader was given up: {error!r}") from error
        except BaseException:
            sender.abort()
            raise
        finally:
            sender.close()

    async def _ready(self, found: Found, start: int, end: int, timeout_s: float) -> str:
        """Wait until the first bytes from `start` on are readable; why not, if they are not."""
        lease = self._context.holder.leases[found.lease_id]
        if not lease.items:
            return ""
        return await self._store.readers.wait(
            self._context.holder, found.lease_id, 0, start, min(start + READY_BYTES, end), timeout_s
        )

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Free the blob and all that continue it."""
        ns = self._context.namespace(request, Right.ADMIN)
        key = hex_bytes(request.match_info["key"], "a key")
        return answer({"count": self._store.drop(ns.id, key, len(key))})

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Store a blob. What can be refused is refused before its body is read."""
        ns = self._context.namespace(request, Right.WRITE)
        asked = _put_of(request, ns)
        held = _held(ns, asked.key)
        _check_match(request, held)
        if held is not None and asked.must_be_new:
            raise _held_already()
        context = self._context
        reservation = await self._store.writers.reserve(
            context.holder, ns, [asked.key],
            Asked(
                asked.parent, asked.tail_tokens, asked.retention, asked.timeout_s,
                hint=asked.hint, job=asked.job,
            ),
        )  # fmt: skip
        try:
            slot = reservation.slots[0]
            if slot.reason not in ("", "exists"):
                raise _refused(slot.reason, asked)
            if slot.reason and asked.must_be_new:  # since it waited for room
                raise _held_already()
            await bodies.let_come(request)
            digest = await self._receive(request, reservation, slot, asked)
        except BaseException:
            self._store.writers.abort(context.holder, reservation.reservation_id)
            raise
        return await self._seal(reservation, digest, asked)

    async def _receive(
        self, request: web.Request, reservation: Reservation, slot: Slot, asked: _Put
    ) -> bytes:
        """Take in the body; the payload digest if the blob is held already, else b""."""
        sink: _Extent | _Comparison = _Comparison()
        if slot.draft is not None:
            extent = slot.draft.record.dram
            assert extent is not None
            view = self._store.arena.view
            sink = _Extent(view, extent.offset)
        sha256 = bodies.Sha256(self._context.pool) if asked.sha256 is not None else None
        received = prolonged = 0
        async for data in bodies.chunks(request, self._context.io_timeout_s):
            received += len(data)
            if received > asked.nbytes:
                raise _wrong_size(asked.nbytes, f"more than {asked.nbytes}", 413)
            if reservation.expired:
                raise DeadlineExceeded("the upload took too long: its reservation expired")
            sink.take(data)
            if sha256 is not None:
                await sha256.update(data)
            if received - prolonged >= PROLONG_BYTES:
                prolonged = received
                self._store.writers.prolong(reservation)
        if received != asked.nbytes:
            raise _wrong_size(asked.nbytes, str(received), 400)
        if sha256 is not None and await sha256.digest() != asked.sha256:
            raise Refusal(400, "corrupt", "the body does not have the sha-256 of Repr-Digest")
        return sink.digest()

    async def _seal(
        self, reservation: Reservation, digest: bytes, asked: _Put
    ) -> web.StreamResponse:
        """Publish, to the end even if the peer has gone: every byte of it is here."""
        task = asyncio.get_running_loop().create_task(
            self._store.writers.seal(
                self._context.holder, reservation.reservation_id, [digest] if digest else []
            )
        )
        self._seals.add(task)
        task.add_done_callback(self._sealed)
        try:
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                (result,), (reason,) = await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded("every byte is here, but the disk takes too long") from None
        if result not in RESULTS:
            raise _refused(reason, asked)
        if result == "exists" and asked.must_be_new:  # since its body came
            raise _held_already()
        if result == "divergent":
            raise Refusal(409, result, DIVERGENT, result=result)
        return answer({"result": result}, RESULTS[result])

    def _sealed(self, task: asyncio.Task[tuple[list[str], list[str]]]) -> None:
        self._seals.discard(task)
        if not task.cancelled():
            task.exception()  # told to the peer, if that is still there


class _Extent:
    """Where a new blob is written."""

    def __init__(self, arena: memoryview, offset: int) -> None:
        self._arena = arena
        self._at = offset

    def take(self, data: bytes) -> None:
        self._arena[self._at : self._at + len(data)] = data
        self._at += len(data)

    def digest(self) -> bytes:
        return b""


class _Comparison:
    """Digests a body whose key is held already."""

    def __init__(self) -> None:
        self._piece = bytearray()
        self._pieces = bytearray()
        self._nbytes = 0

    def take(self, data: bytes) -> None:
        self._nbytes += len(data)
        self._piece += data
        while len(self._piece) >= PIECE_BYTES:
            with memoryview(self._piece) as piece:
                self._pieces += piece_digests(piece[:PIECE_BYTES])
            del self._piece[:PIECE_BYTES]

    def digest(self) -> bytes:
        with memoryview(self._piece) as rest:
            return payload_digest(self._nbytes, bytes(self._pieces + piece_digests(rest)))


@dataclass(frozen=True, slots=True)
class _Put:
    """What a put asks for, checked."""

    key: bytes
    parent: bytes
    retention: Retention
    tail_tokens: int
    nbytes: int
    """That the body must have."""
    sha256: bytes | None
    must_be_new: bool
    timeout_s: float
    hint: Hint | None
    job: int
    """The rebuild that it is part of; 0 if none."""


def _put_of(request: web.Request, ns: NamespaceState) -> _Put:
    query = request.query
    parent = query.get("parent", "")
    per_blob = ns.namespace.tokens_per_blob
    tokens = whole_of(request, "tokens", per_blob, 1, per_blob)
    asked = _Put(
        key=hex_bytes(request.match_info["key"], "a key"),
        parent=hex_bytes(parent, "parent") if parent else b"",
        retention=Retention.parse(query.get("retention", "standard")),
        tail_tokens=tokens % per_blob,
        nbytes=ns.nbytes(tokens),
        sha256=bodies.declared_sha256(request.headers.getall("Repr-Digest", ())),
        must_be_new=conditions.must_be_new(request.headers),
        timeout_s=seconds_of(request, PUT_TIMEOUT_S),
        hint=hint_of(request),
        job=whole_of(request, "job", 0, 0, (1 << 63) - 1),
    )
    bodies.refuse_encodings(request)
    if "Content-Range" in request.headers:
        raise InvalidRequest("a blob is put whole, not by Content-Range")
    length = bodies.expected_length(request)
    if length is not None and length != asked.nbytes:
        raise _wrong_size(asked.nbytes, str(length), 413 if length > asked.nbytes else 400)
    return asked


def _held(ns: NamespaceState, key: bytes) -> Record | None:
    record = ns.blobs.get(key)
    return record if record is not None and record.held else None


def _check_match(request: web.Request, record: Record | None) -> None:
    etag = conditions.etag_of(record.digest) if record is not None else None
    if conditions.is_refused(request.headers, etag):
        raise Refusal(412, "precondition_failed", "If-Match names another blob")


def _span(request: web.Request, record: Record) -> conditions.Span | None:
    try:
        return conditions.span_of(request.headers, conditions.etag_of(record.digest), record.nbytes)
    except conditions.Unsatisfiable:
        raise Refusal(
            416, "range_not_satisfiable", f"the blob has {record.nbytes} bytes",
            headers={"Content-Range": f"bytes */{record.nbytes}"},
        ) from None  # fmt: skip


def _facts(record: Record, tier: str) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-transform",
        "ETag": conditions.etag_of(record.digest),
        "Accept-Ranges": "bytes",
        "X-Blobstore-Tier": tier,
        "X-Blobstore-Tokens": str(record.tokens),
    }


def _held_already() -> Refusal:
    return Refusal(412, "precondition_failed", "the blob is held already")


def _wrong_size(wanted: int, found: str, status: int) -> Refusal:
    return Refusal(
        status, SizeMismatch.code, f"a blob of this namespace has {wanted} bytes, found {found}"
    )


def _refused(reason: str, asked: _Put) -> Exception:
    """Why a put was refused, as what is raised for it."""
    if reason == "orphan":
        return Refusal(409, "orphan", f"parent {asked.parent.hex()[:12]} is not held: put it first")
    if reason == "too_large":
        return Refusal(
            413, "size_mismatch", "more than one client may have on loan (local.lent_max)"
        )
    if reason == "full":
        return Full("no room came free in time", retry_after_s=1.0)
    if reason == "expired":
        return DeadlineExceeded("the upload took too long: its reservation expired")
    if reason == InvalidRequest.code:
        return InvalidRequest("a durable put needs an SSD tier, and there is none")
    if reason in ("io_error", "storage_failed"):
        return Refusal(500, "storage_failed", "the disk refused it: see the daemon's log")
    return Busy(f"refused: {reason}", retry_after_s=1.0)


async def _not_yet(request: web.Request) -> None:
    """Instead of sending 100 (Continue) at once: `put` does when it wants the body."""
