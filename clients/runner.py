"""Runs operations for threads: finds the daemon, keeps one connection, steps generators."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from typing import Any, TypeVar

from blobstore.clients import forks
from blobstore.clients.connection import Connection
from blobstore.clients.contact import Contact
from blobstore.clients.handshake import RETRY_S, Greeted, greet, no_answer
from blobstore.clients.link import Broken, Ticket
from blobstore.clients.steps import Call, Operation, Posted, Step, Work, stepped
from blobstore.errors import Unavailable
from blobstore.protocol import Reply, Request

T = TypeVar("T")


class Runner(Contact):
    """The part of Client below its verbs. Connects now, or raises Unavailable."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout_s)
        self._connection: Connection | None = None
        self._connecting = threading.RLock()  # knows its owner, so that releasing is always safe
        forks.watch(self)
        self._reach(None, Call(timeout_s).deadline_s)

    def close(self) -> None:
        """Disconnect. Views of leased bytes stay valid; their leases end when they die.

        Later calls miss with the reason "unavailable".
        """
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._end_session()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a constructor that raised
            self.close()

    def leave_parent(self) -> None:
        """In a forked child: connect anew at the first call."""
        self._connecting = threading.RLock()
        self._connection = self._session = None

    def run(self, operation: Operation[T], call: Call) -> T:
        """Step `operation` to its end; what it returns."""

        def undo(outcome: Any) -> None:
            if isinstance(outcome, Reply) and call.link is not None:
                call.link.undo(outcome)

        try:
            return stepped(operation, self._perform, call, undo)
        finally:
            if call.posted:
                self._leave_all(call)

    def _leave_all(self, call: Call) -> None:
        for ticket in call.posted:
            _of(call).leave(ticket)

    def _perform(self, step: Step, call: Call) -> Any:
        if isinstance(step, Posted):
            ticket = _of(call).begin(step.request, call.deadline_s)
            call.posted.append(ticket)
            return ticket
        if isinstance(step, Work):
            return step.run()
        if isinstance(step, Ticket):
            call.posted.remove(step)
            return _of(call).wait(step, call.deadline_s)
        if call.link is None:
            return self._first(step, call)
        return _of(call).ask(step, call.deadline_s)

    def _first(self, request: Request, call: Call) -> Reply:
        """Ask on the connection at hand; once more on a new one if that is dead."""
        connection = self._connection
        if connection is not None:
            call.link = connection
            try:
                return connection.ask(request, call.deadline_s)
            except Broken:
                pass
        call.link = connection = self._reach(connection, call.deadline_s)
        return connection.ask(request, call.deadline_s)

    def _reach(self, dead: Connection | None, deadline_s: float) -> Connection:
        """The connection that replaces `dead`; made if no other thread has."""
        try:
            if not self._connecting.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
                raise Unavailable("another thread is still trying to reach the daemon")
            current = self._connection
            if current is not None and current is not dead:
                return current
            if self._closed:
                raise Unavailable("the client was closed")
            if current is not None:
                self._miss(current.broken_by)
            self._connection = connection = self._connect(deadline_s)
            if current is not None:
                current.close()
            if self._closed:  # meanwhile
                self.close()
                raise Unavailable("the client was closed")
        finally:
            # As in Connection.wait.
            try:  # noqa: SIM105
                self._connecting.release()
            except RuntimeError:
                pass  # it was not had in time
        connection.take_over()
        return connection

    def _connect(self, deadline_s: float) -> Connection:
        greeted = _greet(self._path, deadline_s)
        try:
            return Connection(greeted.sock, self._meet(greeted))
        except BaseException:
            greeted.sock.close()
            raise


def _of(call: Call) -> Connection:
    """The connection of a call whose first request went out."""
    assert isinstance(call.link, Connection)
    return call.link


def _greet(path: str, deadline_s: float) -> Greeted:
    steps = greet(path)
    try:
        while True:
            wait = next(steps)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise no_answer(path)
            if not wait.events:
                time.sleep(min(RETRY_S, remaining_s))
                continue
            poll = select.poll()
            poll.register(wait.sock, wait.events)
            if not poll.poll(remaining_s * 1e3):
                raise no_answer(path)
    except StopIteration as end:
        greeted: Greeted = end.value
        return greeted
    finally:
        steps.close()
