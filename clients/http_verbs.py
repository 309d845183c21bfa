"""Requests of one message over HTTP: the route and body of each, and its answer as a reply."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import numpy as np

from blobstore.clients.http_answers import decoded, error_of
from blobstore.clients.http_exchange import Exchange
from blobstore.errors import ProtocolError
from blobstore.protocol import (
    Declare,
    Declared,
    Done,
    Drop,
    Exists,
    Explain,
    Forget,
    Held,
    Hints,
    Keyed,
    Match,
    Matched,
    Pin,
    Ping,
    Pong,
    Prefetch,
    PrefetchSession,
    Reply,
    Report,
    Request,
    Stat,
    Stats,
    Supersede,
    Verify,
)

_encode = msgspec.json.encode


class _Id(msgspec.Struct):
    id: str


class _Match(msgspec.Struct):
    blobs: int
    tiers: list[str]
    eta_s: float
    rebuild_blobs: int = 0
    rebuild_eta_s: float = 0.0


class _Held(msgspec.Struct):
    held: list[bool]


class _Count(msgspec.Struct):
    count: int


class NoteTexts(Keyed):
    """Which tokens (ids as u32 LE) blobs stand for that were put before; answered by Done.

    Over the socket they travel with Reserve.
    """

    tokens: bytes
    text: str = ""


def exchange_of(request: Request) -> Exchange:
    """`request` as a request over HTTP."""
    if isinstance(request, Keyed):
        return _keyed(request)
    if isinstance(request, Ping):
        return Exchange("GET", "/healthz")
    if isinstance(request, Declare):
        kind = "application/octet-stream"
        path = f"/v1/namespaces?{urlencode(request.terms)}" if request.terms else "/v1/namespaces"
        return Exchange("POST", path, request.namespace, kind)
    if isinstance(request, Stats):
        return Exchange("GET", "/v1/stats")
    if isinstance(request, Supersede):
        leaves = {"old_leaf": request.old_leaf.hex(), "new_leaf": request.new_leaf.hex()}
        path = f"/v1/namespaces/{request.namespace_id.hex()}/supersede"
        return Exchange("POST", path, _encode(leaves))
    if isinstance(request, PrefetchSession):
        return Exchange("POST", "/v1/prefetch", _encode({"session": request.session}))
    if isinstance(request, Verify):
        return Exchange("POST", "/v1/verify", _encode({"timeout_s": request.timeout_s}))
    raise AssertionError(f"{type(request).__name__} does not travel over HTTP")


def reply_to(request: Request, exchange: Exchange) -> Reply:
    """The answer as the reply to `request`; raises the error that came instead."""
    if isinstance(request, _COUNTED):
        return Done(decoded(exchange, _Count).count)
    if isinstance(request, Match):
        found = decoded(exchange, _Match)
        return Matched(
            found.blobs, found.tiers.count("dram"), found.eta_s,
            found.rebuild_blobs, found.rebuild_eta_s,
        )  # fmt: skip
    if isinstance(request, Exists):
        return _held(request, exchange)
    if isinstance(request, Declare):
        return Declared(_bytes_of(decoded(exchange, _Id).id))
    if isinstance(request, Ping):
        if exchange.answered.status != 200:
            raise error_of(exchange)
        return Pong()
    return Report(decoded(exchange, dict[str, Any]))


def blob_path(namespace_id: bytes, key: bytes) -> str:
    """Of one blob."""
    return f"/v1/namespaces/{namespace_id.hex()}/blobs/{key.hex()}"


def hint_lines(hints: Hints) -> str:
    """Headers of a request for one blob."""
    return "".join(
        f"X-Blobstore-{name.title()}: {quote(str(value), safe='')}\r\n"
        for name, value in hints.items()
    )


def _keyed(request: Keyed) -> Exchange:
    size = request.key_bytes
    packed = request.keys.hex()
    body: dict[str, Any] = {
        "keys": [packed[at : at + 2 * size] for at in range(0, len(packed), 2 * size)]
    }
    if isinstance(request, Match) and request.hint:
        body["hint"] = request.hint
    if isinstance(request, Drop):
        body["tier"] = request.tier
    if isinstance(request, Pin):
        body["ttl_s"] = request.ttl_s
    if isinstance(request, NoteTexts):
        body["token_ids"] = np.frombuffer(request.tokens, "<u4").tolist()
        body["text"] = request.text
    verb = _VERBS[type(request)]
    path = f"/v1/namespaces/{request.namespace_id.hex()}/{verb}"
    return Exchange("POST", path, _encode(body))


def _held(request: Exists, exchange: Exchange) -> Held:
    held = decoded(exchange, _Held).held
    asked = len(request.keys) // request.key_bytes
    if len(held) != asked:
        raise ProtocolError(f"asked for {asked} keys, the daemon told of {len(held)}")
    return Held(bytes(held))


def _bytes_of(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ProtocolError(f"the daemon sent no hexadecimal digits: {text[:80]!r}") from error


_COUNTED = (Drop, Forget, Pin, Prefetch, NoteTexts, Supersede, PrefetchSession)
"""Answered by a number alone."""

_VERBS: dict[type[Keyed], str] = {
    Match: "match", Exists: "exists", Drop: "drop", Pin: "pin", Prefetch: "prefetch", Stat: "stat",
    Explain: "explain", Forget: "forget", NoteTexts: "texts",
}  # fmt: skip
