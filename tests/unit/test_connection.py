"""One served connection: what its loss ends, and what a full one refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from blobstore import protocol
from blobstore.connection import REQUESTS_IN_FLIGHT_MAX, Connection
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.transports import framing
from blobstore.units import MIB
from tests.support.polling import poll_until_async

BLOB = Namespace(model="m", layout=KVLayout.opaque(MIB))
KEYS = BLOB.keys(range(256 * 100))


class Wire(asyncio.Transport):
    """Keeps what the connection sends."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[tuple[int, protocol.Reply]] = []
        self._reader = framing.FrameReader()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for request_id, _, body in self._reader.feed(bytes(data)):
            self.replies.append((request_id, protocol.decode_reply(body)))

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Served:
    """A connection of one process, without the socket."""

    def __init__(self, store: Store, token: object) -> None:
        self.holder = store.attach(token, pid=1, name=str(token))
        self.connection = Connection(store, self.holder, lambda _: None)
        self.wire = Wire()
        self.connection.connection_made(self.wire)
        self._boot_id = store.boot_id

    def send(self, request_id: int, request: protocol.Request) -> None:
        body = protocol.encode(request)
        self.connection.data_received(framing.pack(request_id, self._boot_id, body))

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


async def test_a_namespace_that_could_not_be_written_is_not_declared(tmp_path: Path) -> None:
    async with opened(tmp_path, ssd_bytes=64 * MIB) as store:
        assert store._ssd is not None
        written = store._ssd.declare

        def refuse(namespace: bytes, canonical: bytes) -> None:
            raise OSError("no room")

        store._ssd.declare = refuse  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(OSError, match="no room"):
                await store.declare(BLOB.encode())
            assert BLOB.id not in store.index.namespaces
        store._ssd.declare = written  # type: ignore[method-assign]
        assert await store.declare(BLOB.encode()) == BLOB.id
        assert BLOB.id in store.index.namespaces
