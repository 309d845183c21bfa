"""A connection shared by threads.

There is no reader thread, which would cost two switches a call. A thread that
waits for a reply reads the socket if nobody else does, and hands others theirs;
when it has its own, it wakes one of them to read on.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from queue import Empty, SimpleQueue
from time import monotonic

from blobstore.clients.link import Link, Ticket
from blobstore.clients.session import Session
from blobstore.errors import BlobStoreError, DeadlineExceeded
from blobstore.protocol import Get, Reply, Request, Reserve

CLOSE_WAIT_S = 1.0
"""How long close waits for threads in a call to notice. Only one stopped by a signal
handler that closes the client does not: it notices when the handler has returned."""

_FOREVER_S = 1e6  # about the longest that poll takes


class _Ticket(Ticket):
    """A ticket whose owner may be asleep while another thread reads."""

    __slots__ = ("bell",)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.bell: SimpleQueue[None] | None = None

    def notify(self) -> None:
        """Wake the owner: it has its reply, or it is its turn to read."""
        if self.bell is not None:
            self.bell.put(None)


class Connection(Link):
    """A link whose callers are threads, which wait until their deadlines."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        super().__init__(sock, session)
        self._reading = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._followers: deque[_Ticket] = deque()
        self._left_behind: deque[_Ticket] = deque()
        self._gatherer: threading.Thread | None = None
        self._gathering = threading.Lock()

    def ask(self, request: Request, deadline_s: float) -> Reply:
        """The reply to `request`. Raises as `begin` and `wait` do."""
        return self.wait(self.begin(request, deadline_s), deadline_s)

    def begin(self, request: Request, deadline_s: float) -> Ticket:
        """Send `request` whole, or as much as the daemon reads before the deadline."""
        ticket = _Ticket(request)
        self.post(ticket)
        if self._unsent:
            try:
                self._send_unsent(deadline_s)
            except BaseException:
                self.leave(ticket)
                raise
        return ticket

    def wait(self, ticket: Ticket, deadline_s: float) -> Reply:
        """The reply. Raises DeadlineExceeded, Broken, or the error that the daemon sent.

        When it raises, the connection is as good as before, and what the reply
        lends (now, or when it comes late) is given back.
        """
        assert isinstance(ticket, _Ticket)
        try:
            while not ticket.done:
                if self._reading.acquire(blocking=False):
                    try:
                        self._read_until(ticket, deadline_s)
                    finally:
                        self._reading.release()
                else:
                    self._follow(ticket, deadline_s)
        except BaseException:
            self.leave(ticket)
            raise
        finally:
            if self._followers and not self._reading.locked():
                self._wake_one()
        if ticket.error is not None:
            raise ticket.error
        assert ticket.reply is not None
        return ticket.reply

    def leave(self, ticket: Ticket) -> None:
        """Nobody waits for this reply any longer; what it lends is given back when it comes."""
        assert isinstance(ticket, _Ticket)
        if ticket.done or self.broken_by or not isinstance(ticket.request, Get | Reserve):
            self.forget(ticket)
            return
        # The reply will lend something, so it must be taken in.
        self._left_behind.append(ticket)
        with self._gathering:
            if self._gatherer is None:
                self._gatherer = threading.Thread(
                    target=self._gather, name="blobstore-gather", daemon=True
                )
                self._gatherer.start()

    def close(self) -> None:
        """End all calls, and the connection as soon as no view of leased bytes is left.

        The daemon takes leased bytes back when their lease is released or this
        process exits, so what is held keeps the connection.
        """
        if self._returns.holding and not self.broken_by:
            self._returns.on_owed = self._flush_and_close
            self._fail_pending("the client was closed")
            return
        self.fail("the client was closed")
        gatherer = self._gatherer
        if gatherer is not None and gatherer is not threading.current_thread():
            gatherer.join(CLOSE_WAIT_S)
        self._close_socket(CLOSE_WAIT_S)

    def __del__(self) -> None:
        self._sock.close()

    def _flush_and_close(self) -> None:
        self.flush()
        if not self._returns.holding and not self._returns.owed:
            self._returns.write_off()
            self.fail("the client was closed")
            self._close_socket(0.0)

    def _close_socket(self, wait_s: float) -> None:
        """Close the descriptor, once no thread can be about to use its number."""
        if not self._reading.acquire(timeout=wait_s):
            return  # the last reference closes it
        try:
            if self._sending.acquire(timeout=wait_s):
                self._sock.close()
                self._sending.release()
        finally:
            self._reading.release()

    def _read_until(self, ticket: _Ticket, deadline_s: float) -> None:
        """Read for everybody until `ticket` has its reply."""
        while not ticket.done:
            remaining_s = deadline_s - monotonic()
            if self._poll.poll(remaining_s * 1e3 if remaining_s > 0 else 0):
                try:
                    self.receive()
                except BaseException:  # interrupted: bytes may be lost, and the place in the stream
                    self.fail("interrupted while receiving")
                    raise
            elif remaining_s <= 0:
                raise DeadlineExceeded("the daemon did not answer in time")

    def _follow(self, ticket: _Ticket, deadline_s: float) -> None:
        """Sleep until the reply is here or it is this thread's turn to read."""
        if ticket.bell is None:
            ticket.bell = SimpleQueue()
        self._followers.append(ticket)
        # Whoever reads looks for followers after it has stopped, so one of the two sees the other.
        if ticket.done or not self._reading.locked():
            return
        try:
            ticket.bell.get(timeout=max(deadline_s - monotonic(), 0.0))
        except Empty:
            raise DeadlineExceeded("the daemon did not answer in time") from None

    def _wake_one(self) -> None:
        while self._followers:
            follower = self._followers.popleft()
            if not follower.done:
                follower.notify()
                return

    def _send_unsent(self, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while self._unsent and not self.broken_by and monotonic() < deadline_s:
            poll.poll(max(deadline_s - monotonic(), 0.0) * 1e3)
            try:
                with self._sending:
                    self._write_unsent()
            except BaseException:
                self.fail("interrupted while sending")
                raise
        self.flush()

    def _gather(self) -> None:
        """Take in late replies, so that an idle client keeps nothing lent."""
        while True:
            with self._gathering:
                if not self._left_behind:
                    self._gatherer = None
                    return
                ticket = self._left_behind.popleft()
            with contextlib.suppress(BlobStoreError):  # then it lent nothing
                self.undo(self.wait(ticket, monotonic() + _FOREVER_S))
