"""What a client knows of a daemon that it reaches over HTTP, whichever way it waits."""

from __future__ import annotations

import logging

from blobstore.clients import http_reading, http_writing
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_exchange import Exchange
from blobstore.clients.http_pool import Pool
from blobstore.clients.http_verbs import reply_to
from blobstore.clients.http_wire import Unanswered
from blobstore.clients.steps import Call
from blobstore.errors import (
    BlobStoreError,
    DeadlineExceeded,
    InvalidRequest,
    Retryable,
    Unavailable,
)
from blobstore.protocol import Reply, Report, Request, Stats

ANSWER_S = 0.25
"""How much more time than the daemon its answer may take: it brings the bytes along."""

BOOT_ID_DIGITS = 20

GREETING = Stats()
"""The first request of a client: who is there, and whether the token is good."""

log = logging.getLogger("blobstore.clients")


class HttpContact:
    """An address, its connections, and the run of the daemon that was last found there."""

    reading = http_reading
    writing = http_writing
    lent_bytes_max = 0
    """Nothing is lent."""

    def __init__(self, address: HttpAddress, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._pool = Pool(address)
        self._boot_id = 0
        self._closed = False
        self._lost = False

    @property
    def boot_id(self) -> int:
        """Tells one run of the daemon from the next, as it was told last; 0 if it never was."""
        return self._boot_id

    def call(self, timeout_s: float | None) -> Call:
        """A call that starts now."""
        seconds = self._timeout_s if timeout_s is None else timeout_s
        return Call(seconds, answer_s=ANSWER_S)

    def close(self) -> None:
        """Disconnect. What was got stays valid; later calls miss with the reason "unavailable"."""
        self._closed = True
        self._pool.close()

    def _not_met(self, error: BlobStoreError) -> BlobStoreError:
        """What connecting raises: Unavailable, or InvalidRequest if no repetition helps."""
        url = self._address.url
        if isinstance(error, Unanswered):
            return Unavailable(f"{error}: does it serve {'HTTP' if self._address.tls else 'TLS'}?")
        if isinstance(error, InvalidRequest | Unavailable):
            return error
        if isinstance(error, DeadlineExceeded):
            return Unavailable(f"the daemon at {url} did not answer in time")
        if isinstance(error, Retryable):
            return Unavailable(f"the daemon at {url} cannot serve now: {error}")
        return InvalidRequest(f"{url} refuses this client: {error} ({error.code})")

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the client was closed")

    def _reply_to(self, request: Request, exchange: Exchange) -> Reply:
        reply = reply_to(request, exchange)
        if isinstance(request, Stats) and isinstance(reply, Report):
            boot_id = reply.body.get("boot_id")
            self._boot_id = boot_id if isinstance(boot_id, int) else 0
        return reply

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._address.url} did not answer in time")

    def _settle(self, exchange: Exchange) -> None:
        """Say it once when the daemon is lost, however many calls miss until it is back."""
        if isinstance(exchange.error, Unavailable) and not self._closed:
            if not self._lost:
                self._lost = True
                log.warning("lost the daemon at %s: %s", self._address.url, exchange.error)
        elif exchange.head is not None:
            boot_id = exchange.head.headers.get("x-blobstore-boot", "")
            if boot_id.isascii() and boot_id.isdigit():
                self._boot_id = int(boot_id[:BOOT_ID_DIGITS])
            if self._lost:
                self._lost = False
                log.warning("found the daemon at %s again", self._address.url)
