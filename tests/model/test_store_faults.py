"""What a store does when the disk rots, fails or fills, and others are still at work."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from blobstore.layer_group import LayerGroup
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, Writing, content

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


def _durable_chain(world: SimStore, ns: Namespace, keys: Sequence[bytes]) -> None:
    """Blobs that are on SSD alone."""
    client = world.client("writer")
    assert _put(world, client, ns, keys, retention="durable") == ["stored"] * len(keys)
    world.finish_all()
    assert world.call(client.drop, ns, keys, "dram") == len(keys)
    world.call(client.exit)


@pytest.mark.parametrize("nbytes", [NBYTES, 20 * KIB])
def test_what_continues_a_lost_blob_outlives_a_restart(tmp_path: Path, nbytes: int) -> None:
    with _world(tmp_path) as world:
        ns, keys = world.declare(_namespace(nbytes)), _keys(5)
        payloads = [content(int(key), nbytes) for key in keys]
        client = world.client()
        _put(world, client, ns, keys, nbytes=nbytes, retention="durable")
        world.finish_all()
        world.call(client.drop, ns, keys, "dram")
        _lose(world, ns, keys[1])
        assert len(world.run(client.read(ns, keys))) == 1
        for _ in range(2):
            world.finish_all()
            world.audit()
            world.reopen()
            client = world.client()
            assert client.exists(ns, keys) == [True, False, True, True, True]
            assert client.match(ns, keys) == 1
        assert world.run(client.put(ns, keys[1:2], payloads[1:2], parent_key=keys[0])) == [
            ("stored", "")
        ]
        world.finish_all()
        world.reopen()
        client = world.client()
        assert world.store.stats()["holes"] == 0
        assert world.run(client.read(ns, keys)) == payloads


def _lose(world: SimStore, ns: Namespace, key: bytes) -> None:
    """The copy on SSD, which is the only one, fails its digest."""
    record = world.store.state(ns.id).blobs[key]
    if record.ssd is not True:
        world.rot(world.ssd_extent(ns, key))
        return
    world.call(world.store.losses.quarantine, record)


def test_the_row_of_a_lost_blob_goes_with_the_last_that_continues_it(tmp_path: Path) -> None:
    with _world(tmp_path) as world:
        ns, keys = world.declare(_namespace()), _keys(3)
        _durable_chain(world, ns, keys)
        client = world.client()
        _lose(world, ns, keys[1])
        assert len(world.run(client.read(ns, keys))) == 1
        world.finish_all()
        world.reopen()
        client = world.client()
        assert world.call(client.drop, ns, keys[2:]) == 1
        world.finish_all()
        assert world.store._ssd is not None
        assert [row.key for row in world.store._ssd.rows()] == keys[:1]
        world.audit()


def test_a_copy_is_repaired_from_dram_without_a_moment_in_which_its_children_are_lost(
    tmp_path: Path,
) -> None:
    for steps in range(100):
        directory = tmp_path / str(steps)
        with SimStore(directory, dram_bytes=4 * MIB, ssd_bytes=16 * MIB) as world:
            ns, keys = world.declare(_namespace()), _keys(3)
            client = world.client()
            _put(world, client, ns, keys, retention="durable")
            world.finish_all()
            world.rot(world.ssd_extent(ns, keys[0]))
            verify = world.sim.start(world.store.verify(60.0))
            while not world.store.counters.corrupt:
                assert world.sim.step()
            done = not all(world.sim.step() for _ in range(steps))
            verify.cancel()
            world.crash()
            assert world.client().exists(ns, keys)[1:] == [True, True]
            if done:
                assert world.run(world.client().read(ns, keys)) == [
                    content(int(key), NBYTES) for key in keys
                ]
                return
    raise AssertionError("the repair never ends")


def _fail_writes(name: str, path: Path) -> None:
    if name == "pwritev":
        raise OSError(errno.EIO, "the disk fails")


def _puts_during_a_pause(world: SimStore, client: StoreClient, keys: Sequence[bytes]) -> Namespace:
    """Blobs sealed while the disk is left alone after a fault, which is over."""
    ns = world.declare(_namespace())
    world.disk.before_step = _fail_writes
    _put(world, client, ns, keys[:1])
    world.rest()
    world.disk.before_step = lambda name, path: None
    for key in keys[1:]:
        _put(world, client, ns, [key])
    world.rest()
    assert world.store.counters.unsaved == len(keys)
    return ns


def test_what_was_sealed_after_a_fault_is_saved_once_the_disk_works(tmp_path: Path) -> None:
    with _world(tmp_path) as world:
        keys = _keys(8)
        ns = _puts_during_a_pause(world, world.client(), keys)
        for _ in range(5):
            world.sim.advance(1.0)
            world.rest()
        blobs = world.store.state(ns.id).blobs
        assert all(blobs[key].ssd is not False for key in keys)
        world.finish_all()
        world.audit()


def test_what_was_sealed_after_a_fault_is_saved_by_a_store_that_closes(tmp_path: Path) -> None:
    with _world(tmp_path) as world:
        keys = _keys(8)
        ns = _puts_during_a_pause(world, world.client(), keys)
        world.reopen()
        assert all(world.client().exists(ns, keys))


def test_a_store_whose_disk_fails_for_good_closes_in_time(tmp_path: Path) -> None:
    with _world(tmp_path) as world:
        ns = world.declare(_namespace())
        world.disk.before_step = _fail_writes
        _put(world, world.client(), ns, _keys(4))
        before_s = world.sim.clock()
        world.close(drain_s=10.0)
        assert world.sim.clock() - before_s <= 11.0
        world.disk.before_step = lambda name, path: None
        world.open()


def test_a_durable_blob_whose_copy_rotted_stays_in_dram_until_it_is_saved_again(
    tmp_path: Path,
) -> None:
    with _world(tmp_path) as world:
        ns, (key,) = world.declare(_namespace()), _keys(1)
        client = world.client()
        assert _put(world, client, ns, [key], retention="durable") == ["stored"]
        world.finish_all()
        world.rot(world.ssd_extent(ns, key))
        world.disk.before_step = _fail_writes
        assert len(world.run(world.store.verify(60.0))["corrupt"]) == 1
        world.rest()
        for other in _keys(60, first=1):
            _put(world, client, ns, [other])
        assert world.run(client.put(ns, [key], [content(0, NBYTES)], retention="durable"))
        for other in _keys(60, first=100):
            _put(world, client, ns, [other])
        assert world.run(client.read(ns, [key])) == [content(0, NBYTES)]
        world.audit()
        world.disk.before_step = lambda name, path: None
        world.reopen()
        assert world.run(world.client().read(ns, [key])) == [content(0, NBYTES)]


def test_without_a_disk_no_blob_stays_for_having_been_put_as_durable(tmp_path: Path) -> None:
    with SimStore(tmp_path, dram_bytes=MIB, staging_bytes=256 * KIB, ssd_bytes=0) as world:
        ns = world.declare(_namespace())
        client = world.client()
        for key in _keys(20):
            assert _put(world, client, ns, [key], retention="durable") == ["refused"]
            assert client.exists(ns, [key]) == [True]


def test_a_blob_that_the_ssd_cannot_hold_costs_no_other_its_place(tmp_path: Path) -> None:
    with SimStore(tmp_path, dram_bytes=48 * MIB, ssd_bytes=16 * MIB) as world:
        ns, big = world.declare(_namespace(1536 * KIB)), world.declare(_namespace(20 * MIB))
        keys = _keys(8)
        client = world.client()
        for chain in (keys[:5], keys[5:]):
            _put(world, client, ns, chain, nbytes=1536 * KIB)
            world.finish_all()
        world.call(client.drop, ns, keys, "dram")
        assert _put(world, client, big, _keys(1), nbytes=20 * MIB) == ["stored"]
        world.finish_all()
        assert all(client.exists(ns, keys))
        assert world.store.counters.ssd_evicted == 0
        world.audit()


def test_room_on_the_ssd_comes_from_the_ends_of_chains(tmp_path: Path) -> None:
    with SimStore(tmp_path, dram_bytes=48 * MIB, ssd_bytes=20 * MIB) as world:
        ns, big = world.declare(_namespace(1536 * KIB)), world.declare(_namespace(13 * MIB))
        keys = _keys(8)
        client = world.client()
        _put(world, client, ns, keys, nbytes=1536 * KIB)
        world.finish_all()
        world.call(client.drop, ns, keys, "dram")
        _lose(world, ns, keys[5])
        assert len(world.run(client.read(ns, keys))) == 5
        world.finish_all()
        world.call(client.drop, ns, keys, "dram")
        stored = _put(world, client, big, _keys(1), nbytes=13 * MIB, retention="durable")
        assert stored == ["stored"]
        world.finish_all()
        n = client.match(ns, keys)
        assert 1 <= n <= 4
        assert client.exists(ns, keys) == [True] * n + [False] * (8 - n)
        assert world.store.state(big.id).blobs[_keys(1)[0]].ssd is not False
        world.audit()


LAYERS = KVLayout((LayerGroup.attention(layers=4, heads=16, head_size=64),))
"""Four parts of 1 MiB."""


def _layered(world: SimStore) -> tuple[Namespace, int]:
    ns = world.declare(Namespace("layers", LAYERS, tokens_per_blob=256))
    assert [part.nbytes for part in LAYERS.parts(256)] == [MIB] * 4
    return ns, 4 * MIB


def test_bytes_that_a_reader_has_verified_are_never_loaded_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SimStore(tmp_path, dram_bytes=24 * MIB, ssd_bytes=32 * MIB) as world:
        (ns, nbytes), (key,) = _layered(world), _keys(1)
        payload = content(0, nbytes)
        client = world.client()
        _put(world, client, ns, [key], nbytes=nbytes)
        world.finish_all()
        world.call(client.drop, ns, [key], "dram")
        reads: list[Path] = []

        def fail_later_reads(name: str, path: Path) -> None:
            if name == "preadv":
                reads.append(path)
                if len(reads) > 3:  # the first unit is read whole
                    raise OSError(errno.EIO, "the disk fails")

        world.disk.before_step = fail_later_reads
        get = world.sim.start(client.get(ns, [key], stream=True))
        first = world.sim.finish(get)
        waits = [world.sim.start(first.wait(0, at * MIB, (at + 1) * MIB)) for at in range(4)]
        ready = [world.sim.finish(wait) == "" for wait in waits]
        world.finish_all()
        assert any(ready)
        assert not all(ready)
        world.disk.before_step = lambda name, path: None
        extent = world.ssd_extent(ns, key)
        for at in range(4):
            world.rot(extent, at * MIB)
        second = world.run(client.get(ns, [key]))
        assert (len(second), second.reason) == (0, "busy")
        for at in range(4):
            part = slice(at * MIB, (at + 1) * MIB)
            assert not ready[at] or first[0][part] == payload[part]
            world.rot(extent, at * MIB)  # which mends it
        world.call(first.release)
        world.audit()
        assert world.run(client.read(ns, [key])) == [payload]
    caplog.clear()  # the error holds frames, and these hold views


def _half_written(
    world: SimStore, client: StoreClient, ns: Namespace, key: bytes, payload: bytes
) -> Writing:
    """A blob whose first part is sealed."""
    writing = world.run(client.reserve(ns, [key]))
    writing.write(0, payload)
    world.call(writing.seal_parts, 0, [0])
    return writing


@pytest.mark.parametrize(("alive", "why"), [((), ""), ((0,), "moved")])
def test_who_follows_a_writer_is_given_only_what_is_published(
    tmp_path: Path, alive: tuple[int, ...], why: str
) -> None:
    with SimStore(tmp_path, dram_bytes=48 * MIB, ssd_bytes=32 * MIB) as world:
        (ns, nbytes), (key,) = _layered(world), _keys(1)
        writer, reader = world.client("writer"), world.client("reader")
        payload = content(0, nbytes)
        writing = _half_written(world, writer, ns, key, payload)
        reading = world.run(reader.get(ns, [key], stream=True, wait_for_writers=True))
        last = world.sim.start(reading.wait(0, 3 * MIB, nbytes))
        seal = world.sim.start(writing.seal(alive=alive))
        assert not last.done()
        assert world.sim.finish(seal) == [("stored", "")]
        assert world.sim.finish(last) == why
        assert world.run(reading.wait(0, 0, MIB)) == ""
        assert world.run(reader.read(ns, [key])) == [payload]
        world.call(writer.exit)
        world.call(reading.release)


def test_who_follows_a_writer_that_was_second_with_other_bytes_learns_of_it(
    tmp_path: Path,
) -> None:
    with SimStore(tmp_path, dram_bytes=48 * MIB, ssd_bytes=32 * MIB) as world:
        (ns, nbytes), (key,) = _layered(world), _keys(1)
        writer, rival, reader = (world.client(name) for name in ("writer", "rival", "reader"))
        writing = _half_written(world, writer, ns, key, content(0, nbytes))
        reading = world.run(reader.get(ns, [key], stream=True, wait_for_writers=True))
        last = world.sim.start(reading.wait(0, 3 * MIB, nbytes))
        assert world.run(rival.put(ns, [key], [content(1, nbytes)])) == [("stored", "")]
        assert not last.done()
        assert world.run(writing.seal())[0][0] == "divergent"
        assert world.sim.finish(last) == "divergent"
        assert world.run(reading.wait(0, 0, MIB)) == ""
        assert world.run(reader.read(ns, [key])) == [content(1, nbytes)]
        world.call(reading.release)
