from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import Busy
from blobstore.namespace import Namespace
from blobstore.units import KIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 100 * KIB


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def ns(world: SimStore) -> Namespace:
    return world.declare(opaque(NBYTES))


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


def payloads(n: int) -> list[bytes]:
    return [content(number, NBYTES) for number in range(n)]


def verify(world: SimStore, timeout_s: float = 60.0) -> dict[str, Any]:
    return world.run(world.store.verify(timeout_s))


def rot_in_dram(world: SimStore, ns: Namespace, key: bytes) -> None:
    extent = world.store.state(ns.id).blobs[key].dram
    assert extent is not None
    world.store.arena.view[extent.offset + 17] ^= 0xFF


def test_a_sound_store_has_nothing_to_report(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    small, empty = (world.declare(opaque(n, str(n))) for n in (1000, 0))
    for space in (ns, small, empty):
        world.run(client.put(space, chain(3), [content(1, space.layout.nbytes(16))] * 3))
    world.finish_all()
    report = verify(world)
    assert report["complete"]
    assert report["blobs"] == 9
    assert report["copies"] == 18
    assert report["bytes"] == 2 * 3 * (NBYTES + 1000)
    assert report["corrupt"] == report["unreadable"] == []


def test_exactly_the_copy_that_rots_on_ssd_is_reported_and_repaired_from_dram(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    """B04"""
    world.run(client.put(ns, chain(5), payloads(5)))
    world.finish_all()
    rotten = chain(5)[2]
    world.rot(world.ssd_extent(ns, rotten), at=NBYTES // 2)
    report = verify(world)
    assert report["corrupt"] == [{"namespace": ns.id.hex(), "key": rotten.hex(), "tier": "ssd"}]
    world.finish_all()
    assert world.store.stats()["counters"]["corrupt"] == 1
    assert verify(world)["corrupt"] == []
    world.crash("dropped")
    assert world.run(world.client().read(ns, chain(5))) == payloads(5)


def test_the_last_copy_that_rots_is_lost_and_told_as_a_miss(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.put_cold(client, ns, chain(3), payloads(3))
    world.rot(world.ssd_extent(ns, chain(3)[2]))
    assert len(verify(world)["corrupt"]) == 1
    assert client.exists(ns, chain(3)) == [True, True, False]
    assert world.run(client.read(ns, chain(3))) == payloads(2)


def test_a_copy_that_rots_in_dram_is_never_given_again(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.run(client.put(ns, chain(3), payloads(3)))
    world.finish_all()
    rot_in_dram(world, ns, chain(3)[1])
    report = verify(world)
    assert [found["tier"] for found in report["corrupt"]] == ["dram"]
    assert world.run(client.read(ns, chain(3))) == payloads(3)
    assert world.store.stats()["counters"]["corrupt"] == 1


def test_a_blob_that_rots_in_dram_alone_becomes_a_hole_or_goes(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.run(client.put(ns, chain(3), payloads(3), retention="volatile"))
    rot_in_dram(world, ns, chain(3)[1])
    verify(world)
    assert client.match(ns, chain(3)) == 1
    assert client.exists(ns, chain(3)) == [True, False, True]
    rot_in_dram(world, ns, chain(3)[2])
    verify(world)
    assert client.exists(ns, chain(3)) == [True, False, False]
    assert world.store.stats()["blobs"] == 1


def test_a_blob_that_rots_in_dram_under_a_lease_keeps_its_ancestors_in_place(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    """The reader holds the leaf alone; what rotted between must not let its root go."""
    world.run(client.put(ns, chain(3), payloads(3)))
    world.finish_all()
    reading = world.run(client.get(ns, chain(3)))
    rot_in_dram(world, ns, chain(3)[1])
    verify(world)
    for number in range(20):
        world.run(client.put(ns, chain(1, str(number)), payloads(1), timeout_s=5.0))
        world.finish_all()
    assert reading[0] == payloads(3)[0]
    assert reading[2] == payloads(3)[2]
    reading.release()
    assert world.run(client.read(ns, chain(3))) == payloads(3)


def test_a_blob_that_rots_before_it_is_written_never_reaches_the_disk(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    asked = world.sim.start(client.put(ns, chain(1), payloads(1)))
    while not asked.done():
        world.sim.step()
    rot_in_dram(world, ns, chain(1)[0])
    world.finish_all()
    assert client.exists(ns, chain(1)) == [False]
    assert world.store.stats()["counters"]["corrupt"] == 1
    assert world.store.stats()["tiers"]["ssd"]["live_bytes"] == 0


def test_a_hole_whose_old_bytes_nobody_reads_can_be_mended_while_its_children_are_warm(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.run(client.put(ns, chain(3), payloads(3), retention="volatile"))
    reading = world.run(client.get(ns, chain(3)))
    rot_in_dram(world, ns, chain(3)[1])
    verify(world)
    mend = {"parent_key": chain(3)[0], "retention": "volatile"}
    payload = payloads(3)[1:2]
    assert world.run(client.put(ns, chain(3)[1:2], payload, **mend)) == [("refused", "busy")]
    reading.release()
    assert world.run(client.put(ns, chain(3)[1:2], payload, **mend)) == [("stored", "")]
    assert world.run(client.read(ns, chain(3))) == payloads(3)


def test_time_that_runs_out_is_told(world: SimStore, ns: Namespace, client: StoreClient) -> None:
    world.run(client.put(ns, chain(3), payloads(3)))
    world.finish_all()
    assert verify(world, timeout_s=0.0)["complete"] is False
    asked = world.sim.start(world.store.verify(1.0))
    world.sim.step()
    world.sim.clock.advance(2.0)
    report = world.sim.finish(asked)
    assert report["complete"] is False
    assert report["blobs"] == 1


def test_what_cannot_be_read_is_reported_and_kept(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.put_cold(client, ns, chain(2), payloads(2))

    def fail(name: str, path: Path) -> None:
        if name == "preadv":
            raise OSError(5, "Input/output error")

    world.disk.before_step = fail
    report = verify(world)
    assert [found["key"] for found in report["unreadable"]] == [k.hex() for k in chain(2)]
    assert report["corrupt"] == []
    world.disk.before_step = lambda name, path: None
    assert world.run(client.read(ns, chain(2))) == payloads(2)


def test_drops_and_puts_meanwhile_are_no_faults(tmp_path: Path) -> None:
    for steps in range(16):
        with SimStore(tmp_path / str(steps), seed=steps) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            world.run(client.put(ns, chain(4), payloads(4)))
            world.finish_all()
            world.call(client.drop, ns, chain(4)[2:], "dram")
            asked = world.sim.start(world.store.verify(60.0))
            for _ in range(steps):
                world.sim.step()
            world.call(client.drop, ns, chain(4)[1:2])
            world.run(client.put(ns, chain(1, "x"), payloads(1), timeout_s=1.0))
            report = world.sim.finish(asked)
            assert report["corrupt"] == report["unreadable"] == []
            world.finish_all()
            world.audit(quiet=True)


def test_one_at_a_time(world: SimStore, ns: Namespace, client: StoreClient) -> None:
    world.run(client.put(ns, chain(1), payloads(1)))
    first = world.sim.start(world.store.verify(60.0))
    with pytest.raises(Busy):
        verify(world)
    world.sim.finish(first)
    assert verify(world)["complete"]
