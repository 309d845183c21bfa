"""How an operation is written once and run by both clients.

An operation is a generator. It yields steps; the client performs each and sends the
outcome back in, or throws in the BlobStoreError that came instead:

    a request          sent, and its reply awaited
    Posted(request)    sent only; the outcome is its Ticket
    a Ticket           its reply is awaited
    Work(function)     run where it does not hold up an event loop

All requests of one operation travel on one connection, in order. The first is sent
once more if that connection turns out to be dead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from blobstore.clients.link import Link, Ticket
from blobstore.errors import (
    BlobStoreError,
    InvalidRequest,
    ProtocolError,
    StaleBoot,
    WrongProcess,
)
from blobstore.protocol import Reply, Request

TIMEOUT_MAX_S = 3600.0
"""The daemon's own bound."""
ANSWER_S = 0.02
"""How much more time than the daemon its answer may take: a call that must not wait gets one."""

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R", bound=Reply)


@dataclass(slots=True)
class Posted:
    """Send `request` and go on."""

    request: Request


@dataclass(slots=True)
class Work:
    """Copying or hashing: blocks, and releases the GIL most of the time."""

    run: Callable[[], Any]


Step = Request | Posted | Ticket | Work
Operation = Generator[Step, Any, T]


class Call:
    """One operation under way: its deadline, and the connection that it stays on."""

    __slots__ = ("_answer_s", "deadline_s", "link", "posted")

    def __init__(
        self, timeout_s: float, link: Link | None = None, *, answer_s: float = ANSWER_S
    ) -> None:
        if not 0 <= timeout_s <= TIMEOUT_MAX_S:
            raise InvalidRequest(f"timeout_s is from 0 to {TIMEOUT_MAX_S} s, found {timeout_s}")
        self.deadline_s = monotonic() + timeout_s + answer_s
        self._answer_s = answer_s
        self.link = link
        self.posted: list[Ticket] = []
        """Requests whose replies the operation has not taken in yet."""

    def remaining_s(self) -> float:
        """Seconds to the deadline, at least 0."""
        return max(self.deadline_s - monotonic(), 0.0)

    def daemon_timeout_s(self) -> float:
        """How long the daemon may take, so that its answer is here by the deadline."""
        return max(self.deadline_s - self._answer_s - monotonic(), 0.0)


def stepped(
    operation: Generator[S, Any, T],
    perform: Callable[[S, Call], Any],
    call: Call,
    undo: Callable[[Any], None] | None = None,
) -> T:
    """Step `operation` to its end, each step by `perform`; what it returns.

    If it is interrupted, the last outcome goes to `undo`: it may not have been taken in.
    """
    outcome: Any = None
    try:
        step = next(operation)
        while True:
            try:
                outcome = perform(step, call)
            except BlobStoreError as error:
                step = operation.throw(error)
            else:
                step = operation.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        operation.close()
        if undo is not None:
            undo(outcome)
        raise


async def stepped_async(
    operation: Generator[S, Any, T], perform: Callable[[S, Call], Awaitable[Any]], call: Call
) -> T:
    """As `stepped`, for a task; whoever was interrupted has nothing to undo."""
    try:
        step = next(operation)
        while True:
            try:
                outcome = await perform(step, call)
            except BlobStoreError as error:
                step = operation.throw(error)
            else:
                step = operation.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        operation.close()
        raise


def ask(request: Request, expected: type[R]) -> Operation[R]:
    """The reply to `request`; ProtocolError if it is of another kind."""
    reply = yield request
    return reply if type(reply) is expected else checked(reply, expected)


def checked(reply: Reply, expected: type[R]) -> R:
    """`reply`, or ProtocolError if it is of another kind than `expected`."""
    if type(reply) is not expected:
        raise ProtocolError(f"wanted {expected.__name__}, the daemon sent {type(reply).__name__}")
    return reply


def reason(error: BlobStoreError) -> str:
    """Why something is a miss. Raises `error` again if it is the caller's own mistake."""
    try:
        if isinstance(error, InvalidRequest | WrongProcess) and not isinstance(error, StaleBoot):
            raise error
        return error.code
    finally:
        del error  # its traceback holds this frame, and others with views of leased bytes
