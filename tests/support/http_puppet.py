"""A server that speaks as much HTTP as a test tells it, and may do so badly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from blobstore.digest import payload_digest, piece_digests

WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    """Its number, from 0."""


Script = Callable[[Asked], "bytes | list[bytes] | None"]
"""The bytes of the answer (of a list, one by one); with None the connection is closed."""


class HttpPuppet:
    """Answers /v1/stats by itself, and all else as `script` says. Each connection has a thread."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.leave_unread = ""
        """Requests of this method are answered before their bodies have come."""
        self.asked: list[Asked] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def paths(self) -> list[str]:
        """What was asked, without the greeting."""
        return [f"{a.method} {a.path}" for a in self.asked if a.path != "/v1/stats"]

    def hang_up(self) -> None:
        """Close all connections, as a server does with idle ones."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(WAIT_S)
            number = len(self.connections)
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, number))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError):
            while (asked := self._read(connection, number)) is not None:
                self.asked.append(asked)
                said = ok({"boot_id": 7}) if asked.path == "/v1/stats" else self._script(asked)
                if said is None:
                    return
                for some in said if isinstance(said, list) else [said]:
                    connection.sendall(some)

    def _read(self, connection: socket.socket, number: int) -> Asked | None:
        data = b""
        while b"\r\n\r\n" not in data:
            some = connection.recv(65536)
            if not some:
                return None
            data += some
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        unread = method == self.leave_unread
        nbytes = 0 if unread else int(headers.get("content-length", "0"))
        while len(body) < nbytes:
            body += connection.recv(1 << 20)
        return Asked(method, path, headers, body, number)


def answer(status: int, body: bytes, *headers: str) -> bytes:
    """An answer with these bytes."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ok(body: object) -> bytes:
    """A success in JSON."""
    return answer(200, json.dumps(body).encode())


def failed(status: int, code: str, **facts: object) -> bytes:
    """A failure as the daemon tells it."""
    return answer(status, json.dumps({"error": code, "message": "m", **facts}).encode())


def payload(data: bytes, *headers: str) -> bytes:
    """A blob."""
    digest = payload_digest(len(data), piece_digests(memoryview(data)))
    return answer(200, data, f'ETag: "{digest.hex()}"', "X-Blobstore-Tier: ssd", *headers)
