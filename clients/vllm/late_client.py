"""A client of a daemon that may not be there yet: the engine starts without it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blobstore.clients.sync import Client
from blobstore.clients.vllm.breaker import Breaker
from blobstore.clients.vllm.reasons import UNAVAILABLE
from blobstore.errors import BlobStoreError


class LateClient:
    """Connects when it is first needed, in whatever thread needs it.

    Args:
        connect: makes a client, or raises.
        breaker: keeps attempts apart.
    """

    def __init__(self, connect: Callable[[], Client], breaker: Breaker) -> None:
        self._connect = connect
        self._breaker = breaker
        self._connecting = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self.reason = UNAVAILABLE
        """Why there was no client when one was last wanted."""

    def now(self) -> Client | None:
        """The client, if there is one already. Costs nothing."""
        return self._client

    def reach(self) -> Client | None:
        """The client; None if there is no daemon.

        May take as long as connecting does, in this thread or another one. What a daemon
        that is known answers, or whether it does, is its caller's to find out.
        """
        if self._client is not None or self._closed or self._breaker.open:
            return self._client
        with self._connecting:
            if self._client is None and not self._breaker.open:
                self._client = self._connected()
            return self._client

    def close(self) -> None:
        """Disconnect, and never connect again."""
        self._closed = True
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Client | None:
        if self._closed:
            return None
        try:
            client = self._connect()
        except BlobStoreError as error:
            self.reason = error.code
            self._breaker.failed()
            return None
        self._breaker.worked()
        return client
