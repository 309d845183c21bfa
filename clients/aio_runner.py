"""Runs operations for tasks of an event loop; as runner.py does for threads."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Any, TypeVar

from blobstore.clients import forks
from blobstore.clients.aio_connection import AioConnection
from blobstore.clients.contact import Contact
from blobstore.clients.handshake import RETRY_S, Await, Greeted, greet, no_answer
from blobstore.clients.link import Broken, Ticket
from blobstore.clients.steps import Call, Operation, Posted, Step, Work, stepped_async
from blobstore.errors import Unavailable
from blobstore.protocol import Reply, Request

T = TypeVar("T")


class AioRunner(Contact):
    """The part of AsyncClient below its verbs. Belongs to one running loop at a time."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout_s)
        self._connection: AioConnection | None = None
        self._connecting: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        forks.watch(self)

    async def connect(self) -> None:
        """Connect now, or raise Unavailable."""
        connection = self._at_hand()
        if connection is None or connection.broken_by:
            await self._reach(connection, self.call(None))

    async def prepare(self, call: Call) -> None:
        """Learn the daemon's terms if there was none yet; if there is none, the call will miss."""
        if self._session is None and self._at_hand() is None:
            with contextlib.suppress(Unavailable):
                await self._reach(None, call)

    def close(self) -> None:
        """As Runner.close. Safe on any thread, also when the loop is closed already."""
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
        self._connecting = self._loop = None
        self._connection = self._session = None

    async def run(self, operation: Operation[T], call: Call) -> T:
        """Step `operation` to its end; what it returns."""
        try:
            return await stepped_async(operation, self._perform, call)
        finally:
            for ticket in call.posted:
                _of(call).forget(ticket)

    async def _perform(self, step: Step, call: Call) -> Any:
        if isinstance(step, Posted):
            ticket = _of(call).begin(step.request)
            call.posted.append(ticket)
            return ticket
        if isinstance(step, Work):
            return await in_thread(step.run)
        if isinstance(step, Ticket):
            call.posted.remove(step)
            return await _of(call).wait(step, call.remaining_s())
        if call.link is None:
            return await self._first(step, call)
        return await _of(call).ask(step, call.remaining_s())

    async def _first(self, request: Request, call: Call) -> Reply:
        """Ask on the connection at hand; once more on a new one if that is dead."""
        connection = self._at_hand()
        if connection is not None:
            call.link = connection
            try:
                return await connection.ask(request, call.remaining_s())
            except Broken:
                pass
        call.link = connection = await self._reach(connection, call)
        return await connection.ask(request, call.remaining_s())

    def _at_hand(self) -> AioConnection | None:
        """The connection, if it is of the running loop."""
        connection, loop = self._connection, asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connecting = loop, asyncio.Lock()
        if connection is not None and connection.loop is not loop:
            self._connection = None
            connection.fail("its loop is not the running one")  # the next one sends what is owed
            connection.close()
            return None
        return connection

    async def _reach(self, dead: AioConnection | None, call: Call) -> AioConnection:
        """The connection that replaces `dead`; made if no other task has."""
        assert self._connecting is not None
        try:
            async with asyncio.timeout(call.remaining_s()), self._connecting:
                current = self._connection
                if current is not None and current is not dead:
                    return current
                if self._closed:
                    raise Unavailable("the client was closed")
                if current is not None:
                    self._miss(current.broken_by)
                self._connection = connection = await self._connect()
                if current is not None:
                    current.close()
                if self._closed:  # meanwhile
                    self.close()
                    raise Unavailable("the client was closed")
        except TimeoutError as error:
            raise no_answer(self._path) from error
        connection.take_over()
        return connection

    async def _connect(self) -> AioConnection:
        greeted = await _greet(self._path)
        try:
            return AioConnection(greeted.sock, self._meet(greeted))
        except BaseException:
            greeted.sock.close()
            raise


def _of(call: Call) -> AioConnection:
    """The connection of a call whose first request went out."""
    assert isinstance(call.link, AioConnection)
    return call.link


async def _greet(path: str) -> Greeted:
    steps = greet(path)
    try:
        while True:
            await _ready(next(steps))
    except StopIteration as end:
        greeted: Greeted = end.value
        return greeted
    finally:
        steps.close()


async def _ready(wait: Await) -> None:
    if not wait.events:
        await asyncio.sleep(RETRY_S)
        return
    loop, fd = asyncio.get_running_loop(), wait.sock.fileno()
    ready = loop.create_future()
    if wait.events & select.POLLOUT:
        add, remove = loop.add_writer, loop.remove_writer
    else:
        add, remove = loop.add_reader, loop.remove_reader
    add(fd, _resolve, ready)
    try:
        await ready
    finally:
        remove(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def in_thread(function: Callable[[], Any]) -> Any:
    """The outcome of `function`, run in a thread.

    A cancelled task goes on only when the thread is done: until then it may still
    write to the caller's memory.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise
    finally:
        del future  # it holds the exception, whose traceback holds this frame
