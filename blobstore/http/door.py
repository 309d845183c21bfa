"""The HTTP door: connections, who is let in, errors as answers, and the end.

The handlers are in `blobs` and `verbs`. For the store the door is one process that
uses it: whatever a request was lent comes back when that ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web

from blobstore.errors import BlobStoreError, Busy, InvalidRequest, Unavailable
from blobstore.http import answers, bodies, openapi, room, wire
from blobstore.http.accepting import Acceptor
from blobstore.http.answers import Refusal
from blobstore.http.blobs import Blobs
from blobstore.http.context import Context
from blobstore.http.listen import Address, Names, bind, joined
from blobstore.http.operations import Operations
from blobstore.http.rebuilders import Rebuilders
from blobstore.http.sending import send_answer
from blobstore.http.texts import TextVerbs
from blobstore.http.tokens import Tokens
from blobstore.http.verbs import Verbs
from blobstore.latencies import Latencies
from blobstore.store import Store

REQUESTS_MAX = 1024
LAST_REPLY_S = 0.5
HASH_THREADS = 2
DRAIN_POLL_S = 0.01
TOKENS_EVERY_S = 2.0

OPEN = frozenset({"/healthz", "/readyz"})
"""Asked for by address, by whatever watches the daemon; also while it drains."""
CUT = "cut"
"""The code of what a peer did not wait for, or did not take."""
OUTCOMES = frozenset({"miss", "divergent"})
"""Codes of what is no failure."""
ENDLESS = frozenset({"/v1/events"})
"""Streams that are not waited for."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorTerms:
    """How the door is set up; see config.HttpSection."""

    listen: Address
    tokens: Tokens
    tls: ssl.SSLContext | None = None
    hosts: tuple[str, ...] = ()
    connections_max: int = 4096
    io_timeout_s: float = 30.0


