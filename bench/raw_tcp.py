"""The limit of a transfer over HTTP on this machine: the bytes alone, over a TCP socket.

A peer in a process of its own sends what it has in memory, or receives into it, as
fast as blocking sockets go. Owns the process and the connection.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from types import TracebackType
from typing import Self

import numpy as np

from blobstore.bench.pairs import timed
from blobstore.bench.raw_copy import Bytes

LIMIT_NAME = "the same bytes over a TCP socket on loopback, blocking calls at both ends"

_ASK = struct.Struct("<cQ")
"""`g` and a size: send me so much; `p` and a size: take so much, and say when you have it."""
_GET, _PUT, _DONE = b"g", b"p", b"."
_SOCKET_S = 60.0


class TcpPeer:
    """A connection to a peer that sends and receives up to `nbytes` at a time."""

    def __init__(self, nbytes: int) -> None:
        command = [sys.executable, "-m", "blobstore.bench.raw_tcp", str(nbytes)]
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert self._process.stdout is not None
            port = int(self._process.stdout.readline())
            self._socket = socket.create_connection(("127.0.0.1", port), _SOCKET_S)
        except BaseException:
            self._process.communicate()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.communicate()  # closes its standard input, which ends it

    def get(self, into: Bytes) -> float:
        """Fill `into` with the peer's bytes; the seconds taken."""

        def receive() -> None:
            self._socket.sendall(_ASK.pack(_GET, into.nbytes))
            _receive(self._socket, into.data)

        return timed(receive)

    def put(self, source: Bytes) -> float:
        """Send `source`; the seconds until the peer has all of it."""

        def send() -> None:
            self._socket.sendall(_ASK.pack(_PUT, source.nbytes))
            self._socket.sendall(source.data)
            _receive(self._socket, memoryview(bytearray(len(_DONE))))

        return timed(send)


def _receive(peer: socket.socket, into: memoryview) -> None:
    done = 0
    while done < into.nbytes:
        n = peer.recv_into(into[done:])
        if n == 0:
            raise ConnectionResetError(f"the peer hung up after {done} of {into.nbytes} bytes")
        done += n


def _serve(nbytes: int) -> None:
    """Serve one connection until it closes."""
    memory = np.ones(nbytes, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        listener.settimeout(_SOCKET_S)
        peer, _ = listener.accept()
    with peer:
        peer.settimeout(None)
        asked = bytearray(_ASK.size)
        while True:
            try:
                _receive(peer, memoryview(asked))
            except ConnectionResetError:
                return
            what, size = _ASK.unpack(asked)
            if what == _GET:
                peer.sendall(memory[:size])
            else:
                _receive(peer, memory[:size])
                peer.sendall(_DONE)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
