"""Redis as a contestant of `bench peers`, twice: through its Python package, and by hand.

By hand means that the two commands are written to the socket as its protocol
says, payloads straight from and into the caller's buffers: no client library can
do less. The package cannot do that, but it is what programs use.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING

from blobstore.bench.blobs import require
from blobstore.bench.peer import Bytes, Payload, Room, find_package, find_program, view
from blobstore.bench.server_process import ServerProcess

if TYPE_CHECKING:
    from redis import Redis

_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 20
"""What the package asks the socket for at a time: its default of 32 KiB halves its rate."""

# One round trip and an answer for each key. EXISTS with many keys gives only their number,
# and a pipeline of one EXISTS each takes the package four times as long.
_EXISTS = "local r = {} for i, k in ipairs(KEYS) do r[i] = redis.call('EXISTS', k) end return r"


class RedisServer:
    """`redis-server` on a Unix socket, without persistence."""

    def __init__(self) -> None:
        self._process = ServerProcess("redis-server")
        self.path = str(self._process.home / "redis.sock")

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        command = [find_program("redis-server"), "--port", "0", "--unixsocket", self.path]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._process.home)]
        command += ["--maxmemory", "0", "--timeout", "0"]
        self._process.start(command, self._accepts)

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.path) == 0


def _server_version() -> str:
    command = [find_program("redis-server"), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return next((word[2:] for word in said.split() if word.startswith("v=")), "unknown")


def _missing_server() -> str:
    return "" if find_program("redis-server") else "apt-get install redis-server"


class RedisPackage:
    """The package `redis`: its best calls, and reads of 1 MiB."""

    name = "redis"

    def __init__(self) -> None:
        self._server: RedisServer | None = None
        self._redis: Redis | None = None

    @property
    def how(self) -> str:
        """What is measured."""
        parser = f"hiredis {version('hiredis')}" if find_package("hiredis") else "no hiredis"
        return (
            f"redis-server {_server_version()}, redis-py {version('redis')} with {parser}, Unix "
            "socket: SET from the caller's buffer and GET to new bytes, one after the other (a "
            "pipeline and MGET are slower); exists of all keys in one script"
        )

    def missing(self) -> str:
        """The package or the server."""
        if not find_package("redis"):
            return "pip install redis hiredis"
        return _missing_server()

    def start(self, room: Room) -> None:
        """Start the server and connect."""
        from redis import ConnectionPool, Redis, UnixDomainSocketConnection

        self._server = RedisServer()
        self._server.start()
        pool = ConnectionPool(
            connection_class=UnixDomainSocketConnection,
            path=self._server.path,
            socket_timeout=_TIMEOUT_S,
            socket_read_size=_READ_BYTES,
        )
        self._redis = Redis(connection_pool=pool)
        self._exists = self._redis.register_script(_EXISTS)

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """SET, one after the other."""
        client = self._client
        for key, source in zip(keys, sources, strict=True):
            require(bool(client.set(key, view(source))), "SET answered OK")

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """GET, one after the other, to new bytes."""
        client = self._client
        found: list[Payload] = []
        for key in keys:
            payload = client.get(key)
            require(isinstance(payload, bytes), "the key was there")
            assert isinstance(payload, bytes)
            found.append(payload)
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """One script."""
        answers = self._exists(keys=list(keys))
        assert isinstance(answers, list)
        return [answer == 1 for answer in answers]

    def remove(self, keys: Sequence[bytes]) -> None:
        """UNLINK."""
        self._client.unlink(*keys)

    def stop(self) -> None:
        """Disconnect and end the server."""
        if self._redis is not None:
            self._redis.close()
            self._redis.connection_pool.disconnect()
            self._redis = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def _client(self) -> Redis:
        assert self._redis is not None
        return self._redis


class RedisByHand:
    """Redis' protocol on a socket of our own."""

    name = "redis by hand"

    def __init__(self) -> None:
        self._server: RedisServer | None = None
        self._socket: socket.socket | None = None

    @property
    def how(self) -> str:
        """What is measured."""
        return (
            f"redis-server {_server_version()} without a client library, Unix socket: SET and GET "
            "written to the socket by hand, straight from and into the caller's buffers, the next "
            "command under way while one is answered; exists pipelined"
        )

    def missing(self) -> str:
        """The server."""
        return _missing_server()

    def start(self, room: Room) -> None:
        """Start the server and connect."""
        self._server = RedisServer()
        self._server.start()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.connect(self._server.path)

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """SET; each is sent before the one ahead of it has been answered."""
        for number, (key, source) in enumerate(zip(keys, sources, strict=True)):
            head = _command(b"SET", key) + b"$%d\r\n" % source.nbytes
            self._send(head.replace(b"*2", b"*3", 1))
            self._send(view(source))
            self._send(b"\r\n")
            if number:
                self._expect(b"+OK\r\n")
        self._expect(b"+OK\r\n")

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """GET; each is asked for before the one ahead of it has been read."""
        commands = [_command(b"GET", key) for key in keys]
        self._send(commands[0])
        for target, following in zip(targets, [*commands[1:], b""], strict=True):
            self._send(following)
            self._expect(b"$%d\r\n" % target.nbytes)
            self._receive(view(target))
            self._expect(b"\r\n")
        return targets

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """All commands in one write."""
        self._send(b"".join(_command(b"EXISTS", key) for key in keys))
        answers = bytearray(len(b":1\r\n") * len(keys))
        self._receive(memoryview(answers))
        return [answer == ord("1") for answer in answers[1::4]]

    def remove(self, keys: Sequence[bytes]) -> None:
        """UNLINK."""
        parts = (b"$%d\r\n%s\r\n" % (len(key), key) for key in keys)
        head = b"*%d\r\n$6\r\nUNLINK\r\n" % (1 + len(keys))
        self._send(b"".join(chain([head], parts)))
        self._expect(b":%d\r\n" % len(keys))

    def stop(self) -> None:
        """Disconnect and end the server."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _send(self, data: bytes | memoryview) -> None:
        assert self._socket is not None
        if data:
            self._socket.sendall(data)

    def _receive(self, into: memoryview) -> None:
        assert self._socket is not None
        while into:
            received = self._socket.recv_into(into)
            require(received > 0, "redis-server kept the connection")
            into = into[received:]

    def _expect(self, answer: bytes) -> None:
        """Read as much as `answer`; a miss or an error is shorter or another."""
        found = bytearray(len(answer))
        # No answer has fewer bytes than this: a miss does not make us wait for more.
        shortest = memoryview(found)[: min(len(answer), len(b"$-1\r\n"))]
        self._receive(shortest)
        if answer.startswith(shortest):
            self._receive(memoryview(found)[len(shortest) :])
        require(found == answer, f"redis-server answered {bytes(answer)!r} (was: {bytes(found)!r})")


def _command(verb: bytes, key: bytes) -> bytes:
    return b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(verb), verb, len(key), key)
