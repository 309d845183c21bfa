"""Connections, below all requests: what is no HTTP, and what is one too many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from blobstore.http import answers
from blobstore.http.answers import Refusal

KEEPALIVE_S = 75.0
"""For an idle connection, and for a request's headers."""
LINGER_S = 5.0
"""Taken and thrown away for so long: the rest of a body that was refused."""
READ_BYTES = 128 << 10
"""Low mark of what is buffered of a body; twice as much stops the peer."""
SERVER = "blobstore"
"""Not which libraries, of which version."""
BOOT = "X-Blobstore-Boot"
"""`boot_id`: another one means that what was only in DRAM has gone."""


class Peer(web.RequestHandler):
    """One connection. What is no HTTP is answered like every other mistake."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what the parser refused, or to what failed outside of all handlers."""
        super().handle_error(request, status, exc, message)  # logs it
        response = answers.refusal(_not_http(message or "")) if status == 400 else answers.broken()
        response.headers["Server"] = SERVER
        response.force_close()
        return response


class Full(asyncio.Protocol):
    """A connection above the limit: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The only event that matters."""
        body = answers.refusal(
            Refusal(503, "busy", "too many connections are open", retry_after_s=1.0)
        ).body
        assert isinstance(body, bytes)
        stream = cast("asyncio.Transport", transport)
        stream.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        stream.close()


def peer_of(server: web.Server) -> Peer:
    """The protocol of a new connection to `server`."""
    return Peer(
        server,
        loop=asyncio.get_running_loop(),
        access_log=cast("Any", None),
        logger=_log(),
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGER_S,
        read_bufsize=READ_BYTES,
        auto_decompress=False,
    )


def signer(boot_id: int) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Names the service, and this run of it, in answers whose headers are about to be sent."""
    boot = str(boot_id)

    async def sign(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER
        response.headers[BOOT] = boot

    return sign


def _not_http(message: str) -> Refusal:
    # What follows the colon repeats what was sent, which may be a token.
    said = message.partition(":")[0].rstrip(". ")
    why = said if " " in said else "its target is no URL"
    return Refusal(400, "invalid_request", f"this is not HTTP/1.1: {why}")


def _log() -> logging.Logger:
    """Where aiohttp logs. What peers send that is not HTTP is their fault, and no news."""
    wire = logging.getLogger(__name__)
    if not wire.filters:
        wire.addFilter(_is_ours)
    return wire


def _is_ours(record: logging.LogRecord) -> bool:
    cause = record.exc_info[1] if record.exc_info else None
    return not isinstance(cause, HttpProcessingError)
