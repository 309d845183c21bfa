"""Reaching a daemon: address, connection, greeting, and the two descriptors of its arena.

`greet` is a generator that never blocks: it yields what it waits for, so that threads
and event loops run the same steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blobstore.errors import (
    BlobStoreError,
    InvalidRequest,
    ProtocolError,
    Unavailable,
    from_code,
)
from blobstore.protocol import VERSION, Failed, Hello, Welcome, decode_reply, encode
from blobstore.transports.framing import FrameReader, pack

RETRY_S = 0.005
"""Between tries while the daemon's queue of new connections is full."""

_PATH_BYTES_MAX = 107  # sockaddr_un
_N_DESCRIPTORS = 2


@dataclass(frozen=True, slots=True)
class Await:
    """Go on when `sock` is ready for `events` (as of poll), or after a moment if there are none."""

    sock: socket.socket
    events: int


@dataclass(frozen=True, slots=True)
class Greeted:
    """A connected socket, the daemon's terms, and the arena's descriptors. Owned by the taker."""

    sock: socket.socket
    welcome: Welcome
    read_only_fd: int
    read_write_fd: int

    def close_descriptors(self) -> None:
        """For a taker that has the arena already."""
        os.close(self.read_only_fd)
        os.close(self.read_write_fd)


def socket_path(address: str) -> str:
    """The path in an address like `unix:/run/blobstore.sock`; InvalidRequest for any other."""
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path:
        raise InvalidRequest(
            f"not an address of a daemon: {address!r} (examples: unix:/run/blobstore.sock, "
            "http://127.0.0.1:8080)"
        )
    path = path.removeprefix("//")
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise InvalidRequest(
            f"the path of a socket has at most {_PATH_BYTES_MAX} bytes, {path!r} has "
            f"{len(os.fsencode(path))}"
        )
    return path


def greet(path: str) -> Generator[Await, None, Greeted]:
    """Connect and exchange greetings. Closing the generator closes what it had opened.

    Raises Unavailable if nobody listens at `path`, or what the daemon answers instead.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        sock.setblocking(False)
        yield from _connect(sock, path)
        yield from _send(sock, pack(1, 0, encode(Hello(VERSION, _name()))))
        welcome = yield from _receive(sock, descriptors)
        if welcome.version != VERSION or len(descriptors) != _N_DESCRIPTORS:
            raise ProtocolError(
                f"wanted a daemon of protocol {VERSION} that passes {_N_DESCRIPTORS} descriptors, "
                f"found protocol {welcome.version} and {len(descriptors)}: use the same version "
                "of client and daemon"
            )
        greeted = Greeted(sock, welcome, *descriptors)
    except BaseException:
        sock.close()
        for fd in descriptors:
            os.close(fd)
        raise
    return greeted


def _name() -> str:
    """What people see in the daemon's list of clients."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/comm").read_text().strip()
    return "python"


def _connect(sock: socket.socket, path: str) -> Generator[Await, None, None]:
    while (code := sock.connect_ex(path)) != 0:
        if code != errno.EAGAIN:
            raise Unavailable(
                f"no daemon answers at {path}: {os.strerror(code)}: start one with "
                f"`blobstore serve --socket {path}`, or name the socket of one that runs"
            )
        yield Await(sock, 0)  # its queue is full


def _send(sock: socket.socket, data: bytes) -> Generator[Await, None, None]:
    while data:
        try:
            data = data[sock.send(data, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            yield Await(sock, select.POLLOUT)
        except OSError as error:
            raise Unavailable(f"the daemon hung up: {error}") from error


def _receive(sock: socket.socket, descriptors: list[int]) -> Generator[Await, None, Welcome]:
    """The Welcome; descriptors are added to the list as they come."""
    reader = FrameReader()
    while True:
        yield Await(sock, select.POLLIN)
        try:
            data, fds, _, _ = socket.recv_fds(sock, 4096, 16, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        except OSError as error:
            raise Unavailable(f"the daemon hung up: {error}") from error
        descriptors += fds
        if not data:
            raise Unavailable("the daemon hung up before it greeted")
        for _, _, body in reader.feed(data):
            return _welcome(body)


def _welcome(body: memoryview) -> Welcome:
    try:
        reply = decode_reply(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the daemon's greeting is no message: {error}") from error
    if isinstance(reply, Failed):
        raise from_code(reply.code, reply.message, reply.retry_after_s)
    if not isinstance(reply, Welcome):
        raise ProtocolError(f"wanted Welcome, the daemon sent {type(reply).__name__}")
    return reply


def no_answer(path: str) -> BlobStoreError:
    """What is raised when `greet` is not done by the deadline."""
    return Unavailable(f"the daemon at {path} did not greet in time")
