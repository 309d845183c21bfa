"""The connections of one client that are idle, and how a request is performed on one."""

from __future__ import annotations

import threading
import time

from blobstore.clients import forks
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_exchange import Exchange, HttpSteps
from blobstore.clients.http_lookup import Lookup
from blobstore.clients.http_wire import Unanswered, Wire, connect

CONNECTIONS_MAX = 8
"""Of one client at a time, idle and in use."""
IDLE_S = 60.0
"""An older one is not used: what lies between may have forgotten it without a word."""


class Pool:
    """Idle connections, the one that was used last first. Bounded by who performs."""

    def __init__(self, address: HttpAddress) -> None:
        self.address = address
        self._idle: list[tuple[float, Wire]] = []
        self._lock = threading.RLock()
        self._closed = False
        self.lookup = Lookup()
        forks.watch(self)

    def perform(self, exchange: Exchange) -> HttpSteps[None]:
        """Send a request and take in its answer.

        Once more on a new connection, if the daemon closed an idle one just before a byte
        of an answer: every request may be repeated. Raises Unavailable and the like.
        """
        wire = self._take()
        if wire is not None:
            try:
                yield from self._perform_on(wire, exchange)
            except Unanswered:
                pass
            else:
                return
        wire = yield from connect(self.address)
        yield from self._perform_on(wire, exchange)

    def close(self) -> None:
        """Close what is idle, and what is in use when it no longer is."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, wire in idle:
            wire.close()

    def leave_parent(self) -> None:
        """In a forked child: the connections are the parent's. Closing them here cuts none."""
        self._lock = threading.RLock()
        self._idle = []

    def _perform_on(self, wire: Wire, exchange: Exchange) -> HttpSteps[None]:
        reusable = False
        try:
            reusable = yield from wire.perform(exchange)
        finally:
            if not (reusable and self._keep(wire)):
                wire.close()

    def _take(self) -> Wire | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since_s, wire = self._idle.pop()
            if time.monotonic() - since_s < IDLE_S and wire.is_idle:
                return wire
            wire.close()

    def _keep(self, wire: Wire) -> bool:
        with self._lock:
            if self._closed or len(self._idle) >= CONNECTIONS_MAX:
                return False
            self._idle.append((time.monotonic(), wire))
            return True
