"""Runs operations for threads over HTTP: a bounded pool of connections, several at a time."""

from __future__ import annotations

import contextlib
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from blobstore.clients import forks
from blobstore.clients.handshake import Await
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_contact import GREETING, HttpContact
from blobstore.clients.http_exchange import TURN, Exchange, HttpOperation, HttpSteps, Transfers
from blobstore.clients.http_pool import CONNECTIONS_MAX
from blobstore.clients.http_verbs import exchange_of
from blobstore.clients.link import Ticket
from blobstore.clients.steps import Call, Posted, Step, Work, stepped
from blobstore.errors import BlobStoreError
from blobstore.protocol import Request

T = TypeVar("T")


class HttpRunner(HttpContact):
    """The part of Client below its verbs. Connects now, or raises Unavailable."""

    def __init__(self, address: HttpAddress, timeout_s: float) -> None:
        super().__init__(address, timeout_s)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        forks.watch(self)
        try:
            self._ask(GREETING, self.call(None))
        except BlobStoreError as error:
            self.close()
            raise self._not_met(error) from error

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a constructor that raised
            self.close()

    def leave_parent(self) -> None:
        """In a forked child: connect anew at the first call."""
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def run(self, operation: HttpOperation[T], call: Call) -> T:
        """Step `operation` to its end; what it returns."""
        return stepped(operation, self._perform, call)

    def _perform(self, step: Step | Transfers, call: Call) -> Any:
        if isinstance(step, Transfers):
            return self._transfer(step, call)
        if isinstance(step, Work):
            return step.run()
        assert not isinstance(step, Posted | Ticket), "nothing is posted over HTTP"
        return self._ask(step, call)

    def _ask(self, request: Request, call: Call) -> Any:
        exchange = exchange_of(request)
        self._transfer(Transfers([exchange], 1), call)
        return self._reply_to(request, exchange)

    def _transfer(self, transfers: Transfers, call: Call) -> None:
        self._check_open()
        waiting = deque(transfers.exchanges)
        lanes: list[_Lane] = []
        slots = self._slots
        try:
            while waiting or lanes:
                while waiting and len(lanes) < transfers.lanes and _take(slots, lanes, call):
                    exchange = waiting.popleft()
                    lanes.append(self._lane(exchange, call, slots.release))
                if not lanes:
                    waiting[0].fail(self._late())
                    return
                for lane in _ready(lanes, call):
                    lane.go_on()
                    if lane.is_done:
                        self._settle(lane.exchange)
                        if transfers.ends(lane.exchange):
                            waiting.clear()
                            _give_up(lanes[lanes.index(lane) + 1 :])
                lanes = [lane for lane in lanes if not lane.is_done]
                if call.remaining_s() == 0:
                    for lane in lanes:
                        lane.exchange.fail(self._late())
                    return
        finally:
            _give_up(lanes)

    def _lane(self, exchange: Exchange, call: Call, on_end: Callable[[], None]) -> _Lane:
        def found(work: Work) -> Any:
            try:
                return self._pool.lookup.begin(work.run).result(call.remaining_s())
            except TimeoutError:
                raise self._late() from None

        return _Lane(exchange, self._pool.perform(exchange), found, on_end)


class _Lane:
    """An exchange under way, and what it waits for. In order of beginning."""

    def __init__(
        self,
        exchange: Exchange,
        steps: HttpSteps[None],
        found: Callable[[Work], Any],
        on_end: Callable[[], None],
    ) -> None:
        """`found` gives what a look-up found."""
        self.exchange = exchange
        self.is_done = False
        self.wait: Await | None = None
        self._steps = steps
        self._found = found
        self._on_end = on_end

    @property
    def is_ready(self) -> bool:
        """Whether it can go on without waiting."""
        return self.wait is None or self.wait.events == TURN

    def go_on(self) -> None:
        """Until it has to wait, or is done."""
        if self.is_done:
            return
        try:
            step = next(self._steps)
            while isinstance(step, Work):
                step = self._steps.send(self._found(step))
            self.wait = step
        except StopIteration:
            self.end()
        except BlobStoreError as error:
            self.exchange.fail(error)
            self.end()

    def end(self) -> None:
        """Give up what is not done: its connection is closed."""
        if not self.is_done:
            self.is_done = True
            try:
                self._steps.close()
            finally:
                self._on_end()


def _give_up(lanes: list[_Lane]) -> None:
    for lane in lanes:
        lane.end()


def _take(slots: threading.BoundedSemaphore, lanes: list[_Lane], call: Call) -> bool:
    """Another connection may be used; waits for it only while none is in use, so that none
    who has one waits for another's."""
    if lanes:
        return slots.acquire(blocking=False)
    return slots.acquire(timeout=call.remaining_s())


def _ready(lanes: list[_Lane], call: Call) -> list[_Lane]:
    """Those that can go on; waits for one at most until the deadline."""
    at_once = [lane for lane in lanes if lane.is_ready]
    if len(at_once) == len(lanes):
        return at_once
    poll = select.poll()
    waiting: dict[int, _Lane] = {}
    for lane in lanes:
        if not lane.is_ready and lane.wait is not None:
            waiting[lane.wait.sock.fileno()] = lane
            poll.register(lane.wait.sock, lane.wait.events)
    found = poll.poll(0 if at_once else call.remaining_s() * 1e3)
    return at_once + [waiting[fd] for fd, _ in found]
