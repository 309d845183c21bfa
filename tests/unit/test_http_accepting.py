"""Taking in connections: limits, and descriptors that run out."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from blobstore.http import accepting
from blobstore.http.accepting import Acceptor

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="here")


@asynccontextmanager
async def acceptor(connections_max: int) -> AsyncIterator[tuple[Acceptor, int]]:
    """One on a free port, and that port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    server = web.Server(answer)
    found = Acceptor([listener], server, None, connections_max)
    try:
        yield found, port
    finally:
        await found.close()
        await server.shutdown()


async def test_more_than_the_limit_are_told_so() -> None:
    async with acceptor(2) as (found, port):
        peers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in peers[:2]:
            writer.write(REQUEST)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert (await peers[2][0].read()).startswith(b"HTTP/1.1 503 ")
        assert found.n_connections == 2
        for _, writer in peers:
            writer.close()


async def test_it_goes_on_when_there_are_descriptors_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    real = loop.sock_accept
    ahead = [errno.ECONNABORTED, errno.EMFILE, errno.EMFILE, errno.ENFILE]

    async def sock_accept(listener: socket.socket) -> tuple[socket.socket, object]:
        if ahead:
            raise OSError(ahead.pop(0), "not now")
        return await real(listener)

    monkeypatch.setattr(accepting, "EXHAUSTED_S", 0.0)
    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    async with acceptor(2) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert not ahead
    assert caplog.text.count("cannot take in connections") == 1


async def test_closing_it_frees_the_address_and_keeps_who_is_in() -> None:
    async with acceptor(2) as (found, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await found.close()
        socket.create_server(("127.0.0.1", port)).close()
        writer.write(REQUEST)
        assert b"200 OK" in await reader.readuntil(b"hereHTTP/1.1 200 OK")
        writer.close()
