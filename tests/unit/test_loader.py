from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 200 * KIB
LONG = 20 * MIB
"""Three reads of one blob."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, dram_bytes=2 * MIB, staging_bytes=256 * KIB) as made:
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


class Faults:
    """Steps of the disk that fail: `times` of those called `name`."""

    def __init__(self, world: SimStore, name: str, times: int, code: int = errno.EIO) -> None:
        self.left = times
        self._name = name
        self._code = code
        world.disk.before_step = self

    def __call__(self, name: str, path: Path) -> None:
        if name == self._name and self.left:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))


def test_a_failed_load_is_a_miss_and_the_next_one_is_right(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    """B02"""
    world.put_cold(client, ns, chain(2), payloads(2))
    world.store.arena.view[:] = b"\xaa" * len(world.store.arena.view)
    Faults(world, "preadv", times=2)
    missed = world.run(client.get(ns, chain(2)))
    assert (len(missed), missed.reason, missed.lease_id) == (0, "io_error", 0)
    world.rest()
    assert world.store.stats()["counters"]["loaded_blobs"] == 0
    assert world.store.stats()["counters"]["missed_blobs"] == {"io_error": 2}
    assert world.store.stats()["counters"]["ssd_errors"] == 2
    assert world.store.stats()["tiers"]["dram"]["used_bytes"] == 0
    assert client.match(ns, chain(2)) == 2
    assert world.run(client.read(ns, chain(2))) == payloads(2)


def test_what_was_read_before_a_failure_is_given(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.put_cold(client, ns, chain(3), payloads(3))
    world.run(client.read(ns, chain(1)))
    Faults(world, "preadv", times=1)
    reading = world.run(client.get(ns, chain(3)))
    assert reading.reason == "io_error"
    assert reading.payloads() == payloads(len(reading))
    assert len(reading) in (1, 2)
    reading.release()


def test_everybody_who_waits_for_a_failing_load_is_told(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.put_cold(client, ns, chain(1), payloads(1))
    Faults(world, "preadv", times=1)
    tasks = [world.sim.start(client.get(ns, chain(1))) for _ in range(5)]
    assert {world.sim.finish(task).reason for task in tasks} == {"io_error"}
    assert world.run(client.read(ns, chain(1))) == payloads(1)


def test_what_a_failed_stream_may_still_show_is_not_loaded_over(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.put_cold(client, ns, chain(1), payloads(1))
    Faults(world, "preadv", times=1)
    stream = world.run(client.get(ns, chain(1), stream=True))
    assert world.run(stream.wait(0, 0, NBYTES)) == "io_error"
    missed = world.run(client.get(ns, chain(1)))
    assert (len(missed), missed.reason) == (0, "busy")
    stream.release()
    assert world.run(client.read(ns, chain(1))) == payloads(1)


def test_a_fault_on_the_way_is_read_again(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    """Bytes that fail their digest once and pass it the second time were good on the disk."""
    world.put_cold(client, ns, chain(1), payloads(1))
    extent = world.ssd_extent(ns, chain(1)[0])
    turns = iter([True, False])

    def flip(name: str, path: Path) -> None:
        if name == "preadv" and next(turns, None) is not None:
            world.rot(extent, at=1000)  # an even number of times: it heals before the second read

    world.disk.before_step = flip
    assert world.run(client.read(ns, chain(1))) == payloads(1)
    assert world.store.stats()["counters"]["corrupt"] == 0


def test_a_corrupt_leaf_is_a_miss_is_counted_and_goes(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    """B04"""
    world.put_cold(client, ns, chain(3), payloads(3))
    world.rot(world.ssd_extent(ns, chain(3)[2]), at=NBYTES - 1)
    reading = world.run(client.get(ns, chain(3)))
    assert reading.payloads() == payloads(2)
    assert reading.reason == "corrupt"
    reading.release()
    world.finish_all()
    assert client.exists(ns, chain(3)) == [True, True, False]
    assert world.store.stats()["counters"]["corrupt"] == 1
    assert world.store.stats()["holes"] == 0
    assert world.run(client.put(ns, chain(3)[2:], payloads(3)[2:], parent_key=chain(3)[1])) == [
        ("stored", "")
    ]


class TestHoles:
    """A corrupt blob that others continue."""

    @pytest.fixture
    def holed(self, world: SimStore, ns: Namespace, client: StoreClient) -> list[bytes]:
        keys = chain(4)
        world.put_cold(client, ns, keys, payloads(4))
        world.rot(world.ssd_extent(ns, keys[1]))
        reading = world.run(client.get(ns, keys))
        assert (len(reading), reading.reason) == (1, "corrupt")
        reading.release()
        world.finish_all()
        return keys

    def test_matches_end_there_and_descendants_stay_readable(
        self, world: SimStore, ns: Namespace, client: StoreClient, holed: list[bytes]
    ) -> None:
        assert world.store.stats()["holes"] == 1
        assert client.match(ns, holed) == 1
        assert client.exists(ns, holed) == [True, False, True, True]
        assert world.run(client.read(ns, holed)) == payloads(1)
        assert world.run(client.read(ns, holed[2:])) == payloads(4)[2:]

    def test_nothing_can_be_appended_to_it(
        self, world: SimStore, ns: Namespace, client: StoreClient, holed: list[bytes]
    ) -> None:
        answers = world.run(client.put(ns, chain(1, "x"), payloads(1), parent_key=holed[1]))
        assert answers == [("refused", "orphan")]

    @pytest.mark.parametrize("other", [False, True])
    def test_a_put_mends_it_with_the_same_or_other_bytes(
        self,
        world: SimStore,
        ns: Namespace,
        client: StoreClient,
        holed: list[bytes],
        other: bool,
    ) -> None:
        mended = content(99, NBYTES) if other else payloads(4)[1]
        answers = world.run(client.put(ns, [holed[1]], [mended], parent_key=holed[0]))
        assert answers == [("stored", "")]
        assert world.store.stats()["holes"] == 0
        assert client.match(ns, holed) == 4
        wanted = [payloads(4)[0], mended, *payloads(4)[2:]]
        assert world.run(client.read(ns, holed)) == wanted
        world.finish_all()
        world.reopen()
        again = world.client()
        assert world.run(again.read(ns, holed)) == wanted

    def test_a_put_of_the_whole_chain_mends_it(
        self, world: SimStore, ns: Namespace, client: StoreClient, holed: list[bytes]
    ) -> None:
        answers = world.run(client.put(ns, holed, payloads(4)))
        assert [result for result, _ in answers] == ["exists", "stored", "exists", "exists"]
        assert world.run(client.read(ns, holed)) == payloads(4)

    def test_a_put_that_takes_it_for_a_root_mends_it_where_it_is(
        self, world: SimStore, ns: Namespace, client: StoreClient, holed: list[bytes]
    ) -> None:
        assert world.run(client.put(ns, holed[1:2], payloads(4)[1:2])) == [("stored", "")]
        assert client.match(ns, holed) == 4
        assert client.stat(ns, holed)[1]["depth"] == 2

    def test_it_goes_with_the_last_blob_that_continues_it(
        self, world: SimStore, ns: Namespace, client: StoreClient, holed: list[bytes]
    ) -> None:
        world.call(client.drop, ns, holed[2:3])
        world.finish_all()
        assert world.store.stats()["holes"] == 0
        assert world.store.stats()["blobs"] == 1
        world.audit(quiet=True)

    def test_a_restart_knows_what_hangs_below_it(
        self, world: SimStore, ns: Namespace, holed: list[bytes]
    ) -> None:
        world.reopen()
        again = world.client()
        assert again.exists(ns, holed) == [True, False, True, True]
        assert world.run(again.read(ns, holed[2:])) == payloads(4)[2:]
        world.audit(quiet=True)


class TestLongLoads:
    """Blobs of several reads."""

    @pytest.fixture
    def big(self, tmp_path: Path) -> Iterator[tuple[SimStore, Namespace, StoreClient]]:
        with SimStore(
            tmp_path / "big",
            dram_bytes=64 * MIB,
            staging_bytes=MIB,
            ssd_bytes=80 * MIB,
            lent_bytes_max=64 * MIB,
        ) as world:
            ns = world.declare(opaque(LONG, "long"))
            client = world.client()
            world.put_cold(client, ns, chain(2), [content(n, LONG) for n in range(2)])
            yield world, ns, client
            world.finish_all()
            world.audit(quiet=True)

    def test_a_drop_in_the_middle_ends_the_load_and_frees_its_room(
        self, big: tuple[SimStore, Namespace, StoreClient]
    ) -> None:
        world, ns, client = big
        for steps in range(1, 12):
            asked = world.sim.start(client.get(ns, chain(1), timeout_s=30.0))
            for _ in range(steps):
                world.sim.step()
            if asked.done():
                break
            world.call(client.drop, ns, chain(1))
            missed = world.sim.finish(asked)
            assert (len(missed), missed.reason) in ((0, "dropped"), (0, "io_error"))
            world.finish_all()
            assert world.store.stats()["tiers"]["dram"]["used_bytes"] == 0
            assert world.store.stats()["counters"]["ssd_errors"] == 0
            world.put_cold(client, ns, chain(1), [content(0, LONG)])
        reading = world.sim.finish(world.sim.start(client.get(ns, chain(1))))
        assert reading.payloads() == [content(0, LONG)]
        reading.release()

    def test_bytes_are_readable_as_they_pass_their_digests(
        self, big: tuple[SimStore, Namespace, StoreClient]
    ) -> None:
        world, ns, client = big
        reading = world.run(client.get(ns, chain(1), stream=True))
        waits = {end: world.sim.start(reading.wait(0, 0, end * MIB)) for end in range(1, 21)}
        ended: list[int] = []
        while world.sim.step():
            for end, task in waits.items():
                if task.done() and end not in ended:
                    ended.append(end)
                    assert reading[0][: end * MIB] == content(0, LONG)[: end * MIB]
        assert sorted(ended) == list(range(1, 21))
        assert len(set(ended)) == 20
        assert ended[0] < 20
        reading.release()

    def test_a_corrupt_last_piece_keeps_the_whole_blob_back(
        self, big: tuple[SimStore, Namespace, StoreClient]
    ) -> None:
        world, ns, client = big
        world.rot(world.ssd_extent(ns, chain(2)[1]), at=LONG - 1)
        reading = world.run(client.get(ns, chain(2)))
        assert (len(reading), reading.reason) == (1, "corrupt")
        reading.release()


def test_a_stream_reads_the_first_layers_of_all_blobs_before_the_rest(tmp_path: Path) -> None:
    layout = KVLayout((LayerGroup.attention(layers=4, heads=8, head_size=128),))
    grid = Namespace("grid", layout, tokens_per_blob=256)
    nbytes = layout.nbytes(256)
    assert nbytes == 4 * MIB
    with SimStore(
        tmp_path, dram_bytes=40 * MIB, ssd_bytes=80 * MIB, lent_bytes_max=40 * MIB, io_threads=1
    ) as world:
        world.declare(grid)
        client = world.client()
        world.put_cold(client, grid, chain(4), [content(n, nbytes) for n in range(4)])
        reading = world.run(client.get(grid, chain(4), stream=True))
        first = [world.sim.start(reading.wait(n, 0, MIB)) for n in range(4)]
        steps = 0
        while not all(task.done() for task in first):
            assert world.sim.step()
            steps += 1
        assert steps == 4
        assert world.run(reading.wait(3, 0, nbytes)) == ""
        assert reading.payloads() == [content(n, nbytes) for n in range(4)]
        reading.release()
