"""The dashboard: one page at `/`, and the events that keep it live.

The page is one file without outside resources, and the policy that it is sent with
allows nothing but its own script and style. It holds no data: the person who opens it
gives a token once, and the events are asked for with it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import heapq
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from blobstore import __version__
from blobstore.errors import BlobStoreError, Busy
from blobstore.holder import Holder
from blobstore.http.answers import Refusal
from blobstore.http.loop_lag import LoopLag
from blobstore.http.tokens import Token
from blobstore.index import NamespaceState
from blobstore.latencies import Latencies
from blobstore.listing import namespace_facts
from blobstore.store import Store

INTERVAL_S = 1.0
WRITE_TIMEOUT_S = 30.0
VIEWERS_MAX = 32
NAMESPACES_SHOWN = 20
NAMESPACES_SEEN_MAX = 2000
"""Looking at more of them would hold up the loop."""
CLIENTS_SHOWN = 20
LISTS_EVERY = 5
"""Events from one with lists to the next."""

Authorize = Callable[[web.Request], Token]
"""Whose request it is; raises if it carries no valid token."""


def routes(
    store: Store,
    *,
    authorize: Authorize,
    stopping: asyncio.Event,
    latencies: Latencies | None = None,
    lag: LoopLag | None = None,
    interval_s: float = INTERVAL_S,
) -> list[web.RouteDef]:
    """`GET /` for everybody, and `GET /v1/events` for those whom `authorize` lets pass.

    Streams of events end when `stopping` is set, and when `authorize` refuses
    their token. Raises Busy if too many look on at once.
    """
    page = _Page((Path(__file__).parent / "dashboard.html").read_bytes())
    snapshots = Snapshots(store, latencies, lag)
    events = _Events(snapshots, authorize, stopping, interval_s)
    return [web.get("/", page.get), web.get("/v1/events", events.get, allow_head=False)]


class Snapshots:
    """What the page shows, as one JSON document a time."""

    def __init__(self, store: Store, latencies: Latencies | None, lag: LoopLag | None) -> None:
        self._store = store
        self._latencies = latencies
        self._lag = lag

    def now(self, token: Token, *, lists: bool) -> dict[str, Any]:
        """Everything as it is now; namespaces and clients one by one only if asked for."""
        stats = self._store.stats()
        return {
            "version": __version__,
            "boot": f"{stats.pop('boot_id'):016x}",  # as a number, browsers would round it
            "stats": stats,
            "lag": _lag(self._lag),
            **_operations(self._latencies),
            "listed": self._listed(token) if lists else None,
        }

    def _listed(self, token: Token) -> dict[str, Any]:
        every = self._store.index.namespaces
        seen = islice(every.values(), NAMESPACES_SEEN_MAX)
        readable = (state for state in seen if token.sees(state.namespace.model))
        largest = heapq.nlargest(NAMESPACES_SHOWN, readable, key=_nbytes_held)
        return {
            "seen": min(len(every), NAMESPACES_SEEN_MAX),
            "namespaces": [namespace_facts(state) for state in largest],
            "clients": self._clients() if token.sees_all else None,
        }

    def _clients(self) -> list[dict[str, Any]]:
        """Those that hold most."""
        busiest = heapq.nlargest(CLIENTS_SHOWN, self._store.holders, key=_held_by)
        return [
            {
                "name": holder.name,
                "pid": holder.pid,
                "connections": holder.connections,
                "leases": len(holder.leases),
                "reservations": len(holder.reservations),
                "lent_bytes": holder.lent_bytes,
            }
            for holder in busiest
        ]


class _Page:
    def __init__(self, document: bytes) -> None:
        self._document = document
        self._headers = {
            "Content-Security-Policy": policy(document.decode()),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(document).hexdigest()[:32]}"',
        }

    async def get(self, request: web.Request) -> web.Response:
        """The document, or that the browser has it."""
        if request.headers.get("If-None-Match") == self._headers["ETag"]:
            return web.Response(status=304, headers=self._headers)
        return web.Response(
            body=self._document, content_type="text/html", charset="utf-8", headers=self._headers
        )


class _Events:
    def __init__(
        self,
        snapshots: Snapshots,
        authorize: Authorize,
        stopping: asyncio.Event,
        interval_s: float,
    ) -> None:
        self._snapshots = snapshots
        self._authorize = authorize
        self._stopping = stopping
        self._interval_s = interval_s
        self._n_viewers = 0

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One event each interval, until either side leaves."""
        self._authorize(request)
        with self._viewer():
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream",
                    "Cache-Control": "no-store",
                    "X-Content-Type-Options": "nosniff",
                    "X-Accel-Buffering": "no",  # proxies that buffer would hold events back
                }
            )
            with suppress(ConnectionResetError):  # the browser left
                await response.prepare(request)
                await self._send_all(request, response)
            return response

    async def _send_all(self, request: web.Request, response: web.StreamResponse) -> None:
        number = 0
        while not self._stopping.is_set():
            try:
                token = self._authorize(request)
            except (Refusal, BlobStoreError, web.HTTPException):  # the token has expired
                return
            lists = number % LISTS_EVERY == 0
            body = msgspec.json.encode(self._snapshots.now(token, lists=lists))
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(b"data: " + body + b"\n\n")
            except TimeoutError:  # nobody reads
                if request.transport is not None:
                    request.transport.abort()
                return
            number += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._interval_s)

    @contextmanager
    def _viewer(self) -> Iterator[None]:
        if self._n_viewers >= VIEWERS_MAX:
            raise Busy(f"{VIEWERS_MAX} dashboards are open, the most there may be")
        self._n_viewers += 1
        try:
            yield
        finally:
            self._n_viewers -= 1


def policy(document: str) -> str:
    """The Content-Security-Policy under which this document works and nothing else does."""
    allowed = {
        kind: " ".join(map(_hash_of, re.findall(f"<{kind}>(.*?)</{kind}>", document, re.DOTALL)))
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _nbytes_held(state: NamespaceState) -> int:
    """In all tiers together."""
    return state.dram_bytes + state.ssd_bytes


def _held_by(holder: Holder) -> tuple[int, int, int]:
    """What makes it one of those that are shown."""
    return holder.lent_bytes, len(holder.leases), holder.connections


def _lag(lag: LoopLag | None) -> Mapping[str, float] | None:
    if lag is None:
        return None
    return {"last_s": lag.last_s, "max_s": lag.max_s, "p99_s": lag.p99_s}


def _operations(latencies: Latencies | None) -> dict[str, Any]:
    if latencies is None:
        return {"bounds_s": [], "operations": [], "failures": [], "slowest": []}
    now_s = latencies.clock()
    histograms = list(latencies.histograms())
    return {
        "bounds_s": histograms[0][2].bounds_s if histograms else [],
        "operations": [
            {
                "door": door,
                "verb": verb,
                "counts": histogram.counts,
                "longest_s": histogram.longest_s,
            }
            for door, verb, histogram in histograms
        ],
        "failures": [
            {"door": door, "verb": verb, "error": error, "count": n}
            for door, verb, error, n in latencies.failures()
        ],
        "slowest": [
            {
                "door": slow.door,
                "verb": slow.verb,
                "seconds": slow.seconds,
                "ago_s": now_s - slow.ended_s,
            }
            for slow in latencies.slowest()
        ],
    }
