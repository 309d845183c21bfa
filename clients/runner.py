"""Runs operations for threads: finds the daemon, keeps one connection, steps generators."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from typing import Any, TypeVar

from blobstore.clients import forks
from blobstore.clients.connection import Connection
from blobstore.clients.handshake import RETRY_S, Greeted, greet, no_answer, socket_path
from blobstore.clients.link import Broken, Ticket
from blobstore.clients.session import Session, continued
from blobstore.clients.steps import Call, Operation, Posted, Step, Work
from blobstore.errors import BlobStoreError, Unavailable
from blobstore.protocol import Reply, Request

T = TypeVar("T")

log = logging.getLogger("blobstore.clients")


class Runner:
    """The part of Client below its verbs. Connects now, or raises Unavailable."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._path = socket_path(address)
        self._timeout_s = timeout_s
        self._session: Session | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._lost = False
        self._connecting = threading.Lock()
        forks.watch(self)
        self._reach(None, Call(timeout_s).deadline_s)

    @property
    def boot_id(self) -> int:
        """Tells one run of the daemon from the next; 0 if there was none yet."""
        return self._session.boot_id if self._session is not None else 0

    @property
    def lent_bytes_max(self) -> int:
        """How much the daemon lends to a client."""
        return self._session.terms.lent_bytes_max if self._session is not None else 0

    def close(self) -> None:
        """Disconnect. Views of leased bytes stay valid; their leases end when they die.

        Later calls miss with the reason "unavailable".
        """
        self._closed = True
        connection, self._connection = self._connection, None
        session, self._session = self._session, None
        if connection is not None:
            connection.close()
        if session is not None:
            session.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a constructor that raised
            self.close()

    def leave_parent(self) -> None:
        """In a forked child: connect anew at the first call."""
        self._connecting = threading.Lock()
        self._connection = self._session = None

    def call(self, timeout_s: float | None) -> Call:
        """A call that starts now."""
        return Call(self._timeout_s if timeout_s is None else timeout_s)

    def run(self, operation: Operation[T], call: Call) -> T:
        """Step `operation` to its end; what it returns."""
        try:
            step = next(operation)
            while True:
                try:
                    outcome = self._perform(step, call)
                except BlobStoreError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
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
        if not self._connecting.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            raise Unavailable("another thread is still trying to reach the daemon")
        try:
            current = self._connection
            if current is not None and current is not dead:
                return current
            if self._closed:
                raise Unavailable("the client was closed")
            return self._replace(current, deadline_s)
        finally:
            self._connecting.release()

    def _replace(self, old: Connection | None, deadline_s: float) -> Connection:
        if old is not None and not self._lost:
            self._lost = True
            log.warning("lost the daemon at %s: %s", self._path, old.broken_by)
        greeted = _greet(self._path, deadline_s)
        try:
            self._session = session = continued(self._session, greeted)
            self._connection = connection = Connection(greeted.sock, session)
        except BaseException:
            greeted.sock.close()
            raise
        if old is not None:
            old.close()
        if self._lost:
            self._lost = False
            log.warning("found the daemon at %s again", self._path)
        connection.flush()
        return connection


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
