"""One connection to a daemon over HTTP/1.1.

Sockets never block: whatever moves bytes is a generator that yields what it waits for,
so that threads and event loops run the same steps. Payloads go from the caller's memory
to the socket and back without a copy between. After any error, and after an exchange
that was given up in the middle, the connection is closed: what comes next on it would
be the answer to something else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
from collections.abc import Callable

from blobstore.clients.handshake import Await
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_exchange import TURN, Exchange, Head, HttpSteps, Sink
from blobstore.clients.steps import Work
from blobstore.errors import BlobStoreError, ProtocolError, Unavailable

CHUNK_BYTES = 1 << 20
"""Read or written at a time: others get their turn after it."""
HEAD_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = 32 << 20
"""Of answers that are not payloads: facts about some thousand blobs."""

_READ_BYTES = 16 << 10
_NO_BODY = (204, 304)


class Unanswered(Unavailable):
    """The connection ended before a byte of an answer: a new one may be tried."""


class Wire:
    """A connected socket, plain or with TLS, and what was read from it ahead."""

    def __init__(self, address: HttpAddress, sock: socket.socket) -> None:
        self._address = address
        self._sock = sock
        self._ahead = bytearray()
        self._begun = False
        """Whether a byte of the answer that is awaited has arrived."""
        self._since_turn = 0
        self._flags = socket.MSG_NOSIGNAL if address.tls is None else 0

    def close(self) -> None:
        """Whatever state it is in."""
        self._sock.close()

    @property
    def is_idle(self) -> bool:
        """Whether the daemon still holds its end, and has sent nothing unasked."""
        return not self._ahead and not _is_ready(self._sock, select.POLLIN)

    def perform(self, exchange: Exchange) -> HttpSteps[bool]:
        """Send the request and take in the answer; whether another may follow on this wire."""
        self._begun = False
        all_sent = yield from self._send(exchange)
        head = yield from self._receive_head()
        while head.status < 200:
            head = yield from self._receive_head()
        yield from self._receive_body(exchange, head)
        exchange.head = head
        return all_sent and head.keeps_alive and not self._ahead

    def _send(self, exchange: Exchange) -> HttpSteps[bool]:
        """False if the daemon answered before it had all."""
        payload = memoryview(exchange.payload)
        head = (
            f"{exchange.method} {self._address.base}{exchange.path} HTTP/1.1\r\n"
            f"{self._address.head_lines}{exchange.header_lines}Accept-Encoding: identity\r\n"
        )
        if exchange.method in ("PUT", "POST"):
            head += f"Content-Type: {exchange.content_type}\r\nContent-Length: {payload.nbytes}\r\n"
        data = f"{head}\r\n".encode("ascii")
        if payload.nbytes <= _READ_BYTES:
            return (yield from self._send_all(memoryview(data + payload)))
        return (yield from self._send_all(memoryview(data))) and (
            yield from self._send_all(payload)
        )

    def _send_all(self, data: memoryview) -> HttpSteps[bool]:
        since_turn = 0
        while data:
            try:
                sent = self._sock.send(data[:CHUNK_BYTES], self._flags)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                yield Await(self._sock, select.POLLIN | select.POLLOUT)
                if _is_ready(self._sock, select.POLLIN) and self._is_answered():
                    return False
                continue
            except OSError as error:
                # It may have said why before it hung up.
                if self._is_answered():
                    return False
                raise Unanswered(f"{self._address.url} hung up: {error}") from error
            data = data[sent:]
            since_turn += sent
            if since_turn >= CHUNK_BYTES:
                since_turn = 0
                yield Await(self._sock, TURN)
        return True

    def _is_answered(self) -> bool:
        """Whether bytes of an answer are there; raises Unanswered at the end of the stream."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise Unanswered(f"{self._address.url} hung up: {error}") from error
        if not data:
            raise Unanswered(f"{self._address.url} hung up")
        self._ahead += data
        self._begun = True
        return True

    def _receive_head(self) -> HttpSteps[Head]:
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            if len(self._ahead) > HEAD_BYTES_MAX:
                raise ProtocolError(f"an answer's head is longer than {HEAD_BYTES_MAX} bytes")
            yield from self._read_ahead()
        head = parse_head(bytes(self._ahead[:end]))
        del self._ahead[: end + 4]
        return head

    def _receive_body(self, exchange: Exchange, head: Head) -> HttpSteps[None]:
        if exchange.method == "HEAD" or head.status in _NO_BODY:
            return
        if exchange.sink is not None and head.status == 200:
            yield from self._receive_into(exchange.sink, head)
        elif "chunked" in head.headers.get("transfer-encoding", "").lower():
            exchange.body = yield from self._receive_chunked()
        else:
            nbytes = head.content_length
            if nbytes is None:
                raise ProtocolError("an answer does not say how long it is")
            exchange.body = yield from self._take(nbytes)

    def _receive_into(self, sink: Sink, head: Head) -> HttpSteps[None]:
        if "transfer-encoding" in head.headers or "content-encoding" in head.headers:
            raise ProtocolError("a payload came encoded")
        since_turn = 0
        for piece in sink.place(head):
            rest = piece
            while rest:
                if self._ahead:
                    n = min(len(self._ahead), rest.nbytes)
                    rest[:n] = self._ahead[:n]
                    del self._ahead[:n]
                else:
                    n = yield from self._read_into(rest[:CHUNK_BYTES])
                sink.took(rest[:n])
                rest = rest[n:]
                since_turn += n
                if since_turn >= CHUNK_BYTES:
                    since_turn = 0
                    yield Await(self._sock, TURN)
        sink.finish()

    def _receive_chunked(self) -> HttpSteps[bytes]:
        body = bytearray()
        while True:
            size = (yield from self._take_line()).partition(b";")[0].strip()
            try:
                nbytes = int(size, 16)
            except ValueError as error:
                raise ProtocolError(f"an answer has a chunk of {size[:20]!r} bytes") from error
            if nbytes < 0 or len(body) + nbytes > BODY_BYTES_MAX:
                raise ProtocolError(f"an answer is longer than {BODY_BYTES_MAX} bytes")
            if nbytes == 0:
                while (yield from self._take_line()):
                    pass  # trailers
                return bytes(body)
            body += yield from self._take(nbytes)
            if (yield from self._take_line()):
                raise ProtocolError("an answer has a chunk that is longer than it says")

    def _take_line(self) -> HttpSteps[bytes]:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > HEAD_BYTES_MAX:
                raise ProtocolError(f"an answer has a line longer than {HEAD_BYTES_MAX} bytes")
            yield from self._read_ahead()
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _take(self, nbytes: int) -> HttpSteps[bytes]:
        if nbytes > BODY_BYTES_MAX:
            raise ProtocolError(f"an answer is longer than {BODY_BYTES_MAX} bytes")
        while len(self._ahead) < nbytes:
            yield from self._read_ahead()
        body = bytes(self._ahead[:nbytes])
        del self._ahead[:nbytes]
        return body

    def _read_ahead(self) -> HttpSteps[None]:
        room = memoryview(bytearray(_READ_BYTES))
        n = yield from self._read_into(room)
        self._ahead += room[:n]
        self._since_turn += n
        if self._since_turn >= CHUNK_BYTES:  # whatever comes without an end, a deadline ends
            self._since_turn = 0
            yield Await(self._sock, TURN)

    def _read_into(self, room: memoryview) -> HttpSteps[int]:
        """How many bytes came, at least one. Raises at the end of the stream."""
        while True:
            try:
                n = self._sock.recv_into(room)
            except (BlockingIOError, ssl.SSLWantReadError):
                yield Await(self._sock, select.POLLIN)
                continue
            except ssl.SSLWantWriteError:
                yield Await(self._sock, select.POLLOUT)
                continue
            except OSError as error:
                raise self._cut(str(error)) from error
            if not n:
                raise self._cut("its end was closed")
            self._begun = True
            return n

    def _cut(self, how: str) -> Unavailable:
        kind = Unavailable if self._begun else Unanswered
        return kind(f"{self._address.url} hung up: {how}")


