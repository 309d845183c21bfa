"""A disk that hangs holds up those who need the disk, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from blobstore.http.door import DoorTerms, HttpDoor
from blobstore.http.tokens import load
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import KIB, MIB
from tests.support.hanging_disk import HangingDisk
from tests.support.polling import poll_until_async

NBYTES = 256 * KIB
PATIENCE_S = 20.0
WARM, COLD, NEW, KEPT = (f"{number:016x}" for number in range(4))


class Site:
    """A store on a disk that can hang, seen over HTTP."""

    def __init__(self, store: Store, disk: HangingDisk, session: aiohttp.ClientSession) -> None:
        self.store = store
        self.disk = disk
        self.session = session
        self.root = ""

    async def ask(self, method: str, path: str, **terms: Any) -> bytes:
        """The body of an answer that is no failure."""
        async with self.session.request(method, path, **terms) as answer:
            body = await answer.read()
            assert answer.status < 300, (path, answer.status, body)
            return body

    async def declare(self) -> None:
        declaration = {"model": "m", "opaque_bytes": NBYTES, "tokens_per_blob": 16}
        async with self.session.post("/v1/namespaces", json=declaration) as answer:
            self.root = f"/v1/namespaces/{(await answer.json())['id']}"

    def blob(self, key: str) -> str:
        return f"{self.root}/blobs/{key}"

    async def put(self, key: str, **query: str) -> None:
        await self.ask("PUT", self.blob(key), data=payload(key), params=query)

    async def get(self, key: str) -> bytes:
        return await self.ask("GET", self.blob(key))

    async def saved(self, n: int) -> None:
        await poll_until_async(lambda: self.store.counters.saved_blobs == n, PATIENCE_S)

    async def hangs(self, operation: str) -> None:
        await poll_until_async(lambda: operation in self.disk.hanging, PATIENCE_S, operation)


def payload(key: str) -> bytes:
    return key.encode() * (NBYTES // len(key))


@asynccontextmanager
async def door(store: Store, data: Path) -> AsyncIterator[aiohttp.ClientSession]:
    made = HttpDoor(store, DoorTerms(("127.0.0.1", 0), load(data, None)))
    await made.start()
    token = (data / "http.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with aiohttp.ClientSession(made.address, headers=headers) as session:
            yield session
    finally:
        await made.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """Two blobs that are on disk, of which one is in DRAM too."""
    disk = HangingDisk()
    settings = StoreSettings(tmp_path, 16 * MIB, staging_bytes=2 * MIB, ssd_bytes=64 * MIB)
    store = await Store.open(settings, disk=disk)
    async with door(store, tmp_path) as session:
        made = Site(store, disk, session)
        await made.declare()
        await made.put(WARM)
        await made.put(COLD)
        await made.saved(2)
        await made.ask("POST", f"{made.root}/drop", json={"keys": [COLD], "tier": "dram"})
        yield made
    await store.close()


async def all_that_needs_no_disk(site: Site) -> None:
    """Every answer that DRAM and memory have."""
    keys = {"keys": [WARM, COLD]}
    await site.ask("GET", "/healthz")
    await site.ask("GET", "/readyz")
    for verb in ("match", "exists", "stat"):
        await site.ask("POST", f"{site.root}/{verb}", json=keys)
    await site.ask("POST", f"{site.root}/pin", json={"keys": [WARM], "ttl_s": 60})
    for path in ("/v1/namespaces", f"{site.root}/blobs", "/v1/stats", "/metrics", "/"):
        await site.ask("GET", path)
    await site.ask("HEAD", site.blob(COLD))
    assert await site.get(WARM) == payload(WARM)
    async with asyncio.TaskGroup() as several:
        for _ in range(20):
            several.create_task(site.get(WARM))


async def test_a_read_that_hangs_holds_up_its_reader_alone(site: Site) -> None:
    with site.disk.hung():
        reading = asyncio.create_task(site.get(COLD))
        await site.hangs("read")
        await all_that_needs_no_disk(site)
        assert not reading.done()
    assert await reading == payload(COLD)


async def test_a_write_that_hangs_holds_up_durable_puts_alone(site: Site) -> None:
    with site.disk.hung():
        await site.put(NEW)
        await site.hangs("write")
        keeping = asyncio.create_task(site.put(KEPT, retention="durable"))
        await all_that_needs_no_disk(site)
        assert await site.get(NEW) == payload(NEW)
        assert not keeping.done()
    await keeping
    await site.saved(4)
    assert site.store.counters.unsaved == 0


@pytest.mark.parametrize("operation", ["sync", "commit"])
async def test_a_commit_that_hangs_holds_up_nobody_else(site: Site, operation: str) -> None:
    with site.disk.hung(operation):
        keeping = asyncio.create_task(site.put(NEW, retention="durable"))
        await site.hangs(operation)
        await all_that_needs_no_disk(site)
        assert await site.get(COLD) == payload(COLD)  # reads of the disk are not held up
        assert not keeping.done()
    await keeping
