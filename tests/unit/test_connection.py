"""One served connection: what its loss ends, and what a full one refuses."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from blobstore import protocol
from blobstore.connection import REQUESTS_IN_FLIGHT_MAX, Connection
from blobstore.errors import StorageFailed
from blobstore.latencies import Latencies
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.transports import framing
from blobstore.units import MIB
from tests.support.polling import poll_until_async
from tests.support.store_client import StoreClient, chain

BLOB = Namespace(model="m", layout=KVLayout.opaque(MIB))
KEYS = BLOB.keys(range(256 * 100))


class Wire(asyncio.Transport):
    """Keeps what the connection sends."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[tuple[int, protocol.Reply]] = []
        self.sock: socket.socket | None = None
        self._reader = framing.FrameReader()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for request_id, _, body in self._reader.feed(bytes(data)):
            self.replies.append((request_id, protocol.decode_reply(body)))

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.sock if name == "socket" else default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class Served:
    """A connection of one process, without the socket."""

    def __init__(self, store: Store, token: object, latencies: Latencies | None = None) -> None:
        self.holder = store.attach(token, pid=1, name=str(token))
        self.connection = Connection(store, self.holder, lambda _: None, latencies)
        self.wire = Wire()
        self.connection.connection_made(self.wire)
        self._boot_id = store.boot_id

    def send(self, request_id: int, request: protocol.Request) -> None:
        self.connection.data_received(self.packed(request_id, request))

    def packed(self, request_id: int, request: protocol.Request) -> bytes:
        return framing.pack(request_id, self._boot_id, protocol.encode(request))

    def reserve(self, request_id: int, start: int, n: int, timeout_s: float) -> None:
        keys = KEYS[start : start + n]
        self.send(
            request_id,
            protocol.Reserve(BLOB.id, keys.packed, 32, b"", 0, "volatile", timeout_s),
        )


@asynccontextmanager
async def opened(tmp_path: Path, ssd_bytes: int = 0) -> AsyncIterator[Store]:
    settings = StoreSettings(data_dir=tmp_path, dram_bytes=64 * MIB, ssd_bytes=ssd_bytes)
    store = await Store.open(settings)
    try:
        yield store
    finally:
        await store.close()


async def test_a_put_that_waits_for_room_ends_with_its_connection(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.declare(BLOB.encode())
        holds, waits, comes_later = (Served(store, name) for name in ("holds", "waits", "later"))
        holds.reserve(1, 0, 30, 1.0)
        await poll_until_async(lambda: bool(holds.wire.replies))
        waits.reserve(1, 40, 30, 3000.0)
        await poll_until_async(lambda: store.residency.waiting == 1)
        waits.connection.connection_lost(None)
        await poll_until_async(lambda: store.residency.waiting == 0)
        comes_later.reserve(1, 80, 10, 0.0)
        await poll_until_async(lambda: bool(comes_later.wire.replies))
        (_, reply), *_ = comes_later.wire.replies
        assert isinstance(reply, protocol.Reserved)
        assert reply.reasons == [""] * 10


async def test_more_requests_in_flight_than_allowed_are_refused_as_busy(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.declare(BLOB.encode())
        served = Served(store, "eager")
        for request_id in range(1, REQUESTS_IN_FLIGHT_MAX + 2):
            served.send(request_id, protocol.Get(BLOB.id, KEYS[0], 32, 0.0))
        ((request_id, reply),) = served.wire.replies
        assert request_id == REQUESTS_IN_FLIGHT_MAX + 1
        assert isinstance(reply, protocol.Failed)
        assert reply.code == "busy"
        await poll_until_async(lambda: not served.connection.tasks)


async def test_requests_are_noted_by_verb_and_outcome(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.declare(BLOB.encode())
        latencies = Latencies()
        served = Served(store, "noted", latencies)
        served.send(1, protocol.Match(BLOB.id, KEYS[0], 32))
        served.send(2, protocol.Match(bytes(32), KEYS[0], 32))
        served.send(3, protocol.Declare(BLOB.encode()))
        served.send(4, protocol.Declare(b"none"))
        await poll_until_async(lambda: len(served.wire.replies) == 4)
        noted = [(door, verb, found.count) for door, verb, found in latencies.histograms()]
        assert noted == [("local", "declare", 2), ("local", "match", 2)]
        assert list(latencies.failures()) == [
            ("local", "declare", "invalid_request", 1),
            ("local", "match", "unknown_namespace", 1),
        ]


async def test_a_namespace_that_could_not_be_written_is_written_with_its_first_blob(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, ssd_bytes=64 * MIB) as store:
        assert store._ssd is not None
        written = store._ssd.declare

        def refuse(namespace: bytes, canonical: bytes) -> None:
            raise StorageFailed(errno.EIO, "no room")

        store._ssd.declare = refuse  # type: ignore[method-assign]
        assert await store.declare(BLOB.encode()) == BLOB.id
        assert store._ssd.namespaces() == {}
        store._ssd.declare = written  # type: ignore[method-assign]
        client = StoreClient(store)
        payload = bytes(BLOB.layout.nbytes(BLOB.tokens_per_blob))
        answers = await client.put(BLOB, chain(1), [payload], retention="durable")
        assert answers == [("stored", "")]
        assert store._ssd.namespaces() == {BLOB.id: BLOB.encode()}


async def with_a_lease(store: Store) -> Served:
    """A connection over which a blob was leased."""
    await store.declare(BLOB.encode())
    served = Served(store, "leaves")
    served.reserve(1, 0, 1, 1.0)
    await poll_until_async(lambda: bool(served.wire.replies))
    served.send(2, protocol.Seal(1))
    await poll_until_async(lambda: len(served.wire.replies) == 2)
    served.send(3, protocol.Get(BLOB.id, KEYS[0], 32, 0.0))
    assert store.readers.count == 1
    return served


def goodbye(served: Served) -> protocol.Holding:
    return protocol.Holding([served.connection.connection_id], [], [], [])


async def test_a_goodbye_ends_what_was_granted_over_its_own_connection(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        served = await with_a_lease(store)
        served.send(4, goodbye(served))
        await poll_until_async(lambda: store.readers.count == 0)
        served.connection.connection_lost(None)
        await served.connection.lost
        assert served.holder.granted == {}


async def test_what_a_peer_sent_before_a_write_to_it_failed_is_still_served(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as store:
        served = await with_a_lease(store)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            served.wire.sock = ours
            theirs.sendall(served.packed(4, goodbye(served)))
            theirs.close()
            served.connection.connection_lost(BrokenPipeError())
            await served.connection.lost
        assert store.readers.count == 0
        assert served.holder.granted == {}