def parse_head(data: bytes) -> Head:
    """Status line and headers, without the empty line; ProtocolError if they are none."""
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit()):
        raise ProtocolError(f"no answer of HTTP/1.1: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise ProtocolError(f"no header: {line[:80]!r}")
        headers[name.lower()] = value.strip()
    keeps_alive = version == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
    return Head(int(status), headers, keeps_alive)


def connect(address: HttpAddress) -> HttpSteps[Wire]:
    """A new connection. Raises Unavailable if nobody answers, or not whom the CA vouches for."""
    failed: BlobStoreError = Unavailable(f"no daemon answers at {address.url}")
    for family, where in (yield from _resolve(address)):
        try:
            return (yield from _connect(address, family, where))
        except Unavailable as error:
            failed = error
    raise failed


def _connect(address: HttpAddress, family: int, where: object) -> HttpSteps[Wire]:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(where)  # type: ignore[arg-type]  # as getaddrinfo gave it
        if code == errno.EINPROGRESS:
            yield Await(sock, select.POLLOUT)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise Unavailable(f"no daemon answers at {address.url}: {os.strerror(code)}")
        if address.tls is not None:
            sock = address.tls.wrap_socket(
                sock, server_hostname=address.host, do_handshake_on_connect=False
            )
            yield from _shake_hands(address, sock)
    except BaseException:
        sock.close()
        raise
    return Wire(address, sock)


def _shake_hands(address: HttpAddress, sock: ssl.SSLSocket) -> HttpSteps[None]:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            yield Await(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            yield Await(sock, select.POLLOUT)
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(
                f"nobody vouches for {address.url}: {error.verify_message}: is it that host, and "
                "is its CA known (ca_file)?"
            ) from error
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"no TLS with {address.url}: {error}") from error
        else:
            return


def _resolve(address: HttpAddress) -> HttpSteps[list[tuple[int, object]]]:
    """Families and addresses; only a name, which others must be asked for, takes time."""

    def look_up(flags: int = 0) -> list[tuple[int, object]]:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, where) for family, _, _, _, where in found]

    with contextlib.suppress(OSError):
        return look_up(socket.AI_NUMERICHOST)
    found: list[tuple[int, object]] = yield Work(_unless_unknown(address, look_up))
    return found


def _unless_unknown(
    address: HttpAddress, look_up: Callable[[], list[tuple[int, object]]]
) -> Callable[[], list[tuple[int, object]]]:
    def run() -> list[tuple[int, object]]:
        try:
            return look_up()
        except (OSError, UnicodeError) as error:
            raise Unavailable(f"no host like that of {address.url}: {error}") from error

    return run


def _is_ready(sock: socket.socket, events: int) -> bool:
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(0))
