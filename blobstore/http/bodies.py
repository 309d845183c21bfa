"""Request bodies, taken in pieces with a time limit on each; nothing of them is kept whole."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from blobstore.errors import InvalidRequest
from blobstore.http.answers import Refusal
from blobstore.http.room import KEY as ROOM
from blobstore.http.room import UNCOUNTED_BYTES

T = TypeVar("T")

log = logging.getLogger(__name__)

JSON_BYTES_MAX = 16 << 20
"""100,000 keys of 64 bytes take 13 MB."""
WHOLE_TIMES = 4
"""What is held whole must be there in so many times the limit of a piece."""
INLINE_JSON_BYTES = 64 << 10
HASH_INLINE_BYTES = 256 << 10
HASH_STEP_BYTES = 1 << 20
"""Handed to a thread at once; a body in flight keeps two of these at most."""

_LENGTH = re.compile(r"[0-9]{1,19}")
_MEMBER = re.compile(r"\s*([a-z*][a-z0-9_.*-]*)\s*=\s*:([A-Za-z0-9+/=]*):\s*", re.IGNORECASE)


class Cut(Exception):
    """The peer left, stopped or broke off in the middle of a body: nobody to answer."""


def expected_length(request: web.Request) -> int | None:
    """Content-Length, or None for a body in chunks."""
    text = request.headers.get("Content-Length")
    if text is None:
        return None if request.headers.get("Transfer-Encoding") else 0
    if not _LENGTH.fullmatch(text):
        raise InvalidRequest(f"Content-Length is a number of bytes, found {text[:20]!r}")
    return int(text)


def refuse_encodings(request: web.Request) -> None:
    """Bodies are stored as they come: compressed ones would be stored compressed."""
    for name, plain in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        encoding = ",".join(request.headers.getall(name, ()))
        if encoding and encoding.strip().lower() != plain:
            raise Refusal(
                415, "unsupported_media_type", f"{name} {encoding[:20]!r}: send plain bytes"
            )


async def let_come(request: web.Request) -> None:
    """Send 100 (Continue) if the peer waits for it before it sends its body.

    Only now: what was refused before was refused without its body.
    """
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # no response has begun


def broken_off(request: web.Request, cut: Exception) -> web.Response:
    """Nobody reads the answer, and what still comes is no request: the connection ends."""
    log.debug("a request was cut: %s", cut)
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=400)


async def chunks(request: web.Request, timeout_s: float) -> AsyncIterator[bytes]:
    """The body piece by piece. Raises Cut if it ends early or one takes longer than that."""
    content = request.content
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                # Not readany: that would join, and so copy, what has come meanwhile.
                data, _ = await content.readchunk()
        except (
            OSError, RuntimeError, RequestPayloadError, ClientPayloadError, HttpProcessingError,
        ) as error:  # fmt: skip
            # TimeoutError is an OSError. RuntimeError: the connection was closed already.
            raise Cut(str(error) or type(error).__name__) from error
        if data:
            yield data
        elif content.at_eof():
            return


async def read_json(request: web.Request, kind: type[T], timeout_s: float) -> T:
    """The body as a `kind`; a large one is decoded on a thread."""
    if request.content_type != "application/json":
        raise Refusal(
            415, "unsupported_media_type", f"wanted application/json, found {request.content_type}"
        )
    body = await read_small(request, JSON_BYTES_MAX, timeout_s)
    if len(body) <= INLINE_JSON_BYTES:
        return decode(body, kind)
    return await asyncio.get_running_loop().run_in_executor(None, decode, body, kind)


async def read_small(request: web.Request, most_bytes: int, timeout_s: float) -> bytes:
    """A body of up to `most_bytes`, whole."""
    refuse_encodings(request)
    if (expected_length(request) or 0) > most_bytes:
        raise _too_large(most_bytes)
    await let_come(request)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s * WHOLE_TIMES):
            async for data in chunks(request, timeout_s):
                body += data
                if len(body) > most_bytes:
                    raise _too_large(most_bytes)
                if len(body) > UNCOUNTED_BYTES:
                    request.app[ROOM].take(request, len(data))
    except TimeoutError as error:
        raise Cut("a short body takes too long") from error
    return bytes(body)


def decode(body: bytes, kind: type[T]) -> T:
    """JSON as a `kind`; InvalidRequest says where it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not what is wanted: {error}") from None


def _too_large(most_bytes: int) -> Refusal:
    return Refusal(413, "frame_too_large", f"this body may have {most_bytes} bytes at most")


def declared_sha256(headers: Sequence[str]) -> bytes | None:
    """The sha-256 of Repr-Digest (RFC 9530), if it is there; other algorithms are ignored."""
    found = None
    for member in ",".join(headers).split(","):
        if not member.strip():
            continue
        parsed = _MEMBER.fullmatch(member)
        if parsed is None:
            raise InvalidRequest(f"Repr-Digest is like sha-256=:BASE64:, found {member[:30]!r}")
        if parsed[1].lower() == "sha-256":
            with suppress(binascii.Error):
                found = base64.b64decode(parsed[2], validate=True)
            if found is None or len(found) != hashlib.sha256().digest_size:
                raise InvalidRequest("Repr-Digest: sha-256 is 32 bytes in base64")
    return found


class Sha256:
    """Digest of a body that is still arriving; only small pieces are hashed on the loop."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._state = hashlib.sha256()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._running: asyncio.Future[None] | None = None

    async def update(self, data: bytes) -> None:
        """Take the next piece."""
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= HASH_STEP_BYTES:
            await self._begin()

    async def digest(self) -> bytes:
        """The digest of all pieces."""
        if self._waiting_bytes > HASH_INLINE_BYTES:
            await self._begin()
        if self._running is not None:
            await self._running
        _hash(self._state, self._waiting)
        return self._state.digest()

    async def _begin(self) -> None:
        """Hash what waits on a thread, once that has done with what came before."""
        if self._running is not None:
            await self._running
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        loop = asyncio.get_running_loop()
        self._running = loop.run_in_executor(self._pool, _hash, self._state, batch)


def _hash(state: Any, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        state.update(piece)
