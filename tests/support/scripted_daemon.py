"""A daemon on a real socket with a real arena, whose every answer a test can replace.

By default it behaves: a store in memory that never evicts. `script[Get] = f` lets f
answer instead: with a reply, raw bytes, or None (no answer; see `answer_late`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.digest import payload_digest, piece_digests
from blobstore.namespace import Namespace
from blobstore.protocol import (
    NO_EXTENT,
    VERSION,
    Abort,
    Declare,
    Declared,
    Done,
    Drop,
    Exists,
    Failed,
    Get,
    Held,
    Hello,
    Holding,
    Keyed,
    Leased,
    Match,
    Matched,
    Pin,
    Ping,
    Pong,
    Prefetch,
    Release,
    Reply,
    Report,
    Request,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    SealParts,
    Stat,
    Stats,
    Verify,
    Wait,
    Waited,
    Welcome,
    decode_request,
    encode,
)
from blobstore.transports.framing import FrameReader, pack

PAGE = 4096
Script = Callable[[Request], Reply | bytes | None]


@dataclass(frozen=True, slots=True)
class Blob:
    offset: int
    nbytes: int
    digest: bytes


@dataclass(slots=True)
class Reservation:
    keys: list[bytes]
    extents: list[tuple[int, int]]
    reasons: list[str]


@dataclass(slots=True)
class Peer:
    """One connection, and how it is told from others in `requests`."""

    sock: socket.socket
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, data: bytes) -> None:
        with self.sending, contextlib.suppress(OSError):
            self.sock.sendall(data)


class ScriptedDaemon:
    """See the module. Use as a context manager; `address` is what clients take."""

    def __init__(self, path: Path, *, arena_bytes: int = 8 << 20, boot_id: int = 7) -> None:
        self.path = path
        self.address = f"unix:{path}"
        self.boot_id = boot_id
        self.arena_bytes = arena_bytes
        self.script: dict[type[Request], Script] = {}
        self.requests: list[Request] = []
        self.greet: Callable[[], Reply | bytes | None] = self._welcome
        self.n_descriptors = 2
        self.lent_bytes_max = arena_bytes // 2
        self.max_body_bytes = 8 << 20
        self.unanswered: list[tuple[Peer, int, Request]] = []
        self.peers: list[Peer] = []
        self._threads: list[threading.Thread] = []
        self._forget_all()

    def __enter__(self) -> ScriptedDaemon:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        self._fd = os.memfd_create("scripted-arena", os.MFD_CLOEXEC)
        os.posix_fallocate(self._fd, 0, self.arena_bytes)
        self._read_only_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._spawn(self._accept)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} is stuck"
        self._threads.clear()
        self._listener.close()
        os.close(self._fd)
        os.close(self._read_only_fd)
        self.path.unlink(missing_ok=True)

    def restart(self, boot_id: int | None = None) -> None:
        """As after a crash: another arena, nothing remembered, by default another boot id."""
        self.stop()
        self.boot_id = self.boot_id + 1 if boot_id is None else boot_id
        self._forget_all()
        self.start()

    def hang_up(self) -> None:
        """Close all connections, and go on listening."""
        for peer in list(self.peers):
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def silence(self, *kinds: type[Request]) -> None:
        """Do not answer requests of these kinds, until `answer_late`."""
        for kind in kinds:
            self.script[kind] = lambda request: None

    def answer_late(self) -> None:
        """Answer all that was left unanswered as by default, and what comes from now on."""
        for kind in {type(request) for _, _, request in self.unanswered}:
            self.script.pop(kind, None)
        self.catch_up()

    def catch_up(self) -> None:
        """Answer all that was left unanswered, as by default."""
        pending, self.unanswered = self.unanswered, []
        for peer, request_id, request in pending:
            self._reply(peer, request_id, self.default(request))

    def seen(self, *kinds: type[Request]) -> list[Request]:
        """Requests of these kinds so far."""
        return [request for request in list(self.requests) if isinstance(request, kinds)]

    def released(self) -> list[int]:
        """Lease ids that were released so far, in order."""
        return [i for r in list(self.requests) if isinstance(r, Release) for i in r.lease_ids]

    def handed_back(self) -> list[int]:
        """Extents that were handed back so far, in order."""
        return [i for r in list(self.requests) if isinstance(r, Release) for i in r.extents]

    def store(self, namespace: Namespace, key: bytes, payload: bytes) -> Blob:
        """Put a blob in from behind."""
        self.namespaces[namespace.id] = namespace
        offset = self._allocate(len(payload))
        os.pwrite(self._fd, payload, offset)
        blob = Blob(offset, len(payload), _digest(payload))
        self.blobs[namespace.id, key] = blob
        return blob

    def drop_all(self) -> None:
        """Forget all blobs."""
        self.blobs.clear()

    def payload(self, namespace: Namespace, key: bytes) -> bytes:
        """What is stored."""
        blob = self.blobs[namespace.id, key]
        return self.read(blob.offset, blob.nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the arena."""
        return os.pread(self._fd, nbytes, offset)

    def overwrite(self, offset: int, data: bytes) -> None:
        """Change bytes of the arena, as another writer that got the extent would."""
        os.pwrite(self._fd, data, offset)

    def _forget_all(self) -> None:
        self.namespaces: dict[bytes, Namespace] = {}
        self.blobs: dict[tuple[bytes, bytes], Blob] = {}
        self.leases: dict[int, list[Blob]] = {}
        self.reservations: dict[int, Reservation] = {}
        self._ids = itertools.count(1)
        self._end = PAGE

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"scripted {target.__name__}")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = Peer(sock)
            self.peers.append(peer)
            self._spawn(self._serve, peer)

    def _serve(self, peer: Peer) -> None:
        with peer.sock, contextlib.suppress(OSError):
            for request_id, request in self._frames(peer.sock):
                self.requests.append(request)
                if isinstance(request, Hello):
                    self._answer_hello(peer, request_id)
                    continue
                script = self.script.get(type(request), self.default)
                reply = script(request)
                if isinstance(reply, bytes):
                    peer.send(reply)
                elif reply is None:
                    self.unanswered.append((peer, request_id, request))
                else:
                    self._reply(peer, request_id, reply)
        self.peers.remove(peer)

    def _frames(self, sock: socket.socket) -> Iterator[tuple[int, Request]]:
        reader = FrameReader()
        while data := sock.recv(1 << 16):
            for request_id, _, body in reader.feed(data):
                yield request_id, decode_request(body)

    def _reply(self, peer: Peer, request_id: int, reply: Reply) -> None:
        if request_id:
            peer.send(self.frame(request_id, reply))

    def frame(self, request_id: int, reply: Reply) -> bytes:
        """A reply as it goes over the wire."""
        return pack(request_id, self.boot_id, encode(reply))

    def _answer_hello(self, peer: Peer, request_id: int) -> None:
        reply = self.greet()
        if reply is None:
            self.unanswered.append((peer, request_id, Hello(VERSION, "")))
            return
        data = reply if isinstance(reply, bytes) else self.frame(request_id, reply)
        fds = [self._read_only_fd, self._fd][: self.n_descriptors]
        socket.send_fds(peer.sock, [data], fds)

    def _welcome(self) -> Reply:
        return Welcome(
            VERSION, self.boot_id, self.arena_bytes, self.max_body_bytes, self.lent_bytes_max
        )

    def default(self, request: Request) -> Reply:
        """What it answers by itself."""
        if isinstance(request, Keyed) and request.namespace_id not in self.namespaces:
            return Failed("unknown_namespace", "declare it first")
        handle = _HANDLERS[type(request)]
        reply: Reply = handle(self, request)
        return reply

    def _keys(self, request: Keyed) -> list[bytes]:
        size = request.key_bytes
        return [request.keys[i : i + size] for i in range(0, len(request.keys), size)]

    def _leading(self, request: Keyed) -> list[Blob]:
        found = (self.blobs.get((request.namespace_id, key)) for key in self._keys(request))
        return [b for b in itertools.takewhile(lambda b: b is not None, found) if b is not None]

    def _allocate(self, nbytes: int) -> int:
        offset = self._end
        self._end += -(-nbytes // PAGE) * PAGE
        assert self._end <= self.arena_bytes, "give the scripted daemon a larger arena"
        return offset

    def _on_ping(self, request: Ping) -> Reply:
        return Pong(request.payload)

    def _on_declare(self, request: Declare) -> Reply:
        namespace = Namespace.decode(request.namespace)
        self.namespaces[namespace.id] = namespace
        return Declared(namespace.id)

    def _on_match(self, request: Match) -> Reply:
        n = len(self._leading(request))
        return Matched(n, n, 0.0)

    def _on_get(self, request: Get) -> Reply:
        blobs = self._leading(request)
        reason = "" if len(blobs) == len(self._keys(request)) else "absent"
        if not blobs:
            return Leased(0, b"", reason, {})
        lease_id = next(self._ids)
        self.leases[lease_id] = blobs
        extents = b"".join(struct.pack("<QQ", blob.offset, blob.nbytes) for blob in blobs)
        return Leased(lease_id, extents, reason, {"dram": len(blobs)})

    def _on_wait(self, request: Wait) -> Reply:
        return Waited("")

    def _on_release(self, request: Release) -> Reply:
        return Done(sum(self.leases.pop(i, None) is not None for i in request.lease_ids))

    def _on_reserve(self, request: Reserve) -> Reply:
        keys = self._keys(request)
        namespace = self.namespaces[request.namespace_id]
        reservation = Reservation(keys, [], [])
        for number, key in enumerate(keys):
            tail = request.tail_tokens if number == len(keys) - 1 else 0
            nbytes = namespace.layout.nbytes(tail or namespace.tokens_per_blob)
            if (request.namespace_id, key) in self.blobs:
                reservation.extents.append((NO_EXTENT, 0))
                reservation.reasons.append("exists")
            else:
                reservation.extents.append((self._allocate(nbytes), nbytes))
                reservation.reasons.append("")
        reservation_id = next(self._ids)
        self.reservations[reservation_id] = reservation
        self._sealing_in = request.namespace_id
        packed = b"".join(struct.pack("<QQ", *extent) for extent in reservation.extents)
        return Reserved(reservation_id, packed, list(reservation.reasons), 60.0)

    def _on_seal(self, request: Seal) -> Reply:
        reservation = self.reservations.pop(request.reservation_id, None)
        if reservation is None:
            return Failed("invalid_request", "unknown reservation")
        results, reasons = list[str](), [""] * len(reservation.keys)
        for number, key in enumerate(reservation.keys):
            at = (self._sealing_in, key)
            if number in request.unwritten:
                results.append("refused")
                reasons[number] = "unwritten"
                continue
            if reservation.reasons[number] == "exists":
                given = request.digests[number] if request.digests else b""
                same = given in (b"", self.blobs[at].digest)
                results.append("exists" if same else "divergent")
                continue
            offset, nbytes = reservation.extents[number]
            self.blobs[at] = Blob(offset, nbytes, _digest(self.read(offset, nbytes)))
            results.append("stored")
        return Sealed(results, reasons)

    def _on_seal_parts(self, request: SealParts) -> Reply:
        return Done(len(request.parts))

    def _on_abort(self, request: Abort) -> Reply:
        return Done(int(self.reservations.pop(request.reservation_id, None) is not None))

    def _on_holding(self, request: Holding) -> Reply:
        return Done()

    def _on_exists(self, request: Exists) -> Reply:
        keys = self._keys(request)
        return Held(bytes((request.namespace_id, key) in self.blobs for key in keys))

    def _on_drop(self, request: Drop) -> Reply:
        keys = self._keys(request)
        dropped = [self.blobs.pop((request.namespace_id, key), None) for key in keys]
        return Done(sum(blob is not None for blob in dropped))

    def _on_named(self, request: Pin | Prefetch) -> Reply:
        return Done(len(self._leading(request)))

    def _on_stat(self, request: Stat) -> Reply:
        return Report({"blobs": [{"nbytes": blob.nbytes} for blob in self._leading(request)]})

    def _on_stats(self, request: Stats | Verify) -> Reply:
        return Report({"blobs": len(self.blobs)})


_HANDLERS: dict[type[Request], Callable[..., Reply]] = {
    Ping: ScriptedDaemon._on_ping,
    Declare: ScriptedDaemon._on_declare,
    Match: ScriptedDaemon._on_match,
    Get: ScriptedDaemon._on_get,
    Wait: ScriptedDaemon._on_wait,
    Release: ScriptedDaemon._on_release,
    Reserve: ScriptedDaemon._on_reserve,
    Seal: ScriptedDaemon._on_seal,
    SealParts: ScriptedDaemon._on_seal_parts,
    Abort: ScriptedDaemon._on_abort,
    Exists: ScriptedDaemon._on_exists,
    Drop: ScriptedDaemon._on_drop,
    Pin: ScriptedDaemon._on_named,
    Prefetch: ScriptedDaemon._on_named,
    Stat: ScriptedDaemon._on_stat,
    Holding: ScriptedDaemon._on_holding,
    Stats: ScriptedDaemon._on_stats,
    Verify: ScriptedDaemon._on_stats,
}


def _digest(payload: bytes) -> bytes:
    return payload_digest(len(payload), piece_digests(memoryview(payload)))
