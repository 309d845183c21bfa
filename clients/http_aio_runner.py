"""Runs operations for tasks of an event loop over HTTP; as http_runner.py does for threads."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections import deque
from typing import Any, TypeVar

from blobstore.clients import forks
from blobstore.clients.aio_runner import in_thread
from blobstore.clients.handshake import Await
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_contact import GREETING, HttpContact
from blobstore.clients.http_exchange import TURN, Exchange, HttpOperation, HttpSteps, Transfers
from blobstore.clients.http_pool import CONNECTIONS_MAX
from blobstore.clients.http_verbs import exchange_of
from blobstore.clients.link import Ticket
from blobstore.clients.steps import Call, Posted, Step, Work, stepped_async
from blobstore.errors import BlobStoreError
from blobstore.protocol import Request

T = TypeVar("T")


class HttpAioRunner(HttpContact):
    """The part of AsyncClient below its verbs. Belongs to one running loop at a time."""

    def __init__(self, address: HttpAddress, timeout_s: float) -> None:
        super().__init__(address, timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._of_loop = asyncio.Semaphore(CONNECTIONS_MAX)
        forks.watch(self)

    async def connect(self) -> None:
        """Connect now, or raise Unavailable."""
        try:
            await self._ask(GREETING, self.call(None))
        except BlobStoreError as error:
            raise self._not_met(error) from error

    async def prepare(self, call: Call) -> None:
        """Nothing is to be known before a call."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a constructor that raised
            self.close()

    def leave_parent(self) -> None:
        """In a forked child: connect anew at the first call."""
        self._loop = None

    async def run(self, operation: HttpOperation[T], call: Call) -> T:
        """Step `operation` to its end; what it returns."""
        return await stepped_async(operation, self._perform, call)

    async def _perform(self, step: Step | Transfers, call: Call) -> Any:
        if isinstance(step, Transfers):
            return await self._transfer(step, call)
        if isinstance(step, Work):
            return await in_thread(step.run)
        assert not isinstance(step, Posted | Ticket), "nothing is posted over HTTP"
        return await self._ask(step, call)

    async def _ask(self, request: Request, call: Call) -> Any:
        exchange = exchange_of(request)
        self._check_open()
        await self._exchange(exchange, call)
        return self._reply_to(request, exchange)

    async def _transfer(self, transfers: Transfers, call: Call) -> None:
        self._check_open()
        exchanges = transfers.exchanges
        if len(exchanges) == 1:
            await self._exchange(exchanges[0], call)
            return
        waiting = deque(range(len(exchanges)))
        under_way: dict[int, asyncio.Task[None]] = {}

        async def lane() -> None:
            while waiting:
                number = waiting.popleft()
                task = asyncio.ensure_future(self._exchange(exchanges[number], call))
                under_way[number] = task
                try:
                    await asyncio.wait([task])
                finally:
                    del under_way[number]
                    if not task.done():
                        await _cancelled(task)
                if task.cancelled():
                    return  # one before it was the last
                task.result()
                if transfers.ends(exchanges[number]):
                    waiting.clear()
                    for later, other in under_way.items():
                        if later > number:
                            other.cancel()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(transfers.lanes, len(exchanges))):
                group.create_task(lane())

    async def _exchange(self, exchange: Exchange, call: Call) -> None:
        try:
            async with asyncio.timeout(call.remaining_s()), self._slots():
                await self._drive(self._pool.perform(exchange))
        except BlobStoreError as error:
            exchange.fail(error)
        except TimeoutError:
            exchange.fail(self._late())
        self._settle(exchange)

    async def _drive(self, steps: HttpSteps[None]) -> None:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Work):
                    step = steps.send(await self._found(step))
                else:
                    await _ready(step)
                    step = next(steps)
        except StopIteration:
            return
        finally:
            steps.close()  # given up in the middle, it closes its connection

    async def _found(self, work: Work) -> Any:
        """What a look-up found; whoever is cancelled does not wait for it."""
        return await asyncio.wrap_future(self._pool.lookup.begin(work.run))

    def _slots(self) -> asyncio.Semaphore:
        """Of the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._of_loop = loop, asyncio.Semaphore(CONNECTIONS_MAX)
        return self._of_loop


async def _ready(wait: Await) -> None:
    if wait.events == TURN:
        await asyncio.sleep(0)
        return
    loop, fd = asyncio.get_running_loop(), wait.sock.fileno()
    ready: asyncio.Future[None] = loop.create_future()
    if wait.events & select.POLLIN:
        loop.add_reader(fd, _resolve, ready)
    if wait.events & select.POLLOUT:
        loop.add_writer(fd, _resolve, ready)
    try:
        await ready
    finally:
        if wait.events & select.POLLIN:
            loop.remove_reader(fd)
        if wait.events & select.POLLOUT:
            loop.remove_writer(fd)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel it, and wait until it has let go of the caller's memory."""
    task.cancel()
    await asyncio.wait([task])


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
