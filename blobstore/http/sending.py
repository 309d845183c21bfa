"""Sending bytes of the arena to a peer that may be slow, stop, or be gone.

The kernel copies them out of the arena, a step at a time: nothing of ours keeps a
reference to memory that belongs to another blob once the lease has ended. The event
loop's own transport would keep a view of what the peer has not taken yet; so the
socket is written beside it, which is right only while the transport has nothing left
to write. Over TLS the transport encrypts: it gets copies.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

from aiohttp import web

STEP_BYTES = 256 << 10
STEPS_AT_ONCE = 4
"""Between two chances for others: a peer that reads fast never makes us wait."""
TRANSPORT_BYTES = 256 << 10
"""What the transport may hold of a response over TLS."""


class Sender:
    """Writes the body of one response whose headers are prepared. Close it in any case."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, timeout_s: float
    ) -> None:
        if request.transport is None:
            raise ConnectionResetError("the peer has gone")
        self._request = request
        self._response = response
        self._timeout_s = timeout_s
        self._transport = request.transport
        self._socket: socket.socket | None = None
        self._steps = 0

    async def start(self) -> None:
        """Send the headers, and wait until the kernel has them."""
        if self._transport.get_extra_info("sslcontext") is not None:
            self._transport.set_write_buffer_limits(high=TRANSPORT_BYTES)
            return
        self._transport.set_write_buffer_limits(high=0)
        self._request.writer.send_headers()
        async with asyncio.timeout(self._timeout_s):
            await self._request.writer.drain()
        if self._transport.is_closing() or self._transport.get_write_buffer_size():
            raise ConnectionResetError("the peer has gone")
        fd = os.dup(self._transport.get_extra_info("socket").fileno())
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    async def send(self, data: memoryview) -> None:
        """Send `data`; each step of it must be taken in time. Raises OSError (TimeoutError)."""
        for start in range(0, data.nbytes, STEP_BYTES):
            step = data[start : start + STEP_BYTES]
            async with asyncio.timeout(self._timeout_s):
                if self._socket is None:
                    await self._response.write(bytes(step))
                else:
                    await asyncio.get_running_loop().sock_sendall(self._socket, step)
            self._steps += 1
            if self._steps % STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def close(self) -> None:
        """Give the socket back to the transport alone."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def abort(self) -> None:
        """Break the connection: what was sent is not what was promised."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()
        self._transport.abort()


async def send_answer(
    request: web.Request, response: web.StreamResponse, timeout_s: float
) -> web.StreamResponse:
    """Send a whole answer, in steps that must each be taken in time; else the connection ends."""
    body = response.body if isinstance(response, web.Response) else None
    try:
        if isinstance(body, bytes) and len(body) > STEP_BYTES and request.method != "HEAD":
            return await _send_in_steps(request, response, body, timeout_s)
        async with asyncio.timeout(timeout_s):
            await response.prepare(request)
            await response.write_eof()
            await request.writer.drain()
    except OSError:  # TimeoutError is one; a peer that has gone, too
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send_in_steps(
    request: web.Request, response: web.StreamResponse, body: bytes, timeout_s: float
) -> web.StreamResponse:
    stream = web.StreamResponse(status=response.status, headers=response.headers)
    stream.content_length = len(body)
    if response.keep_alive is False:
        stream.force_close()
    await stream.prepare(request)
    for start in range(0, len(body), STEP_BYTES):
        async with asyncio.timeout(timeout_s):
            await stream.write(body[start : start + STEP_BYTES])
    async with asyncio.timeout(timeout_s):
        await stream.write_eof()
    return stream
