"""The daemon as the connector sees it: there, not there yet, or to be left alone for a moment.

Both halves of the connector may live in one process; they share one client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from blobstore.clients.sync import Client
from blobstore.clients.vllm.breaker import Breaker
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.late_client import LateClient
from blobstore.clients.vllm.reasons import DEADLINE, UNAVAILABLE

CONNECT_S = 1.0
"""A daemon on this machine greets within milliseconds, and within this when cores are busy."""
PING_S = 0.25
"""It answers pings whatever its disks do: one that takes longer is frozen."""


class Daemon:
    """A client that is there when the daemon is, and a breaker for when it does not answer.

    Args:
        address: of the daemon, for messages.
        connect: makes a client, or raises.
        breaker: keeps attempts apart.
    """

    def __init__(
        self, address: str, connect: Callable[[], Client], breaker: Breaker | None = None
    ) -> None:
        self._address = address
        self._breaker = breaker or Breaker()
        self._late = LateClient(connect, self._breaker)
        self._faults = Faults()
        self._met = False

    @property
    def usable(self) -> bool:
        """Whether it makes sense to ask it something. Costs nothing."""
        return not self._breaker.open

    def reach(self) -> Client | None:
        """The client, connected if need be: for background threads. None: all is a miss."""
        if self._breaker.open:
            return None
        client = self._late.reach()
        if client is not None:
            self._met = True
        elif self._breaker.open:
            self._say(self._late.reason)
        return client

    def note(self, reason: str) -> None:
        """How a call ended, by the reason that it gave; for background threads.

        A deadline may be that of a slow disk, so the daemon is asked whether it is there.
        """
        if reason == DEADLINE and self._answers():
            return
        if reason in (UNAVAILABLE, DEADLINE):
            self._breaker.failed()
            if reason == DEADLINE or not self._met:  # else the client has said that it is lost
                self._say("it does not answer")
        else:
            self._breaker.worked()
            self._faults.note(self._what, "")

    def close(self) -> None:
        """Disconnect, for good."""
        self._late.close()

    def _answers(self) -> bool:
        client = self._late.now()
        return client is not None and client.ping(timeout_s=PING_S)

    def _say(self, why: str) -> None:
        self._faults.note(self._what, f"{why}; prompts are computed in full until it is there")

    @property
    def _what(self) -> str:
        return f"the store at {self._address}"


_lock = threading.Lock()
_shared: dict[str, tuple[Daemon, int]] = {}


def borrow(address: str) -> Daemon:
    """The one for `address` in this process; whoever borrows it gives it back."""
    with _lock:
        connect = partial(Client, address, timeout_s=CONNECT_S)
        daemon, users = _shared.get(address) or (Daemon(address, connect), 0)
        _shared[address] = daemon, users + 1
    return daemon


def give_back(address: str) -> None:
    """Disconnect if nobody else in this process uses it."""
    with _lock:
        daemon, users = _shared.pop(address)
        if users > 1:
            _shared[address] = daemon, users - 1
            return
    daemon.close()
