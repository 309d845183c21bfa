"""LMCache's own cache server as a contestant of `bench peers`.

Spoken to as its own connector does (lmcache.v1.protocol, 0.5.6): a header of fixed
size, then the payload, straight from and into the caller's buffers. So this
process needs none of its packages, and the server may live in an environment of
its own: its requirements exclude current versions of many others.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from blobstore.bench.blobs import require
from blobstore.bench.peer import Bytes, Payload, Room, find_program, view
from blobstore.bench.server_process import ServerProcess, free_port, listens

_PUT, _GET, _EXIST = 1, 2, 3
_BINARY, _UINT8, _FOUND = 4, 6, 200
_REQUEST = struct.Struct("=9i150s")
"""Command, length, format, dtype, location, shape, key."""
_REPLY = struct.Struct("=9i")
"""Code, length, format, dtype, shape, location."""
_TIMEOUT_S = 60.0


class LMCacheServer:
    """`lmcache_server`, which keeps blobs in its memory, and one connection to it."""

    name = "lmcache"

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._socket: socket.socket | None = None

    @property
    def how(self) -> str:
        """What is measured."""
        return (
            f"lmcache_server {_installed()}, TCP on loopback, its protocol written by hand as its "
            "connector does: PUT and GET one after the other, straight from and into the caller's "
            "buffers (a PUT has no answer: one EXIST ends the puts); exists one by one, it has no "
            "batch"
        )

    def missing(self) -> str:
        """The program."""
        if find_program("lmcache_server"):
            return ""
        return (
            "pip install lmcache into an environment of its own (6 GB; it needs older NumPy and "
            "protobuf) and put the bin directory with lmcache_server on PATH"
        )

    def start(self, room: Room) -> None:
        """Start the server and connect."""
        self._process = ServerProcess("lmcache_server")
        port = free_port()
        command = [find_program("lmcache_server"), "127.0.0.1", str(port), "cpu"]
        self._process.start(command, lambda: listens(port))
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """PUT, one after the other; the server has all when it answers about the last."""
        for key, source in zip(keys, sources, strict=True):
            self._send(_PUT, key, source.nbytes)
            self._connection.sendall(view(source))
        require(self._held(keys[-1]), "the last blob was stored")

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """GET, one after the other."""
        for key, target in zip(keys, targets, strict=True):
            self._send(_GET, key, 0)
            code, nbytes, *_ = self._reply()
            require((code, nbytes) == (_FOUND, target.nbytes), "the blob was there")
            self._receive(view(target))
        return targets

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """EXIST, one after the other."""
        return [self._held(key) for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        """It cannot remove anything: empty blobs take the place of these."""
        for key in keys:
            self._send(_PUT, key, 0)

    def stop(self) -> None:
        """Disconnect and end the server."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    @property
    def _connection(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _held(self, key: bytes) -> bool:
        self._send(_EXIST, key, 0)
        return bool(self._reply()[0] == _FOUND)

    def _send(self, command: int, key: bytes, nbytes: int) -> None:
        # Its keys are of 64 bits: model, ranks, hash, type.
        name = f"bench@1@0@{key[:8].hex()}@uint8".encode().ljust(150)
        self._connection.sendall(
            _REQUEST.pack(command, nbytes, _BINARY, _UINT8, 0, nbytes, 0, 0, 0, name)
        )

    def _reply(self) -> tuple[int, ...]:
        reply = bytearray(_REPLY.size)
        self._receive(memoryview(reply))
        return _REPLY.unpack(reply)

    def _receive(self, into: memoryview) -> None:
        while into:
            received = self._connection.recv_into(into)
            require(received > 0, "lmcache_server kept the connection")
            into = into[received:]


def _installed() -> str:
    """Its version: it may be installed beside another Python than ours."""
    beside = Path(find_program("lmcache_server")).resolve().parents[1]
    found = beside.glob("lib/python3*/site-packages/lmcache-*.dist-info")
    return next((path.stem.partition("-")[2] for path in found), "(version unknown)")
