"""A daemon with its HTTP door open, and a client of it that is as plain as curl."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon, daemon

ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, whole. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The code of a failure."""
        return str(self.json["error"])


class HttpDaemon:
    """`daemon` as one who has its token sees it."""

    def __init__(self, run: Daemon) -> None:
        self.run = run
        lines = [line for line in run.said.splitlines() if line.startswith("ready: http")]
        self.url = lines[0].removeprefix("ready: ")
        self.host, _, port = self.url.partition("://")[2].rpartition(":")
        self.port = int(port)
        self.tls: ssl.SSLContext | None = None
        self.token = (run.data / "http.token").read_text().strip()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        token: str | None = "",
    ) -> Answer:
        """One request on a connection of its own. `token`: "" is the default one, None is none."""
        connection = self.connection()
        try:
            return ask_over(connection, method, path, body, self.headers(headers, token))
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """One that is opened by its first request."""
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        return http.client.HTTPSConnection(self.host, self.port, timeout=ANSWER_S, context=self.tls)

    def headers(
        self, more: Mapping[str, str] | None = None, token: str | None = ""
    ) -> dict[str, str]:
        given = {} if token is None else {"Authorization": f"Bearer {token or self.token}"}
        return given | dict(more or {})

    def post(self, path: str, body: object, *, token: str | None = "") -> Answer:
        """A request with a JSON body."""
        headers = {"Content-Type": "application/json"}
        return self.ask("POST", path, json.dumps(body), headers, token=token)

    def declare(self, nbytes: int, model: str = "m", tokens_per_blob: int = 256) -> str:
        """The path of a namespace of blobs of `nbytes`."""
        asked = {"model": model, "opaque_bytes": nbytes, "tokens_per_blob": tokens_per_blob}
        answer = self.post("/v1/namespaces", asked)
        assert answer.status == 200, answer
        assert answer.json["blob_bytes"] == nbytes
        return f"/v1/namespaces/{answer.json['id']}"

    def stats(self) -> Any:
        return self.ask("GET", "/v1/stats").json

    def nothing_is_lent(self) -> bool:
        """All that requests were lent has come back."""
        stats = self.stats()
        return not (stats["leases"] or stats["reservations"] or stats["lent_bytes"])

    def connect(self, *, receive_bytes: int = 0) -> socket.socket:
        """A bare connection, with a small window if asked for."""
        peer = socket.socket()
        peer.settimeout(ANSWER_S)
        if receive_bytes:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        peer.connect((self.host, self.port))
        return peer

    def head_of(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """A request's first bytes, up to its body."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.headers(headers).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def ask_over(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request over an open connection."""
    connection.request(method, path, body, dict(headers or {}))
    response = connection.getresponse()
    names = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, names, response.read())


@contextmanager
def http_daemon(
    home: Path, *options: str, environ: Mapping[str, str] | None = None
) -> Iterator[HttpDaemon]:
    """A daemon in `home` that serves HTTP on a free port."""
    listen = () if "--http" in options else ("--http", "127.0.0.1:0")
    with daemon(home, *listen, *options, environ=environ) as run:
        yield HttpDaemon(run)


def key(number: int | str) -> str:
    """A key of 32 bytes in hex."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def pattern(nbytes: int) -> bytes:
    """Bytes that show where they come from."""
    return bytes(range(251)) * (nbytes // 251) + bytes(nbytes % 251)


def put(door: HttpDaemon, path: str, data: bytes, **headers: str) -> Answer:
    """A put; `If_Match="…"` is the header If-Match."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return door.ask("PUT", path, data, named)


class Upload(threading.Thread):
    """A put in a thread of its own, which holds back its end until it is told."""

    def __init__(
        self,
        door: HttpDaemon,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._headers = door.headers(headers)
        self._door, self._path, self._body = door, path, body
        self._go_on = threading.Event()
        self.half_sent = threading.Event()
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        connection = self._door.connection()
        try:
            connection.putrequest("PUT", self._path)
            for name, value in self._headers.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(self._body)))
            connection.endheaders()
            half = len(self._body) // 2
            connection.send(self._body[:half])
            self.half_sent.set()
            self._go_on.wait(ANSWER_S)
            connection.send(self._body[half:])
            response = connection.getresponse()
            self.answer = Answer(response.status, {}, response.read())
        except OSError:
            self.answer = None
        finally:
            connection.close()

    def go_on(self) -> None:
        """Send the rest."""
        self._go_on.set()

    def finish(self) -> Answer | None:
        """Send the rest; the answer, or None if the connection broke."""
        self.go_on()
        self.join(ANSWER_S)
        return self.answer
