"""One request over HTTP and its answer, and the memory that their bodies come from and go to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from blobstore.clients.handshake import Await
from blobstore.clients.steps import Step, Work
from blobstore.errors import BlobStoreError, ProtocolError

T = TypeVar("T")

LENGTH_DIGITS_MAX = 20
TURN = 0
"""In place of events: whoever waits for its turn may have it, then go on."""

HttpSteps = Generator[Await | Work, Any, T]
"""What moves bytes: never blocks, and yields what it waits for. Work is looking up a name."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; names in lower case, of equal ones the last."""

    status: int
    headers: dict[str, str]
    keeps_alive: bool

    @property
    def content_length(self) -> int | None:
        """The size of the body, if it is told; ProtocolError if it is no number."""
        told = self.headers.get("content-length")
        if told is None:
            return None
        if not (told.isascii() and told.isdigit() and len(told) < LENGTH_DIGITS_MAX):
            raise ProtocolError(f"an answer's Content-Length is {told[:80]!r}")
        return int(told)


class Sink(Protocol):
    """Takes the body of a 200 straight into memory."""

    def place(self, head: Head) -> Sequence[memoryview]:
        """Where the body goes, piece after piece; as long together as its Content-Length."""

    def took(self, view: memoryview) -> None:
        """The next bytes have arrived, in `view`."""

    def finish(self) -> None:
        """All have. Raises Corrupt if they are not what they should be."""


@dataclass(slots=True)
class Exchange:
    """A request; once it was performed either `head` and `body`, or `error`."""

    method: str
    path: str
    """As in a URL, from /v1 on."""
    payload: memoryview | bytes = b""
    content_type: str = "application/json"
    header_lines: str = ""
    """More headers, each with its line end."""
    sink: Sink | None = None
    head: Head | None = None
    body: bytes = b""
    """Empty if the sink has it."""
    error: BlobStoreError | None = None

    def fail(self, error: BlobStoreError) -> None:
        """It ended with `error`, of which only the message is kept: tracebacks hold memory."""
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = error

    @property
    def answered(self) -> Head:
        """The answer's head; raises what came instead."""
        if self.error is not None:
            raise self.error
        if self.head is None:
            raise ProtocolError("the request was not performed")
        return self.head


@dataclass(slots=True)
class Transfers:
    """A step of an operation: perform `exchanges`, at most `lanes` at a time.

    They begin in order. From the first that `ends`, none begins, and later ones under way
    are given up: they have neither head nor error.
    """

    exchanges: Sequence[Exchange]
    lanes: int
    ends: Callable[[Exchange], bool] = field(default=lambda exchange: exchange.error is not None)


HttpOperation = Generator[Step | Transfers, Any, T]
"""An operation that may also transfer."""
