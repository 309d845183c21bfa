from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import Busy, InvalidRequest, UnknownNamespace
from blobstore.namespace import Namespace
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_audit import audit, is_idle
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 100 * KIB
YEAR_S = 365 * 86400.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, max_clients=3) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def ns(world: SimStore) -> Namespace:
    return world.declare(opaque(NBYTES))


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


def payloads(n: int, first: int = 0) -> list[bytes]:
    return [content(number, NBYTES) for number in range(first, first + n)]


class TestRequests:
    @pytest.mark.parametrize("keys", [b"", b"x" * 7, b"x" * 33])
    def test_keys_that_are_none_are_refused(
        self, world: SimStore, ns: Namespace, keys: bytes
    ) -> None:
        for call in (world.store.match, world.store.exists, world.store.stat, world.store.split):
            with pytest.raises(InvalidRequest, match="are not one or more keys"):
                call(ns.id, keys, 32)

    @pytest.mark.parametrize("key_bytes", [0, 7, 65, -32])
    def test_keys_have_8_to_64_bytes(self, world: SimStore, ns: Namespace, key_bytes: int) -> None:
        with pytest.raises(InvalidRequest):
            world.store.match(ns.id, bytes(64), key_bytes)

    def test_an_undeclared_namespace_is_refused(self, world: SimStore) -> None:
        with pytest.raises(UnknownNamespace):
            world.store.match(bytes(32), bytes(32), 32)

    def test_namespaces_keep_equal_keys_apart(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        other = world.declare(opaque(NBYTES, "other"))
        world.run(client.put(ns, chain(1), payloads(1)))
        assert client.exists(other, chain(1)) == [False]
        world.run(client.put(other, chain(1), payloads(1, 7)))
        world.finish_all()
        world.reopen()
        client = world.client()
        assert world.run(client.read(ns, chain(1))) == payloads(1)
        assert world.run(client.read(other, chain(1))) == payloads(1, 7)

    def test_an_unknown_tier_is_refused(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        with pytest.raises(InvalidRequest, match="unknown tier 'hbm'"):
            client.drop(ns, chain(1), "hbm")

    def test_the_number_of_clients_is_bounded(self, world: SimStore, client: StoreClient) -> None:
        others = [world.client(str(n)) for n in range(2)]
        with pytest.raises(Busy):
            world.client("one too many")
        others[0].exit()
        world.client("now there is a place")


class TestClocks:
    """B25: the wall clock may say anything."""

    @pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
    def test_reservations_and_pins_end_when_their_time_is_over_and_not_before(
        self, world: SimStore, ns: Namespace, client: StoreClient, jump_s: float
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        world.finish_all()
        client.pin(ns, chain(1), 50.0)
        writing = world.run(client.reserve(ns, chain(1, "x")))
        world.sim.wall_jump_s = jump_s
        world.sim.advance(49.0)
        assert client.stat(ns, chain(1))[0]["pins"] == 1
        assert not writing.reservation.expired
        world.sim.advance(12.0)
        assert client.stat(ns, chain(1))[0]["pins"] == 0
        assert writing.reservation.expired
        world.call(writing.abort)

    @pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
    def test_a_lease_neither_ends_early_nor_outlives_its_release(
        self, world: SimStore, ns: Namespace, client: StoreClient, jump_s: float
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        world.finish_all()
        reading = world.run(client.get(ns, chain(1)))
        world.sim.wall_jump_s = jump_s
        world.sim.advance(5.0)
        assert reading.payloads() == payloads(1)
        reading.release()
        assert world.store.stats()["pinned_bytes"] == 0

    def test_uses_from_the_future_are_the_latest_after_a_restart_and_no_more(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.sim.wall_jump_s = YEAR_S
        world.run(client.put(ns, chain(1, "future"), payloads(1)))
        world.finish_all()
        world.sim.wall_jump_s = 0.0
        world.reopen()
        client = world.client()
        assert client.stat(ns, chain(1, "future"))[0]["idle_s"] < 5.0
        for number in range(80):
            world.sim.clock.advance(1.0)
            world.run(client.put(ns, chain(1, str(number)), payloads(1), timeout_s=5.0))
            world.finish_all()
        assert client.exists(ns, chain(1, "future")) == [False]
        assert client.exists(ns, chain(1, "79")) == [True]


class TestPins:
    def test_a_pinned_blob_stays_until_its_time_is_over(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, ssd_bytes=0) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            world.run(client.put(ns, chain(2), payloads(2)))
            assert client.pin(ns, chain(2), 30.0) == 2
            assert client.pin(ns, chain(2), 30.0) == 2

            def flood(name: str) -> None:
                for number in range(10):
                    world.sim.clock.advance(0.5)
                    key = chain(1, f"{name} {number}")
                    world.run(client.put(ns, key, payloads(1)))

            flood("first")
            assert client.exists(ns, chain(2)) == [True, True]
            world.sim.advance(30.0)
            flood("second")
            assert client.exists(ns, chain(2)) == [False, False]

    def test_a_pin_can_be_ended(self, world: SimStore, ns: Namespace, client: StoreClient) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        world.finish_all()
        client.pin(ns, chain(1), 1000.0)
        assert world.store.stats()["pinned_bytes"] == NBYTES
        client.pin(ns, chain(1), 0.0)
        assert world.store.stats()["pinned_bytes"] == 0
        assert client.pin(ns, chain(1, "unknown"), 10.0) == 0

    def test_a_dropped_blob_is_pinned_no_longer(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(2), payloads(2)))
        world.finish_all()
        client.pin(ns, chain(2), 1000.0)
        assert world.call(client.drop, ns, chain(2)[:1]) == 2
        assert world.store.stats()["pinned_bytes"] == 0
        assert world.store.stats()["tiers"]["dram"]["used_bytes"] == 0


class TestDrop:
    def test_it_takes_all_that_continues_the_blob_along(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(3), payloads(3)))
        branch = chain(2, "branch")
        world.run(client.put(ns, branch, payloads(2), parent_key=chain(3)[0]))
        world.finish_all()
        assert world.call(client.drop, ns, chain(3)[1:2]) == 2
        assert client.exists(ns, [*chain(3), *branch]) == [True, False, False, True, True]
        assert world.call(client.drop, ns, chain(3)) == 3
        world.finish_all()
        assert world.store.stats()["blobs"] == 0
        assert world.store.stats()["tiers"]["dram"]["used_bytes"] == 0
        assert world.store.stats()["tiers"]["ssd"]["live_bytes"] == 0

    def test_from_dram_it_takes_only_what_is_safe_on_ssd(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(3), payloads(3)))
        assert world.call(client.drop, ns, chain(3), "dram") == 0
        world.finish_all()
        assert world.call(client.drop, ns, chain(3), "dram") == 3
        assert client.exists(ns, chain(3)) == [True] * 3
        assert world.run(client.read(ns, chain(3))) == payloads(3)

    def test_room_that_a_drop_frees_goes_to_who_waits(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, ssd_bytes=0) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            world.run(client.put(ns, chain(4), payloads(4)))
            client.pin(ns, chain(4), 1000.0)
            waiting = world.sim.start(client.reserve(ns, chain(5, "x"), timeout_s=60.0))
            assert not waiting.done()
            world.call(client.drop, ns, chain(4))
            world.sim.loop.run_ready()
            assert waiting.done()
            world.call(waiting.result().abort)


class TestLongChains:
    def test_a_chain_longer_than_dram_is_written_and_read_back_in_windows(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        keys = chain(24)
        for start in range(0, 24, 3):
            terms = {"parent_key": keys[start - 1]} if start else {}
            answers = world.run(
                client.put(ns, keys[start : start + 3], payloads(3, start), timeout_s=9.0, **terms)
            )
            assert answers == [("stored", "")] * 3
        assert client.match(ns, keys) == 24
        start = 0
        while start < 24:  # a window may be cut short: its ancestors in DRAM stay with it
            found = world.run(client.read(ns, keys[start : start + 4]))
            assert found
            assert found == payloads(len(found), start)
            start += len(found)
        world.finish_all()
        world.reopen()
        client = world.client()
        assert client.match(ns, keys) == 24
        assert world.run(client.read(ns, keys[20:])) == payloads(4, 20)

    def test_without_an_ssd_it_ends_where_dram_does(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, ssd_bytes=0) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            keys, stored = chain(24), 0
            for number in range(24):
                terms = {"parent_key": keys[number - 1]} if number else {}
                answers = world.run(
                    client.put(ns, keys[number : number + 1], payloads(1, number), **terms)
                )
                if answers == [("stored", "")]:
                    stored += 1
                else:
                    assert answers[0] in (("refused", "full"), ("refused", "orphan"))
            assert 0 < stored < 24
            assert client.match(ns, keys) == stored
            assert world.run(client.read(ns, keys)) == payloads(stored)

    def test_it_may_hang_below_one_that_is_on_ssd_alone(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(3), payloads(3))
        more = chain(2, "more")
        answers = world.run(client.put(ns, more, payloads(2, 3), parent_key=chain(3)[2]))
        assert answers == [("stored", "")] * 2
        reading = world.run(client.get(ns, [*chain(3), *more]))
        assert reading.payloads() == payloads(5)
        assert reading.served == {"ssd": 3, "dram": 2}
        reading.release()

    def test_a_load_waits_for_room_that_write_back_is_about_to_free(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(4), payloads(4))
        for number in range(7):  # the disk does nothing meanwhile
            asked = world.sim.start(
                client.put(ns, chain(1, str(number)), payloads(1, number), timeout_s=0.0)
            )
            while not asked.done():
                world.sim.jobs.run_one("hash")
                world.sim.loop.run_ready()
        assert world.store.stats()["tiers"]["ssd"]["dirty_bytes"] == 7 * NBYTES
        reading = world.sim.start(client.get(ns, chain(4), timeout_s=5.0))
        found = world.sim.finish(reading)
        assert found.payloads() == payloads(4)
        found.release()

    def test_a_load_does_not_wait_for_room_that_nothing_will_free(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(4), payloads(4))
        writing = world.run(client.reserve(ns, chain(5, "lent")))
        other = world.run(world.client("other").reserve(ns, chain(2, "lent too")))
        found = world.run(client.get(ns, chain(4), timeout_s=5.0))
        assert (len(found), found.reason) == (3, "no_room")
        assert world.sim.clock() == 1000.0
        found.release()
        for lent in (writing, other):
            world.call(lent.abort)


class TestRestart:
    def test_blobs_sizes_and_order_of_eviction_are_known_again(self, tmp_path: Path) -> None:
        """B39"""
        with SimStore(tmp_path, dram_bytes=4 * MIB, ssd_bytes=16 * MIB) as world:
            small = world.declare(opaque(8 * KIB, "small"))
            client = world.client()
            for number in range(500):
                answers = world.run(
                    client.put(
                        small, chain(1, str(number)), [content(number, 8 * KIB)], timeout_s=5.0
                    )
                )
                assert answers == [("stored", "")]
            world.reopen()
            client = world.client()
            assert world.store.stats()["blobs"] == 500
            world.audit(quiet=True)
            for number in range(0, 500, 37):
                found = world.run(client.read(small, chain(1, str(number))))
                assert found == [content(number, 8 * KIB)]

    def test_nothing_half_written_is_found_after_a_crash(self, tmp_path: Path) -> None:
        for steps in range(0, 30, 2):
            with SimStore(tmp_path / str(steps), seed=steps) as world:
                ns, client = world.declare(opaque(NBYTES)), world.client()
                world.run(client.put(ns, chain(2, "old"), payloads(2), retention="durable"))
                world.sim.start(client.put(ns, chain(3), payloads(3)))
                world.call(client.drop, ns, chain(2, "old")[1:])
                for _ in range(steps):
                    world.sim.step()
                world.crash("torn", seed=steps)
                world.audit(quiet=True)
                client = world.client()
                n = client.match(ns, chain(3))
                assert world.run(client.read(ns, chain(3))) == payloads(n)
                assert client.exists(ns, chain(2, "old"))[0]
                live = world.store.stats()["tiers"]["ssd"]["live_bytes"]
                assert live == NBYTES * world.store.stats()["blobs"]


def test_stats_say_how_full_it_is(world: SimStore, ns: Namespace, client: StoreClient) -> None:
    world.run(client.put(ns, chain(2), payloads(2)))
    world.finish_all()
    reading = world.run(client.get(ns, chain(2)))
    stats = world.store.stats()
    assert stats["blobs"] == 2
    assert stats["namespaces"] == 1
    assert stats["leases"] == 1
    assert stats["pinned_bytes"] == NBYTES
    dram, ssd = stats["tiers"]["dram"], stats["tiers"]["ssd"]
    assert dram["used_bytes"] + dram["free_bytes"] == dram["capacity_bytes"] == MIB
    assert dram["used_bytes"] == ssd["live_bytes"] == 2 * NBYTES
    assert ssd["used_bytes"] <= ssd["capacity_bytes"]
    assert ssd["dirty_bytes"] == 0
    assert stats["counters"]["put_blobs"] == {"stored": 2}
    assert stats["counters"]["put_bytes"] == stats["counters"]["saved_bytes"] == 2 * NBYTES
    reading.release()


async def test_a_burst_of_writers_against_a_full_tier_all_succeed(tmp_path: Path) -> None:
    """B30: 64 writers, four times the tier, real threads; readers hold leases meanwhile."""
    settings = StoreSettings(tmp_path, 8 * MIB, staging_bytes=MIB, ssd_bytes=64 * MIB)
    store = await Store.open(settings)
    ns = opaque(128 * KIB)
    await store.declare(ns.encode())
    clients = [StoreClient(store, f"client {n}") for n in range(8)]
    payload = [content(n, 128 * KIB) for n in range(64)]

    async def write(n: int) -> None:
        for turn in range(4):
            answers = await clients[n % 8].put(
                ns, chain(1, f"{n} {turn}"), [payload[n]], timeout_s=30.0
            )
            assert answers == [("stored", "")]
            if n % 4 == 0:
                reading = await clients[n % 8].get(ns, chain(1, f"{n} {turn}"))
                await asyncio.sleep(0)
                assert reading.payloads() == [payload[n]]
                reading.release()

    await asyncio.gather(*(write(n) for n in range(64)))
    while not is_idle(store):
        await asyncio.sleep(0.01)
    audit(store, quiet=True)
    assert store.stats()["counters"]["lost_unsaved"] == 0
    assert store.stats()["waiting_for_room"] == 0
    for n in range(64):
        assert await clients[0].read(ns, chain(1, f"{n} 3")) == [payload[n]]
    await store.close()
