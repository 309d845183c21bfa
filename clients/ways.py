"""The two ways to a daemon: shared memory beside a Unix socket, and HTTP.

Both run the same operations for a client. They differ in what a lease and a writer
are made of, and in how long an answer may travel.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from blobstore.clients.aio_runner import AioRunner
from blobstore.clients.bound import BoundNamespace
from blobstore.clients.http_address import HttpAddress, is_http
from blobstore.clients.http_aio_runner import HttpAioRunner
from blobstore.clients.http_runner import HttpRunner
from blobstore.clients.lease import LeaseBase
from blobstore.clients.runner import Runner
from blobstore.clients.steps import Call
from blobstore.clients.writer import WriterBase
from blobstore.clients.writing import PutTerms
from blobstore.errors import InvalidRequest
from blobstore.hint import Hint
from blobstore.keys import Keys

T = TypeVar("T")
L = TypeVar("L", bound=LeaseBase)
W = TypeVar("W", bound=WriterBase)

Steps = Generator[Any, Any, T]
"""An operation of the way that it is given to."""


class Reading(Protocol):
    """How payloads come: the modules `reading` and `http_reading`."""

    def get(
        self,
        call: Call,
        kind: type[L],
        ns: BoundNamespace,
        keys: Keys,
        *,
        stream: bool,
        wait: bool,
        hint: Hint | None = None,
    ) -> Steps[L]:
        """A lease of the leading blobs."""

    def get_into(
        self,
        call: Call,
        ns: BoundNamespace,
        keys: Keys,
        buffers: object,
        lent_bytes_max: int,
        hint: Hint | None = None,
    ) -> Steps[int]:
        """How many leading blobs are in `buffers`."""


class Writing(Protocol):
    """How payloads go: the modules `writing` and `http_writing`."""

    def reserve(
        self, call: Call, kind: type[W], ns: BoundNamespace, keys: Keys, terms: PutTerms
    ) -> Steps[W]:
        """A writer for `keys`."""

    def put_from(
        self,
        call: Call,
        ns: BoundNamespace,
        keys: Keys,
        buffers: object,
        terms: PutTerms,
        lent_bytes_max: int,
    ) -> Steps[list[str]]:
        """What became of each of `buffers`."""


class Way(Protocol):
    """What both clients need of it."""

    @property
    def reading(self) -> Reading:
        """Operations that get."""

    @property
    def writing(self) -> Writing:
        """Operations that put."""

    @property
    def boot_id(self) -> int:
        """Of the daemon that was last met; 0 if there was none."""

    @property
    def lent_bytes_max(self) -> int:
        """How much the daemon lends."""

    def call(self, timeout_s: float | None) -> Call:
        """A call that starts now."""

    def close(self) -> None:
        """Disconnect."""


class ThreadsWay(Way, Protocol):
    """For threads."""

    def run(self, operation: Steps[T], call: Call) -> T:
        """Step an operation to its end."""


class LoopWay(Way, Protocol):
    """For an event loop."""

    async def connect(self) -> None:
        """Connect now, or raise Unavailable."""

    async def prepare(self, call: Call) -> None:
        """Learn the daemon's terms if there was none yet."""

    async def run(self, operation: Steps[T], call: Call) -> T:
        """Step an operation to its end."""


def for_threads(address: str, timeout_s: float, token: str, ca_file: str) -> ThreadsWay:
    """The way that `address` asks for, connected."""
    if is_http(address):
        return HttpRunner(HttpAddress.of(address, token=token, ca_file=ca_file), timeout_s)
    _check_local(address, token, ca_file)
    return Runner(address, timeout_s)


def for_loop(address: str, timeout_s: float, token: str, ca_file: str) -> LoopWay:
    """The way that `address` asks for; not connected yet."""
    if is_http(address):
        return HttpAioRunner(HttpAddress.of(address, token=token, ca_file=ca_file), timeout_s)
    _check_local(address, token, ca_file)
    return AioRunner(address, timeout_s)


def _check_local(address: str, token: str, ca_file: str) -> None:
    if token or ca_file:
        raise InvalidRequest(f"token and ca_file are for http:// and https://, not for {address!r}")
