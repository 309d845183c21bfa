"""One connection to a daemon: frames out, replies in, and what is owed sent along.

The socket never blocks. How to wait for it is the business of the two kinds of
connection, for threads (connection.py) and for an event loop (aio_connection.py).
Many callers share a connection; a request and its reply are told by their id.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import deque

import msgspec

from blobstore.clients import forks
from blobstore.clients.returns import Debts
from blobstore.clients.session import Session
from blobstore.errors import (
    BlobStoreError,
    Busy,
    FrameTooLarge,
    ProtocolError,
    Unavailable,
    from_code,
)
from blobstore.protocol import (
    Failed,
    Leased,
    Reply,
    Request,
    Reserved,
    decode_reply,
    encode,
)
from blobstore.transports.framing import HEADER_BYTES, FrameReader, pack, pack_header

RECEIVE_BYTES = 64 << 10
UNSENT_BYTES_MAX = 16 << 20
"""A daemon that has not read this much is taken for dead."""

_encode_into = msgspec.msgpack.Encoder().encode_into
_REQUEST_ID_MAX = (1 << 32) - 1
_NO_REPLY = 0


class Broken(Unavailable):
    """This connection is of no further use; another may be."""


class Ticket:
    """The place of one reply."""

    __slots__ = ("done", "error", "reply", "request", "request_id")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = 0
        self.done = False
        self.reply: Reply | None = None
        self.error: BlobStoreError | None = None

    def settle(self, reply: Reply) -> None:
        """The reply is here."""
        if type(reply) is Failed:
            self.error = from_code(reply.code, reply.message, reply.retry_after_s)
        else:
            self.reply = reply
        self.done = True
        self.notify()

    def fail(self, error: BlobStoreError) -> None:
        """No reply will come."""
        self.error = error
        self.done = True
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits, if it can be asleep."""


