from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import Busy, InvalidRequest
from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, digest_of, opaque

NBYTES = 100 * KIB


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, max_leases_per_client=50) as made:
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


class TestLeases:
    def test_a_lease_holds_what_it_promised_against_a_flood(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """B16: five times the tier is put while three blobs are leased."""
        world.run(client.put(ns, chain(3), payloads(3)))
        reading = world.run(client.get(ns, chain(3)))
        for number in range(50):
            key = chain(1, f"flood {number}")
            answers = world.run(client.put(ns, key, payloads(1, 100 + number), timeout_s=5.0))
            assert answers == [("stored", "")]
        assert reading.payloads() == payloads(3)
        assert reading.release() == 1

    def test_without_a_lease_a_get_tells_exactly_what_it_gives(self, tmp_path: Path) -> None:
        """B16: never fewer than it claims, never an error."""
        with SimStore(tmp_path, ssd_bytes=0) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            world.run(client.put(ns, chain(5), payloads(5)))
            lengths = []
            for number in range(3):
                reading = world.run(client.get(ns, chain(5)))
                assert reading.payloads() == payloads(len(reading))
                assert reading.reason == ("" if len(reading) == 5 else "absent")
                assert client.match(ns, chain(5)) == len(reading)
                lengths.append(len(reading))
                reading.release()
                for flood in range(4):
                    world.sim.advance(1.0)
                    key = chain(1, f"flood {number} {flood}")
                    world.run(client.put(ns, key, payloads(1, 100), timeout_s=0.0))
            assert lengths == [5, 3, 3]

    def test_releasing_twice_or_anothers_lease_does_nothing(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """B21"""
        world.run(client.put(ns, chain(1), payloads(1)))
        world.rest()
        first, second = (world.run(client.get(ns, chain(1))) for _ in range(2))
        assert first.release() == 1
        assert first.release() == 0
        other = world.client("other")
        assert world.store.readers.release(other.holder, [second.lease_id, 999]) == 0
        assert client.stat(ns, chain(1))[0]["pins"] == 1
        assert second.payloads() == payloads(1)
        assert second.release() == 1
        assert world.store.stats()["pinned_bytes"] == world.store.stats()["leases"] == 0

    def test_a_thousand_gets_that_were_cancelled_or_never_awaited_pin_nothing(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """B21"""
        world.put_cold(client, ns, chain(3), payloads(3))
        for number in range(1000):
            asked = client.get(ns, chain(3), timeout_s=5.0)
            if number % 3 == 0:
                asked.close()
                continue
            task = world.sim.start(asked)
            if number % 3 == 1:
                task.cancel()
                world.sim.loop.run_ready()
                assert task.cancelled()
            else:
                world.sim.finish(task).release()
            world.call(client.drop, ns, chain(3), "dram")
        gc.collect()
        world.finish_all()
        assert world.store.stats()["pinned_bytes"] == 0
        assert world.store.stats()["leases"] == 0
        for number in range(20):
            key = chain(1, f"flood {number}")
            answers = world.run(client.put(ns, key, payloads(1), timeout_s=5.0))
            assert answers == [("stored", "")]

    def test_the_number_of_leases_is_bounded(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        readings = [world.run(client.get(ns, chain(1))) for _ in range(50)]
        with pytest.raises(Busy):
            world.run(client.get(ns, chain(1)))
        readings.pop().release()
        world.run(client.get(ns, chain(1)))

    def test_the_leases_of_a_dead_process_end(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(2), payloads(2)))
        world.run(client.get(ns, chain(2)))
        world.rest()
        world.call(client.exit)
        assert world.store.stats()["pinned_bytes"] == world.store.stats()["leases"] == 0

    def test_a_blob_dropped_under_a_lease_is_a_miss_for_all_others(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(2), payloads(2)))
        reading = world.run(client.get(ns, chain(2)))
        assert world.call(client.drop, ns, chain(2)[:1]) == 2
        assert client.match(ns, chain(2)) == 0
        assert world.run(client.read(ns, chain(2))) == []
        other = [content(9, NBYTES)]
        assert world.run(client.put(ns, chain(1), other)) == [("stored", "")]
        assert reading.payloads() == payloads(2)
        reading.release()
        assert world.run(client.read(ns, chain(1))) == other

    def test_a_lease_of_separate_roots_pins_each(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        keys = chain(3)
        for key, payload in zip(keys, payloads(3), strict=True):
            world.run(client.put(ns, [key], [payload]))
        world.rest()
        reading = world.run(client.get(ns, keys))
        assert len(reading) == 3
        assert [facts["pins"] for facts in client.stat(ns, keys)] == [1, 1, 1]
        reading.release()

    def test_a_lease_of_a_chain_pins_its_leaf_alone(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(3), payloads(3)))
        world.rest()
        reading = world.run(client.get(ns, chain(3)))
        assert [facts["pins"] for facts in client.stat(ns, chain(3))] == [0, 0, 1]
        reading.release()

    def test_keys_that_are_no_chain_give_what_leads(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """An engine's keys in a wrong order end in a shorter answer, not in other bytes."""
        world.run(client.put(ns, chain(3), payloads(3)))
        wrong = [chain(3)[1], chain(1, "unknown")[0], chain(3)[2]]
        reading = world.run(client.get(ns, wrong))
        assert reading.payloads() == payloads(1, 1)
        assert reading.reason == "absent"
        reading.release()


class TestLoads:
    def test_a_get_of_cold_blobs_brings_them_in(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(3), payloads(3))
        reading = world.run(client.get(ns, chain(3)))
        assert reading.payloads() == payloads(3)
        assert reading.served == {"ssd": 3}
        reading.release()
        again = world.run(client.get(ns, chain(3)))
        assert again.served == {"dram": 3}
        again.release()
        counters = world.store.stats()["counters"]
        assert counters["hit_blobs"] == {"ssd": 3, "dram": 3}
        assert counters["loaded_blobs"] == 3

    def test_half_a_chain_in_dram_loads_the_other_half(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(4), payloads(4))
        world.run(client.read(ns, chain(2)))
        reading = world.run(client.get(ns, chain(4)))
        assert reading.served == {"dram": 2, "ssd": 2}
        assert reading.payloads() == payloads(4)
        reading.release()

    def test_a_get_without_time_gives_what_is_warm_and_starts_the_rest(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(3), payloads(3))
        world.run(client.read(ns, chain(1)))
        reading = world.run(client.get(ns, chain(3), timeout_s=0.0))
        assert (len(reading), reading.reason) == (1, "deadline")
        reading.release()
        world.rest()
        reading = world.run(client.get(ns, chain(3), timeout_s=0.0))
        assert (len(reading), reading.reason, reading.served) == (3, "", {"dram": 3})
        reading.release()

    def test_a_chain_longer_than_dram_is_given_as_far_as_it_fits(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(12), payloads(12))
        reading = world.run(client.get(ns, chain(12)))
        assert 0 < len(reading) <= 10
        assert reading.reason == "no_room"
        assert reading.payloads() == payloads(len(reading))
        rest = world.run(client.get(ns, chain(12)[len(reading) :]))
        assert (len(rest), rest.reason) == (0, "no_room")
        n = len(reading)
        reading.release()
        assert world.run(client.read(ns, chain(12)[n:])) == payloads(12 - n, n)

    def test_a_full_cache_does_not_block_a_load(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(1), payloads(1))
        world.run(client.reserve(ns, chain(5, "lent")))
        world.run(client.reserve(ns, chain(2, "more"), timeout_s=0.0))
        assert world.run(client.read(ns, chain(1))) == payloads(1)

    def test_prefetch_loads_and_counts_as_use(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(2), payloads(2))
        assert world.call(client.prefetch, ns, chain(2)) == 2
        assert world.call(client.prefetch, ns, chain(2)) == 0
        world.rest()
        assert [facts["tiers"] for facts in client.stat(ns, chain(2))] == [["dram", "ssd"]] * 2

    def test_a_get_waits_for_room_that_is_being_wiped(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, dram_bytes=2 * MIB, staging_bytes=64 * KIB) as world:
            big = world.declare(opaque(MIB - 64 * KIB))
            client = world.client()
            payload = content(1, MIB - 64 * KIB)
            world.put_cold(client, big, chain(1), [payload])
            for name in ("a", "b"):
                world.run(client.put(big, chain(1, name), [payload], retention="volatile"))
            reading = world.sim.start(client.get(big, chain(1)))
            assert world.store.residency.wiping_bytes > 0
            found = world.sim.finish(reading)
            assert found.payloads() == [payload]
            found.release()

    def test_times_of_use_do_not_change_by_looking(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        world.rest()
        world.sim.advance(100.0)
        client.match(ns, chain(1))
        client.exists(ns, chain(1))
        world.run(world.store.verify(10.0))
        assert client.stat(ns, chain(1))[0]["idle_s"] == pytest.approx(100.0)
        world.run(client.read(ns, chain(1)))
        assert client.stat(ns, chain(1))[0]["idle_s"] == 0.0


class TestFollowing:
    """A reader may wait for what is still being written."""

    def test_without_being_asked_for_a_draft_is_a_miss(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(1)))
        missed = world.run(client.get(ns, chain(1)))
        assert (len(missed), missed.reason) == (0, "absent")
        world.call(writing.abort)

    def test_a_reader_gets_the_blob_when_it_is_sealed(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(2)))
        reader = world.client("reader")
        reading = world.sim.start(reader.get(ns, chain(2), wait_for_writers=True))
        assert not reading.done()
        for index, payload in enumerate(payloads(2)):
            writing.write(index, payload)
        world.run(writing.seal())
        found = world.sim.finish(reading)
        assert found.payloads() == payloads(2)
        assert found.served == {"writer": 2}
        found.release()

    def test_a_reader_gets_the_copy_of_what_a_writer_still_views(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(1)))
        reading = world.sim.start(client.get(ns, chain(1), wait_for_writers=True))
        writing.write(0, payloads(1)[0])
        world.run(writing.seal(alive=[0]))
        found = world.sim.finish(reading)
        writing.write(0, b"\xff" * NBYTES)
        assert found.payloads() == payloads(1)
        found.release()
        world.call(client.acknowledge, [loan for loan in writing.loans if loan])

    def test_a_reader_gets_what_another_writer_sealed_first(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        slow = world.run(client.reserve(ns, chain(1)))
        reading = world.sim.start(client.get(ns, chain(1), wait_for_writers=True))
        other = world.client("other")
        world.run(other.put(ns, chain(1), payloads(1)))
        world.call(slow.abort)
        found = world.sim.finish(reading)
        assert found.payloads() == payloads(1)
        found.release()

    def test_when_one_writer_gives_up_the_reader_waits_for_the_next(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        first, second = (world.run(client.reserve(ns, chain(1))) for _ in range(2))
        reading = world.sim.start(client.get(ns, chain(1), wait_for_writers=True))
        world.call(first.abort)
        assert not reading.done()
        second.write(0, payloads(1)[0])
        world.run(second.seal())
        found = world.sim.finish(reading)
        assert found.payloads() == payloads(1)
        found.release()

    @pytest.mark.parametrize(
        ("how", "reason"),
        [("abort", "aborted"), ("expire", "expired"), ("exit", "writer_gone")],
    )
    def test_when_the_last_writer_is_gone_the_reason_is_told(
        self, world: SimStore, ns: Namespace, client: StoreClient, how: str, reason: str
    ) -> None:
        writing = world.run(client.reserve(ns, chain(1)))
        reader = world.client("reader")
        asked = reader.get(ns, chain(1), wait_for_writers=True, timeout_s=100.0)
        reading = world.sim.start(asked)
        if how == "abort":
            world.call(writing.abort)
        elif how == "exit":
            world.call(client.exit)
        else:
            world.sim.advance(61.0)
        missed = world.sim.finish(reading)
        assert (len(missed), missed.reason) == (0, reason)
        if how == "expire":
            world.call(writing.abort)

    def test_a_blob_that_is_not_sealed_in_time_is_a_miss(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        writing = world.run(client.reserve(ns, chain(2)[1:], parent_key=chain(1)[0]))
        asked = client.get(ns, chain(2), wait_for_writers=True, timeout_s=2.0)
        reading = world.sim.start(asked)
        world.sim.advance(2.0)
        found = reading.result()
        assert (len(found), found.reason) == (1, "deadline")
        found.release()
        world.call(writing.abort)

    def test_a_stream_gives_each_part_as_it_is_sealed(self, world: SimStore) -> None:
        layout = KVLayout((LayerGroup.attention(layers=4, heads=1, head_size=64),))
        grid = world.declare(Namespace("grid", layout, tokens_per_blob=64))
        writer, reader = world.client("writer"), world.client("reader")
        payload = content(1, layout.nbytes(64))
        parts = layout.parts(64)
        writing = world.run(writer.reserve(grid, chain(1)))
        reading = world.run(reader.get(grid, chain(1), stream=True, wait_for_writers=True))
        assert len(reading) == 1
        waits = [
            world.sim.start(reading.wait(0, part.offset, part.offset + part.nbytes))
            for part in parts
        ]
        for part, wait in zip(parts, waits, strict=True):
            assert not wait.done()
            writing.write(0, payload[part.offset : part.offset + part.nbytes], part.offset)
            writing.seal_parts(0, [part.index])
            world.sim.loop.run_ready()
            assert wait.result() == ""
            end = part.offset + part.nbytes
            assert reading[0][:end] == payload[:end]
        assert reader.exists(grid, chain(1)) == [False]
        world.run(writing.seal())
        assert world.run(reading.wait(0, 0, len(payload))) == ""
        assert reading.payloads() == [payload]
        reading.release()

    def test_a_stream_whose_writer_dies_tells_why_and_keeps_its_bytes(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writer = world.client("writer")
        world.run(writer.reserve(ns, chain(1)))
        reading = world.run(client.get(ns, chain(1), stream=True, wait_for_writers=True))
        waiting = world.sim.start(reading.wait(0, 0, NBYTES))
        world.call(writer.exit)
        assert waiting.result() == "writer_gone"
        assert world.store.stats()["tiers"]["dram"]["used_bytes"] == NBYTES
        reading.release()
        assert world.store.stats()["tiers"]["dram"]["used_bytes"] == 0

    def test_a_wait_is_bounded_by_its_own_time(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(1)))
        reading = world.run(client.get(ns, chain(1), stream=True, wait_for_writers=True))
        waiting = world.sim.start(reading.wait(0, 0, 1, timeout_s=1.0))
        world.sim.advance(1.0)
        assert waiting.result() == "deadline"
        reading.release()
        world.call(writing.abort)

    def test_waits_on_leases_that_are_not_ones_own_are_errors(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(1), payloads(1))
        reading = world.run(client.get(ns, chain(1), stream=True))
        assert world.run(reading.wait(0, 0, NBYTES)) == ""
        with pytest.raises(InvalidRequest, match="blob 1 of a lease of 1"):
            world.run(reading.wait(1, 0, 1))
        reading.release()
        with pytest.raises(InvalidRequest, match="unknown, or was released"):
            world.run(reading.wait(0, 0, 1))


class TestSingleFlight:
    """B20: many requests, one missing prefix."""

    def test_many_gets_of_one_cold_blob_read_it_once(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(1), payloads(1))
        world.run(client.put(ns, chain(1, "warm"), payloads(1, 5)))
        world.rest()
        before = world.reads()
        slow = [world.sim.start(client.get(ns, chain(1))) for _ in range(16)]
        for _ in range(16):
            fast = world.sim.start(client.get(ns, chain(1, "warm")))
            assert fast.done(), "what is in DRAM does not queue behind a load"
            fast.result().release()
        assert not any(task.done() for task in slow)
        for task in slow:
            reading = world.sim.finish(task)
            assert reading.payloads() == payloads(1)
            reading.release()
        assert world.reads() == before + 1

    def test_cancelling_who_started_the_load_strands_nobody(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(2), payloads(2))
        before = world.reads()
        leader, *followers = [world.sim.start(client.get(ns, chain(2))) for _ in range(5)]
        leader.cancel()
        world.sim.loop.run_ready()
        for task in followers:
            reading = world.sim.finish(task)
            assert reading.payloads() == payloads(2)
            reading.release()
        assert world.reads() == before + 2

    def test_overlapping_chains_read_what_they_share_once(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(4), payloads(4))
        before = world.reads()
        tasks = [world.sim.start(client.get(ns, chain(4)[:n])) for n in (1, 2, 3, 4)]
        for n, task in enumerate(tasks, 1):
            reading = world.sim.finish(task)
            assert reading.payloads() == payloads(n)
            reading.release()
        assert world.reads() == before + 4


async def test_real_threads_and_a_real_disk_give_the_same_bytes(tmp_path: Path) -> None:
    store = await Store.open(StoreSettings(tmp_path, 4 * MIB, ssd_bytes=32 * MIB))
    client = StoreClient(store)
    ns = opaque(NBYTES)
    await store.declare(ns.encode())
    keys = chain(20)
    answers = await client.put(ns, keys, payloads(20), retention="durable", timeout_s=10.0)
    assert answers == [("stored", "")] * 20
    client.drop(ns, keys, "dram")
    tasks = [asyncio.create_task(client.read(ns, keys)) for _ in range(4)]
    for task in tasks:
        assert [digest_of(p) for p in await task] == [digest_of(p) for p in payloads(20)]
    assert store.stats()["counters"]["loaded_blobs"] == 20
    await store.close()
