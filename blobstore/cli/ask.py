"""Questions to a running daemon.

Not through the client: that maps the arena and turns faults into misses. A person at
a terminal wants neither.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from blobstore.errors import (
    BlobStoreError,
    DeadlineExceeded,
    ProtocolError,
    Unavailable,
    from_code,
)
from blobstore.protocol import VERSION, Failed, Hello, Reply, Request, Welcome, decode_reply, encode
from blobstore.transports.framing import FrameReader, pack

R = TypeVar("R", bound=Reply)

_CHUNK_BYTES = 1 << 16


def ask(path: Path, request: Request, expected: type[R], timeout_s: float) -> R:
    """The daemon's reply. Raises Unavailable, DeadlineExceeded, or what it answers instead."""
    with reached(path, timeout_s) as daemon:
        return daemon.ask(request, expected)


@contextmanager
def reached(path: Path, timeout_s: float) -> Iterator[Daemon]:
    """The daemon at `path`, for several questions within `timeout_s` altogether.

    Raises as `ask` does. Nothing else that may raise OSError belongs into the block.
    """
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        daemon = Daemon(peer, path, deadline_s)
        try:
            daemon.greet()
            yield daemon
        except BlobStoreError:  # some of which are OSErrors
            raise
        except TimeoutError:
            raise DeadlineExceeded(
                f"the daemon at {path} did not answer within {timeout_s:g} s: try a longer "
                "--timeout, or look at its log"
            ) from None
        except OSError as error:
            raise Unavailable(
                f"no daemon answers at {path}: {error.strerror or error}: start one with "
                "`blobstore serve`, or name its socket with --socket"
            ) from None


class Daemon:
    """Requests and replies in turn, up to a deadline."""

    def __init__(self, peer: socket.socket, path: Path, deadline_s: float) -> None:
        self._peer = peer
        self._path = path
        self._deadline_s = deadline_s
        self._frames = FrameReader()
        self._boot_id = 0
        self.lent_bytes_max = 0
        """What one process may have on loan for writing."""

    def greet(self) -> None:
        """Connect, and learn the daemon's terms."""
        self._wait_no_longer()
        self._peer.connect(os.fspath(self._path))
        welcome = self.ask(Hello(VERSION, "blobstore"), Welcome)
        self._boot_id, self.lent_bytes_max = welcome.boot_id, welcome.lent_bytes_max

    def ask(self, request: Request, expected: type[R]) -> R:
        """The reply to `request`. Raises what the daemon answers instead."""
        self._wait_no_longer()
        self._peer.sendall(pack(1, self._boot_id, encode(request)))
        while True:
            self._wait_no_longer()
            # A plain recv: the arena's descriptors that come with a Welcome are not taken.
            data = self._peer.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("it hung up")
            for _, _, body in self._frames.feed(data):
                return self._checked(body, expected)

    def _wait_no_longer(self) -> None:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._peer.settimeout(remaining_s)

    def _checked(self, body: memoryview, expected: type[R]) -> R:
        try:
            reply = decode_reply(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self._path} is served by something else: {error}") from None
        if isinstance(reply, Failed):
            raise from_code(reply.code, reply.message, retry_after_s=reply.retry_after_s)
        if not isinstance(reply, expected):
            raise ProtocolError(
                f"wanted {expected.__name__} from {self._path}, found {type(reply).__name__}: "
                "use the same release on both sides"
            )
        return reply