class Link:
    """The half of a connection that does not wait. Takes over the connected socket.

    Any thread may send; one at a time may call receive.
    """

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.session = session
        self.broken_by = ""
        """Why it is of no further use; empty while it is."""
        self._sock = sock
        self._boot_id = session.boot_id
        self._max_body_bytes = session.terms.max_body_bytes
        self._returns = session.returns
        self._reader = FrameReader()
        # Taken by `with`, or released whether taken or not, which only a lock that knows its
        # owner allows: otherwise the exception of a signal handler could leave it taken.
        # A finalizer in the middle of a send can enter it again: `_busy` tells.
        self._sending = threading.RLock()
        self._busy = False
        self._frame = bytearray(HEADER_BYTES)
        """The frame being sent, used again for the next: less to allocate and to copy."""
        self._numbers = itertools.count()
        self._pending: dict[int, Ticket] = {}
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._unsettled: deque[Debts] = deque()
        """Whose message is the first of what is unsent."""
        self._returns.sender = self
        forks.watch(self)

    def post(self, ticket: Ticket) -> None:
        """Send the ticket's request; the reply goes to the ticket.

        Returns before all is sent if the socket's buffer is full. Raises Broken, and
        FrameTooLarge without harm to the connection.
        """
        request_id = ticket.request_id = next(self._numbers) % _REQUEST_ID_MAX + 1
        self._pending[request_id] = ticket
        with self._sending:
            if self._busy:
                self._pending.pop(request_id, None)
                raise Busy("called by a signal handler in the middle of a call")
            self._busy = True
            try:
                self._write(request_id, ticket.request)
            except BlobStoreError:
                self._pending.pop(request_id, None)
                raise
            except BaseException:  # interrupted: it is unknown how much was sent
                self.fail("interrupted while sending")
                raise
            finally:
                self._busy = False
        if self._returns.owed:
            self.flush()

    def flush(self) -> None:
        """Send what is owed to the daemon, unless that means to wait. Safe anywhere.

        Whoever holds the lock that is not waited for here flushes after letting go of it.
        """
        returns = self._returns
        while returns.owed and not self._unsent and not self.broken_by:
            try:
                if not self._sending.acquire(blocking=False) or self._busy:
                    return
                if returns.owed:
                    self._settle_some()
            finally:
                # As in Connection.wait: nothing comes before the release.
                try:  # noqa: SIM105
                    self._sending.release()
                except RuntimeError:
                    pass  # it is another thread's

    def _settle_some(self) -> None:
        self._busy = True
        try:
            debts = self._returns.take()
            try:
                self._write(_NO_REPLY, debts.request)
            except Broken:
                self._returns.take_back(debts)
            else:
                if self._unsent:
                    self._unsettled.append(debts)
        except BaseException:  # interrupted: it is unknown how much was sent
            self.fail("interrupted while sending")
            raise
        finally:
            self._busy = False

    def receive(self) -> None:
        """Take in what has arrived: replies go to their tickets, late ones are undone."""
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"cannot receive: {error}")
            return
        if not data:
            self.fail("the daemon closed the connection")
            return
        try:
            for request_id, boot_id, body in self._reader.feed(data):
                if boot_id != self._boot_id:
                    raise ProtocolError(f"a frame of boot {boot_id:#x}")
                reply = decode_reply(body)
                self._returns.arrive(reply)
                ticket = self._pending.pop(request_id, None)
                if ticket is None:
                    self.undo(reply)
                else:
                    ticket.settle(reply)
        except (FrameTooLarge, ProtocolError, msgspec.DecodeError) as error:
            self.fail(f"the daemon broke the protocol: {error}")

    def undo(self, reply: Reply) -> None:
        """Give back what a reply lent that nobody waits for any longer."""
        returns = self._returns
        if isinstance(reply, Leased):
            taken = not reply.lease_id or returns.holds(reply.lease_id)
            if not taken:
                returns.end_lease(reply.lease_id)
        elif isinstance(reply, Reserved):
            taken = not reply.reservation_id or returns.writes(reply.reservation_id)
            if not taken:
                returns.give_up(reply.reservation_id)

    def take_over(self) -> None:
        """Have the daemon end what it granted over broken connections, and never got here."""
        if self.session.lost_ids:
            self._returns.reclaim(self.session.lost_ids)
        self.flush()

    def forget(self, ticket: Ticket) -> None:
        """Nobody waits for this reply any longer: undo it if it is here, or when it comes."""
        self._pending.pop(ticket.request_id, None)
        ticket.done = True
        if ticket.reply is not None:
            self.undo(ticket.reply)

    def fail(self, why: str) -> None:
        """Give up this connection: all calls on it end with Broken. Safe anywhere."""
        self.broken_by = self.broken_by or why
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        self._fail_pending(self.broken_by)
        while self._unsettled:
            with contextlib.suppress(IndexError):
                self._returns.take_back(self._unsettled.popleft())

    def _say_goodbye(self, why: str) -> None:
        """End all calls, and have the daemon end what its replies to them would grant.

        Unless that means to wait: then the daemon keeps it until this process exits.
        """
        Link.flush(self)
        try:
            if not self._sending.acquire(blocking=False) or self._busy:
                return
            if self.broken_by or self._unsent:
                return
            self.broken_by = why  # no request follows
            self._fail_pending(why)  # and nobody takes a reply
            goodbye = self._returns.held_over(self.session.connection_ids)
            with contextlib.suppress(Broken):
                self._send(pack(_NO_REPLY, self._boot_id, encode(goodbye)))
        finally:
            # As in Connection.wait: nothing comes before the release.
            try:  # noqa: SIM105
                self._sending.release()
            except RuntimeError:
                pass  # it is another thread's

    def leave_parent(self) -> None:
        """In a forked child: close this copy of the socket, and leave the parent's alone."""
        self._returns.sender = None
        self.broken_by = "belongs to the parent process"
        self._sock.close()

    def _fail_pending(self, why: str) -> None:
        while self._pending:
            with contextlib.suppress(KeyError):  # a reply may come at the same moment
                self._pending.popitem()[1].fail(Broken(why))

    def _write(self, request_id: int, request: Request) -> None:
        """Send one frame, or queue what the socket does not take. Under the lock."""
        if self.broken_by:
            raise Broken(self.broken_by)
        frame = self._frame
        _encode_into(request, frame, HEADER_BYTES)
        if len(frame) - HEADER_BYTES > self._max_body_bytes:
            raise FrameTooLarge(
                f"{type(request).__name__} of {len(frame) - HEADER_BYTES} bytes exceeds the "
                f"daemon's limit of {self._max_body_bytes}: name fewer keys"
            )
        pack_header(frame, request_id, self._boot_id)
        sent = 0 if self._unsent else self._send(frame)
        if sent != len(frame):
            self._unsent.append(memoryview(bytes(frame))[sent:])
            self._unsent_bytes += len(frame) - sent
            if self._unsent_bytes > UNSENT_BYTES_MAX:
                self.fail(f"the daemon has left {self._unsent_bytes} bytes unread")
                raise Broken(self.broken_by)

    def _write_unsent(self) -> None:
        """Send more of what is queued. Raises Broken."""
        with self._sending:
            if self._busy:
                return
            self._busy = True
            try:
                while self._unsent and not self.broken_by:
                    first = self._unsent[0]
                    sent = self._send(first)
                    self._unsent_bytes -= sent
                    if sent < len(first):
                        self._unsent[0] = first[sent:]
                        return
                    self._unsent.popleft()
                    self._unsettled.clear()
            except Broken:
                raise
            except BaseException:  # interrupted: it is unknown how much was sent
                self.fail("interrupted while sending")
                raise
            finally:
                self._busy = False

    def _send(self, data: bytearray | bytes | memoryview) -> int:
        try:
            return self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.fail(f"cannot send: {error}")
            raise Broken(self.broken_by) from error
