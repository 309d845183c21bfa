"""One POST to an address that a client of ours named, of whose answer only the status counts.

Whoever is there may be anybody: heads are bounded in size and number, bodies are passed over,
and reading stops while nobody takes what came. It is no client of the web at large: one
connection for one request, no redirects, no cookies, no proxies.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from ssl import SSLContext

from yarl import URL

CONNECT_S = 5.0
HEAD_BYTES_MAX = 16 << 10
INTERIM_MAX = 8
"""Heads that say to wait, such as 100 Continue, before the one that counts."""
REST_BYTES_MAX = 64 << 10
REST_S = 1.0
"""So much of a body, and for so long, is let come, so that nobody sees a connection break."""

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)[ \r]")


async def post_json(url: URL, body: bytes, tls: SSLContext | None) -> int:
    """Post `body`; the status of the answer. `tls` is for https.

    Has no time limit of its own but for connecting: cancelling it closes the connection.
    Raises OSError, and ValueError for an answer that is not HTTP or says too much before it.
    """
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(
            url.raw_host, url.port, ssl=tls, limit=HEAD_BYTES_MAX
        )
    try:
        writer.write(_head(url, len(body)))
        writer.write(body)
        await writer.drain()
        status = await _status(reader)
        with suppress(asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(REST_S):
                await reader.readexactly(REST_BYTES_MAX)
        return status
    finally:
        writer.transport.abort()


def _head(url: URL, nbytes: int) -> bytes:
    lines = (
        f"POST {url.raw_path_qs} HTTP/1.1",
        f"Host: {url.host_port_subcomponent}",
        "Content-Type: application/json",
        f"Content-Length: {nbytes}",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


async def _status(reader: asyncio.StreamReader) -> int:
    for _ in range(INTERIM_MAX + 1):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("closed before an answer") from None
        except asyncio.LimitOverrunError:
            raise ValueError(f"a head of more than {HEAD_BYTES_MAX} bytes") from None
        found = _STATUS.match(head)
        if found is None:
            raise ValueError("an answer that is not HTTP")
        if (status := int(found[1])) >= 200:
            return status
    raise ValueError(f"more than {INTERIM_MAX} heads before an answer")
