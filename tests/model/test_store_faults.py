"""What a store does when the disk rots, fails or fills, and others are still at work."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, content

NBYTES = 100 * KIB


def _namespace(nbytes: int = NBYTES) -> Namespace:
    return Namespace(f"opaque-{nbytes}", KVLayout.opaque(nbytes))


def _keys(n: int, first: int = 0) -> list[bytes]:
    return [b"%032d" % (first + i) for i in range(n)]


@contextmanager
def _world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, dram_bytes=4 * MIB, staging_bytes=MIB, ssd_bytes=16 * MIB) as world:
        yield world


def _put(
    world: SimStore,
    client: StoreClient,
    ns: Namespace,
    keys: Sequence[bytes],
    *,
    nbytes: int = NBYTES,
    retention: str = "standard",
    parent_key: bytes = b"",
) -> list[str]:
    payloads = [content(int(key), nbytes) for key in keys]
    answers = world.run(client.put(ns, keys, payloads, retention=retention, parent_key=parent_key))
    return [result for result, _ in answers]


def test_a_durable_put_does_not_wait_for_the_row_of_a_blob_that_was_dropped(
    tmp_path: Path,
) -> None:
    with _world(tmp_path) as world:
        ns, (key,) = world.declare(_namespace()), _keys(1)
        client = world.client()
        assert _put(world, client, ns, [key]) == ["stored"]
        world.finish_all()
        put = world.sim.start(client.put(ns, [key], [content(0, NBYTES)], retention="durable"))
        assert not put.done()
        world.call(client.drop, ns, [key])
        assert world.run(asyncio.wait_for(put, 60.0)) == [("refused", "full")]
