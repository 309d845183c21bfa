"""The limit of a round trip: a bare echo on a Unix socket, uvloop at both ends.

A request starts with two numbers, its own length and the reply's, so that one
server stands for every exchange: it reads that many bytes and answers that many.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import uvloop

LIMIT_NAME = "bare echo of the same sizes on a Unix socket, uvloop at both ends, on cores apart"

_SIZES = struct.Struct("<II")


class _EchoServer(asyncio.Protocol):
    def __init__(self) -> None:
        self._missing = 0
        self._reply = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self._missing == 0:
            self._missing, reply_bytes = _SIZES.unpack_from(data)
            if len(self._reply) != reply_bytes:
                self._reply = bytes(reply_bytes)
        self._missing -= len(data)
        if self._missing == 0:
            self._transport.write(self._reply)


class _EchoClient(asyncio.Protocol):
    def __init__(self) -> None:
        self._missing = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def ask(self, request: bytes, reply_bytes: int) -> asyncio.Future[None]:
        self._done = asyncio.get_running_loop().create_future()
        self._missing = reply_bytes
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing == 0:
            assert self._done is not None
            self._done.set_result(None)

    def close(self) -> None:
        self._transport.close()


class Echo:
    """A client of an echo server in a process of its own; both end with the `with` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="blobstore-echo-")
        path = Path(self._folder.name) / "echo.sock"
        command = [sys.executable, "-m", "blobstore.bench.raw_echo", str(path)]
        self._server = subprocess.Popen(  # noqa: S603 (our own module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._server.stdout is not None
        self._server.stdout.readline()
        self._loop = uvloop.new_event_loop()
        _, self._client = self._loop.run_until_complete(
            self._loop.create_unix_connection(_EchoClient, str(path))
        )

    def round_trips(self, n: int, request_bytes: int, reply_bytes: int) -> list[float]:
        """The seconds that each of `n` round trips took."""
        request = _SIZES.pack(request_bytes, reply_bytes).ljust(request_bytes, b"\0")
        assert len(request) == request_bytes

        async def run() -> list[float]:
            taken_s = []
            for _ in range(n):
                started_s = time.perf_counter()
                await self._client.ask(request, reply_bytes)
                taken_s.append(time.perf_counter() - started_s)
            return taken_s

        return self._loop.run_until_complete(run())

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._server.pid

    def close(self) -> None:
        """End the server and remove its socket."""
        self._client.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        self._server.communicate()  # closes its standard input, which ends it
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def _serve(path: str) -> None:
    """Echo until standard input ends, so that a server never outlives its client."""
    server = await asyncio.get_running_loop().create_unix_server(_EchoServer, path)
    orphaned = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, orphaned.set)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await orphaned.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