class HttpDoor:
    """Serves one store on one address."""

    def __init__(
        self,
        store: Store,
        terms: DoorTerms,
        *,
        latencies: Latencies | None = None,
        connections: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        """`latencies` are noted by all doors; `connections` counts those of the others."""
        self._store = store
        self._terms = terms
        self._names = Names(terms.listen[0], terms.hosts)
        self._draining = asyncio.Event()
        self._room = room.Room()
        self._in_flight: dict[web.RequestHandler, web.Request] = {}
        self._pool = ThreadPoolExecutor(HASH_THREADS, "http-hash")
        self._holder = store.attach(self, pid=os.getpid(), name="http")
        self._context = Context(store, self._holder, terms.tokens, self._pool, terms.io_timeout_s)
        self._latencies = latencies or Latencies()
        self._operations = Operations(
            self._context,
            self._draining,
            self._latencies,
            {"http": lambda: self.n_connections, **(connections or {})},
        )
        self._blobs = Blobs(self._context)
        self._rebuilders = Rebuilders(self._context)
        self._runner: web.AppRunner | None = None
        self._acceptor: Acceptor | None = None
        self._address = ""
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Its URL, once it has started."""
        return self._address

    @property
    def n_connections(self) -> int:
        """Open connections."""
        return len(self._connections())

    async def start(self) -> None:
        """Bind and serve. Raises SetupError if the address cannot be had."""
        terms, loop = self._terms, asyncio.get_running_loop()
        listeners = bind(terms.listen, tls=terms.tls is not None)
        with contextlib.ExitStack() as undo:
            for listener in listeners:
                undo.callback(listener.close)
            scheme = "https" if terms.tls is not None else "http"
            port = listeners[0].getsockname()[1]
            self._address = f"{scheme}://{joined(terms.listen[0], port)}"
            self._runner = web.AppRunner(
                self._app(), handler_cancellation=True, shutdown_timeout=LAST_REPLY_S
            )
            await self._runner.setup()
            server = self._runner.server
            assert server is not None
            undo.pop_all()
            self._acceptor = Acceptor(listeners, server, terms.tls, terms.connections_max)
        self._operations.start()
        self._watch = loop.create_task(self._watch_tokens())

    async def close(self, drain_s: float = 5.0) -> None:
        """Refuse new requests, let those in flight end for `drain_s`, close all. Again is harmless.

        Idle connections end at once. The address is kept until then, so that whoever
        watches it learns that the daemon is stopping.
        """
        self._draining.set()
        await self._rebuilders.close()
        if self._watch is not None:
            self._watch.cancel()
        for connection in self._connections():
            if connection not in self._in_flight:
                connection.force_close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + drain_s
        while self._awaited() and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        if self._acceptor is not None:
            await self._acceptor.close()
        for request in list(self._in_flight.values()):
            if request.transport is not None:
                request.transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._blobs.close()
        await self._operations.close()
        self._store.gone(self._holder)
        await loop.run_in_executor(None, self._pool.shutdown)

    async def _watch_tokens(self) -> None:
        """Their files are looked at on a thread: a disk may hang."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TOKENS_EVERY_S)
            await loop.run_in_executor(None, self._terms.tokens.refresh)

    def _awaited(self) -> bool:
        return any(request.path not in ENDLESS for request in self._in_flight.values())

    def _connections(self) -> list[web.RequestHandler]:
        server = self._runner.server if self._runner is not None else None
        return server.connections if server is not None else []

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=bodies.JSON_BYTES_MAX)
        app.on_response_prepare.append(wire.signer(self._store.boot_id))
        app[room.KEY] = self._room
        app.add_routes(self._blobs.routes())
        app.add_routes(Verbs(self._context, self._draining).routes())
        app.add_routes(TextVerbs(self._context).routes())
        app.add_routes(self._rebuilders.routes())
        app.add_routes(openapi.routes())
        app.add_routes(self._operations.routes())
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every request passes here, from its headers to the last byte of its answer."""
        protocol = request.protocol
        started_s = self._latencies.clock()
        self._in_flight[protocol] = request  # of a connection there is one at a time
        error = CUT
        try:
            response, error = await self._answer(request, handler)
            if not response.prepared:
                if self._draining.is_set():
                    response.force_close()
                response = await send_answer(request, response, self._terms.io_timeout_s)
        finally:
            del self._in_flight[protocol]
            self._room.leave(request)
            verb = _verb(request)
            if verb:
                self._latencies.note("http", verb, started_s, error)
        return response

    async def _answer(
        self, request: web.Request, handler: Handler
    ) -> tuple[web.StreamResponse, str]:
        """The handler's answer, or the one for what it raised, and that one's code."""
        try:
            self._admit(request)
            response = await handler(request)
            if not response.prepared:
                self._room.take(request, _nbytes_of(response) - room.UNCOUNTED_BYTES)
            return response, ""
        except Refusal as refusal:
            return answers.refusal(refusal), "" if refusal.code in OUTCOMES else refusal.code
        except BlobStoreError as fault:
            response = answers.failure(fault)
            if response.status == 500:
                log.error("%s %s failed", request.method, request.path, exc_info=fault)
            return response, fault.code
        except web.HTTPException as unserved:
            return _of_aiohttp(unserved), "unserved"
        except (bodies.Cut, ConnectionError) as cut:
            return bodies.broken_off(request, cut), CUT
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return answers.broken(), "error"

    def _admit(self, request: web.Request) -> None:
        """Refuse what no handler should see."""
        if request.path in OPEN:
            return
        host = _host(request)
        if not self._names.admit(host):
            raise Refusal(
                421, "misdirected",
                f"Host {host[:80]!r} is not served here: name it in http.hosts if it should be",
            )  # fmt: skip
        _check_query(request)
        if self._draining.is_set():
            raise Unavailable("the daemon is stopping", retry_after_s=1.0)
        if len(self._in_flight) > REQUESTS_MAX:
            raise Busy(f"{REQUESTS_MAX} requests are in flight, the most", retry_after_s=1.0)


def _nbytes_of(response: web.StreamResponse) -> int:
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) else 0


def _host(request: web.Request) -> str:
    """Whom a request is for: of a target with a host that one counts, not the header."""
    hosts = request.headers.getall("Host", ())
    if len(hosts) != 1:
        raise Refusal(400, "invalid_request", "a request names one Host")
    if request.raw_path.startswith("/"):
        return hosts[0]
    return request.url.raw_authority


def _check_query(request: web.Request) -> None:
    """A misspelt `parent` that is ignored would store a blob at another place of the tree."""
    verb = _verb(request)
    if not (verb and request.query):
        return
    known = openapi.QUERIES[verb]
    for name in request.query:
        if name not in known or len(request.query.getall(name)) > 1:
            say = f"known are {', '.join(sorted(known))}" if known else "this takes none"
            raise InvalidRequest(f"{name[:40]!r} in the query is unknown, or twice there: {say}")


def _verb(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return openapi.VERBS.get((request.method, resource.canonical), "") if resource else ""


def _of_aiohttp(error: web.HTTPException) -> web.Response:
    """What the router raises: no such path, or not with this method."""
    code = {404: "not_found", 405: "method_not_allowed", 413: "frame_too_large"}.get(
        error.status, "invalid_request"
    )
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    message = error.reason
    if error.status == 404:
        message = "there is no such route: /openapi.json describes those that there are"
    elif headers:
        message = f"this route is for {headers['Allow']}"
    return answers.refusal(Refusal(error.status, code, message, headers=headers))
