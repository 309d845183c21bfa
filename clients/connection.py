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
from blobstore.errors import BlobStoreError, Busy, DeadlineExceeded
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
        self._reading = threading.RLock()  # knows its owner, so that releasing is always safe
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._followers: deque[_Ticket] = deque()
        self._left_behind: deque[_Ticket] = deque()
        self._gatherer: threading.Thread | None = None
        self._gathering = threading.RLock()
        self._closing = False

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
        led = listed = False
        try:
            try:
                while not ticket.done:
                    if self._reading.acquire(blocking=False):
                        led = True
                        self._read_until(ticket, deadline_s)
                    elif listed:
                        self._sleep(ticket, deadline_s)
                        listed = False
                    else:
                        # Whoever reads looks at the list after it has stopped: it sees this
                        # ticket, or the next turn of the loop sees that nobody reads.
                        ticket.bell = SimpleQueue()
                        self._followers.append(ticket)
                        listed = True
            finally:
                # The release comes before anything that the exception of a signal handler could
                # skip, such as a call to contextlib.suppress.
                try:  # noqa: SIM105
                    self._reading.release()
                except RuntimeError:
                    pass  # another thread read
            if led:
                self._wake_one()
            if ticket.error is not None:
                raise ticket.error
            assert ticket.reply is not None
            return ticket.reply
        except BaseException:
            self.leave(ticket)
            self._wake_one()
            raise

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
                gatherer = threading.Thread(
                    target=self._gather, name="blobstore-gather", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # at exit; the daemon sees that, too
                    gatherer.start()
                    self._gatherer = gatherer

    def close(self) -> None:
        """End all calls, and the connection as soon as no view of leased bytes is left.

        The daemon takes leased bytes back when their lease is released or this
        process exits, so what is held keeps the connection.
        """
        if self._returns.holding and not self.broken_by:
            self._closing = True
            self._fail_pending("the client was closed")
            return
        self._end(CLOSE_WAIT_S)

    def flush(self) -> None:
        """Send what is owed to the daemon, unless that means to wait. Safe anywhere."""
        super().flush()
        if self._closing and not self._returns.holding and not self._returns.owed:
            self._end(0.0)

    def __del__(self) -> None:
        self._sock.close()

    def _end(self, wait_s: float) -> None:
        self._say_goodbye("the client was closed")
        self.fail("the client was closed")
        if self._returns.sender is self:
            self._returns.sender = None
        gatherer = self._gatherer
        if gatherer is not None and gatherer is not threading.current_thread():
            gatherer.join(wait_s)
        # The descriptor's number may be used anew once no thread can be about to use it.
        with contextlib.ExitStack() as locks:
            for lock in (self._reading, self._sending):
                if not lock.acquire(timeout=wait_s):
                    return  # the last reference closes it
                locks.callback(lock.release)
            self._sock.close()

    def _read_until(self, ticket: _Ticket, deadline_s: float) -> None:
        """Read for everybody until `ticket` has its reply."""
        while not ticket.done:
            remaining_s = deadline_s - monotonic()
            try:
                ready = self._poll.poll(remaining_s * 1e3 if remaining_s > 0 else 0)
            except RuntimeError as error:
                raise Busy("called by a signal handler in the middle of a call") from error
            if ready:
                try:
                    self.receive()
                except BaseException:  # interrupted: bytes may be lost, and the place in the stream
                    self.fail("interrupted while receiving")
                    raise
            elif remaining_s <= 0:
                raise DeadlineExceeded("the daemon did not answer in time")

    def _sleep(self, ticket: _Ticket, deadline_s: float) -> None:
        """Until the reply is here, or it is this thread's turn to read."""
        assert ticket.bell is not None
        try:
            ticket.bell.get(timeout=max(deadline_s - monotonic(), 0.0))
        except Empty:
            raise DeadlineExceeded("the daemon did not answer in time") from None

    def _wake_one(self) -> None:
        """Let one of those who sleep read on."""
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
            self._write_unsent()
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
