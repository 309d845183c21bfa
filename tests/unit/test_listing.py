"""What a store says about all that it holds: complete, in order, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.listing import LIMIT_MAX, page_of_namespaces
from blobstore.namespace import Namespace
from blobstore.units import KIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 4 * KIB


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


def put(world: SimStore, client: StoreClient, ns: Namespace, n: int, seed: int = 0) -> list[bytes]:
    """A chain of `n` blobs; their keys."""
    keys = chain(n, str(seed))
    world.run(client.put(ns, keys, [content(seed, NBYTES)] * n))
    return keys


def pages(world: SimStore, ns: Namespace, limit: int) -> list[list[dict[str, Any]]]:
    """Every page of a namespace's blobs."""
    found, after = [], b""
    while True:
        blobs, after = world.store.list_blobs(ns.id, after, limit)
        found.append(blobs)
        if not after:
            return found


def test_an_empty_store_lists_nothing(world: SimStore) -> None:
    assert world.store.list_namespaces() == []
    ns = world.declare(opaque(NBYTES))
    assert world.store.list_blobs(ns.id, b"", 10) == ([], b"")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, LIMIT_MAX])
def test_pages_hold_every_blob_once_in_order_of_keys(
    world: SimStore, client: StoreClient, limit: int
) -> None:
    ns = world.declare(opaque(NBYTES))
    keys = put(world, client, ns, 4) + put(world, client, ns, 3, seed=9)
    found = pages(world, ns, limit)
    assert all(len(page) == limit for page in found[:-1])
    assert [blob["key"] for page in found for blob in page] == [key.hex() for key in sorted(keys)]


def test_facts_of_a_page_are_those_of_stat(world: SimStore, client: StoreClient) -> None:
    ns = world.declare(opaque(NBYTES))
    keys = sorted(put(world, client, ns, 3))
    blobs, _ = world.store.list_blobs(ns.id, b"", 10)
    assert blobs == world.store.stat(ns.id, b"".join(keys), len(keys[0]))


def test_a_listing_goes_on_after_a_key_that_was_dropped_meanwhile(
    world: SimStore, client: StoreClient
) -> None:
    ns = world.declare(opaque(NBYTES))
    keys = sorted(key for seed in range(5) for key in put(world, client, ns, 1, seed=seed))
    _, after = world.store.list_blobs(ns.id, b"", 2)
    assert after == keys[1]
    assert client.drop(ns, [keys[1]]) == 1
    blobs, after = world.store.list_blobs(ns.id, after, 10)
    assert [blob["key"] for blob in blobs] == [key.hex() for key in keys[2:]]
    assert after == b""


@pytest.mark.parametrize("limit", [0, -1, LIMIT_MAX + 1])
def test_a_page_is_bounded(world: SimStore, limit: int) -> None:
    ns = world.declare(opaque(NBYTES))
    with pytest.raises(InvalidRequest, match="limit"):
        world.store.list_blobs(ns.id, b"", limit)
    with pytest.raises(InvalidRequest, match="limit"):
        page_of_namespaces(world.store.index, b"", limit)


def test_what_can_be_no_cursor_is_refused(world: SimStore) -> None:
    ns = world.declare(opaque(NBYTES))
    for call in (
        lambda: world.store.list_blobs(ns.id, bytes(65), 1),
        lambda: world.store.list_namespaces(bytes(65)),
    ):
        with pytest.raises(InvalidRequest, match="65 bytes"):
            call()


def test_an_unknown_namespace_is_refused(world: SimStore) -> None:
    with pytest.raises(UnknownNamespace):
        world.store.list_blobs(bytes(32), b"", 1)


def test_namespaces_come_by_id_in_pages(world: SimStore) -> None:
    ids = sorted(world.declare(opaque(NBYTES, f"m{n}")).id.hex() for n in range(5))
    assert [facts["id"] for facts in world.store.list_namespaces()] == ids
    seen, after = [], b""
    while True:
        page = page_of_namespaces(world.store.index, after, 2)
        seen += [facts["id"] for facts in page["namespaces"]]
        after = page["next"]
        if not after:
            break
    assert seen == ids


def test_a_namespace_says_what_it_takes_in_each_tier(world: SimStore, client: StoreClient) -> None:
    def facts() -> dict[str, Any]:
        (found,) = world.store.list_namespaces()
        return found

    ns = world.declare(opaque(NBYTES, "a model"))
    assert facts() == {
        "id": ns.id.hex(), "model": "a model", "revision": "", "adapter": "",
        "tokens_per_blob": ns.tokens_per_blob, "blob_bytes": NBYTES, "blobs": 0, "dram_bytes": 0,
        "ssd_bytes": 0,
    }  # fmt: skip
    keys = put(world, client, ns, 3)
    world.finish_all()
    assert (facts()["blobs"], facts()["dram_bytes"], facts()["ssd_bytes"]) == (
        3, 3 * NBYTES, 3 * NBYTES,
    )  # fmt: skip
    assert client.drop(ns, keys[2:], "dram") == 1
    assert (facts()["dram_bytes"], facts()["ssd_bytes"]) == (2 * NBYTES, 3 * NBYTES)
    assert client.drop(ns, keys[1:]) == 2
    assert (facts()["blobs"], facts()["dram_bytes"], facts()["ssd_bytes"]) == (1, NBYTES, NBYTES)
    world.finish_all()
    world.reopen()
    assert (facts()["blobs"], facts()["dram_bytes"], facts()["ssd_bytes"]) == (1, 0, NBYTES)
    assert [blob["key"] for page in pages(world, ns, 1) for blob in page] == [keys[0].hex()]
