"""Taking in connections, up to a limit that holds from the moment they are there.

A server of the event loop calls a connection one only when its TLS handshake is done: any
number of them could stall before it, until there is no descriptor left for anybody.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress

from aiohttp import web

from blobstore.http import wire

HANDSHAKE_S = 10.0
SHUTDOWN_S = 3.0
"""For the peer's goodbye over TLS."""
EXHAUSTED_S = 0.2
"""Until the next try when there is no descriptor for another connection."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class Acceptor:
    """Hands the connections that come to `listeners` to `server`. Owns the listeners."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        server: web.Server,
        tls: ssl.SSLContext | None,
        connections_max: int,
    ) -> None:
        self._listeners = listeners
        self._server = server
        self._tls = tls
        self._connections_max = connections_max
        self._arriving: set[asyncio.Task[None]] = set()
        self._accepting = [asyncio.ensure_future(self._accept(each)) for each in listeners]
        self._exhausted = False

    @property
    def n_connections(self) -> int:
        """Open connections, and those whose handshake goes on."""
        return len(self._server.connections) + len(self._arriving)

    async def close(self) -> None:
        """Take in no more; those that are complete stay."""
        tasks = [*self._accepting, *self._arriving]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                await self._recover(error)
                continue
            self._exhausted = False
            sock.setblocking(False)
            self._take(sock)
            await asyncio.sleep(0)  # a crowd at the door holds up nobody inside

    async def _recover(self, error: OSError) -> None:
        if error.errno not in _EXHAUSTED:
            return  # that peer has gone already
        if not self._exhausted:
            self._exhausted = True
            log.error("cannot take in connections: %s", error.strerror)
        await asyncio.sleep(EXHAUSTED_S)

    def _take(self, sock: socket.socket) -> None:
        has_room = self.n_connections < self._connections_max
        if not has_room and self._tls is not None:
            sock.close()  # to say why would take a handshake
            return
        task = asyncio.ensure_future(self._arrive(sock, has_room))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _arrive(self, sock: socket.socket, has_room: bool) -> None:
        loop, tls = asyncio.get_running_loop(), self._tls
        with suppress(OSError):  # ssl.SSLError and TimeoutError are: the handshake failed
            await loop.connect_accepted_socket(
                (lambda: wire.peer_of(self._server)) if has_room else wire.Full,
                sock,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
                ssl_shutdown_timeout=SHUTDOWN_S if tls is not None else None,
            )
