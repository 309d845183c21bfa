"""A connection of an event loop: replies arrive in its callbacks and resolve futures."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from blobstore.clients.link import Broken, Link, Ticket
from blobstore.clients.session import Session
from blobstore.errors import DeadlineExceeded
from blobstore.protocol import Reply, Request


class _Ticket(Ticket):
    """A ticket that resolves a future of the loop, from whatever thread it is settled."""

    __slots__ = ("_loop", "_thread", "future")

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        super().__init__(request)
        self.future: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._thread = thread

    def notify(self) -> None:
        """Wake the task that waits."""
        if threading.get_ident() == self._thread:
            self._resolve()
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                self._loop.call_soon_threadsafe(self._resolve)

    def expire(self) -> None:
        """The deadline has passed."""
        if not self.done:
            self.fail(DeadlineExceeded("the daemon did not answer in time"))

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class AioConnection(Link):
    """A link whose callers are tasks of `loop`, the running one."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._fd = sock.fileno()
        self._watched = False
        self._closing = False
        self._ended = False
        super().__init__(sock, session)
        self.loop.add_reader(self._fd, self.receive)
        self._watched = True

    async def ask(self, request: Request, timeout_s: float) -> Reply:
        """The reply to `request`. Raises as `begin` and `wait` do."""
        return await self.wait(self.begin(request), timeout_s)

    def begin(self, request: Request) -> Ticket:
        """Send `request`, or as much as the daemon reads now; the rest as it reads on."""
        ticket = _Ticket(request, self.loop, self._thread)
        self.post(ticket)
        if self._unsent:
            self.loop.add_writer(self._fd, self._on_writable)
        return ticket

    async def wait(self, ticket: Ticket, timeout_s: float) -> Reply:
        """The reply. Raises DeadlineExceeded, Broken, or the error that the daemon sent.

        When it raises or is cancelled, the connection is as good as before, and what
        the reply lends (now, or when it comes late) is given back.
        """
        assert isinstance(ticket, _Ticket)
        if not ticket.done:
            timer = self.loop.call_later(timeout_s, ticket.expire)
            try:
                await ticket.future
            except BaseException:
                self.forget(ticket)
                raise
            finally:
                timer.cancel()
        if ticket.error is not None:
            self.forget(ticket)
            raise ticket.error
        assert ticket.reply is not None
        return ticket.reply

    def fail(self, why: str) -> None:
        """Give up this connection: all calls on it end with Broken. Safe anywhere."""
        super().fail(why)
        self._stop_watching()

    def close(self) -> None:
        """End all calls, and the connection as soon as no view of leased bytes is left.

        Safe on any thread, also when the loop is closed already.
        """
        if self._returns.holding and not self.broken_by:
            self._closing = True
            self._fail_pending("the client was closed")
            self._stop_watching()
            return
        self._end()

    def __del__(self) -> None:
        self._sock.close()

    def leave_parent(self) -> None:
        """In a forked child: close this copy of the socket, and leave the parent's alone."""
        self._watched = False  # the loop's registrations are shared with the parent
        super().leave_parent()

    def flush(self) -> None:
        """Send what is owed to the daemon, unless that means to wait. Safe anywhere."""
        super().flush()
        if self._unsent and self._watched:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self.loop.call_soon_threadsafe(self._watch_writable)
        if self._closing and not self._returns.holding and not self._returns.owed:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._say_goodbye("the client was closed")
        if self._returns.sender is self:
            self._returns.sender = None
        self.fail("the client was closed")
        if not self._watched:
            self._close_socket()

    def _close_socket(self) -> None:
        """Close the descriptor, once neither loop nor thread can be about to use its number."""
        if self._sending.acquire(blocking=False):
            self._sock.close()
            self._sending.release()
        # Otherwise the last reference closes it.

    def _stop_watching(self) -> None:
        if not self._watched:
            return
        if self.loop.is_closed():
            self._watched = False
        elif threading.get_ident() == self._thread:
            self._unwatch()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._unwatch)

    def _unwatch(self) -> None:
        if self._watched and not self.loop.is_closed():
            self.loop.remove_reader(self._fd)
            self.loop.remove_writer(self._fd)
        self._watched = False
        if self._ended:
            self._close_socket()

    def _watch_writable(self) -> None:
        if self._unsent and self._watched:
            self.loop.add_writer(self._fd, self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(Broken):
            self._write_unsent()
        if not self._unsent and self._watched:
            self.loop.remove_writer(self._fd)
            self.flush()
