"""Forgetting in a store at work: payloads, texts, and what a runner is about to make."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.blobs import TOKENS, opaque
from tests.support.sim_runner import put_told, sim_runner
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient

NBYTES = 1000
N = 6
IDS = list(range(TOKENS * N))
NS = opaque(NBYTES)
KEYS = NS.keys(np.array(IDS))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, dram_bytes=8 << 20, ssd_bytes=16 << 20) as made:
        made.declare(NS)
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    made = world.client()
    put_told(world, made, NS, KEYS, IDS)
    return made


def forget(world: SimStore, *keys: bytes) -> int:
    return world.run(world.store.text_calls.forget(NS.id, b"".join(keys), 32))


def held(world: SimStore) -> int:
    """How many leading blobs have bytes."""
    return world.store.match(NS.id, KEYS.packed, 32)[0]


def told(world: SimStore) -> int:
    """How many leading blobs have a text."""
    return world.run(world.store.texts.known(world.store.state(NS.id), list(KEYS)))


def test_bytes_and_texts_go_with_what_continues_them(world: SimStore, client: StoreClient) -> None:
    assert forget(world, KEYS[4], KEYS[2]) == N - 2
    assert (held(world), told(world)) == (2, 2)
    assert forget(world, KEYS[4]) == 0


def test_texts_without_bytes_count_as_well(world: SimStore, client: StoreClient) -> None:
    world.call(client.drop, NS, [KEYS[3]])
    assert (held(world), told(world)) == (3, N)
    assert forget(world, KEYS[1]) == N - 1
    assert (held(world), told(world)) == (1, 1)


def test_a_blob_that_no_text_leads_to_is_forgotten_with_what_it_continues(
    world: SimStore, client: StoreClient
) -> None:
    state, texts = world.store.state(NS.id), world.store.texts

    async def lose_one() -> None:
        await texts._discard(state.id, [KEYS[3]])

    world.sim.advance(2.0)
    world.finish_all()
    world.run(lose_one())
    assert told(world) == 3
    assert forget(world, KEYS[2]) == N - 2
    assert (held(world), told(world)) == (2, 2)
    assert world.run(texts.chain(state, list(KEYS[3:]))) == [None] * 3


@pytest.mark.parametrize(("after_s", "n_made"), [(1.0, 0), (5.0, 2)])
def test_what_a_runner_is_about_to_make_is_forgotten_too(
    world: SimStore, client: StoreClient, after_s: float, n_made: int
) -> None:
    world.call(client.drop, NS, [KEYS[1]])
    with sim_runner(world, NS, blob_s=2.0) as runner:
        getting = world.sim.start(client.get(NS, list(KEYS), timeout_s=60.0))
        forgetting = world.sim.start(_later(after_s, world))
        reading = world.sim.finish(getting)
        assert len(reading) <= 3, "it may have what was there before"
        reading.release()
        assert world.sim.finish(forgetting) == N - 1
        world.run(asyncio.sleep(30.0))
        assert len(runner.made) == n_made
        assert (held(world), told(world)) == (1, 1)


@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_what_a_runner_was_lent_is_not_published_once_it_is_forgotten(
    tmp_path: Path, nbytes: int, when: str
) -> None:
    ns = opaque(nbytes)
    keys = ns.keys(np.array(IDS))
    with SimStore(tmp_path, dram_bytes=16 << 20, ssd_bytes=32 << 20) as world:
        world.declare(ns)
        client, state = world.client(), world.store.state(ns.id)
        put_told(world, client, ns, keys, IDS)
        world.sim.advance(2.0)
        world.finish_all()
        world.call(client.drop, ns, [keys[0]])
        rebuilds = world.store.rebuilds
        runner = rebuilds.register("runner", [ns.id], 1)
        getting = world.sim.start(client.get(ns, list(keys), timeout_s=60.0))
        task = world.run(rebuilds.next(runner, 5.0))
        assert task is not None
        writing = world.run(client.reserve(ns, [keys[0]], job=task.job_id))
        writing.write(0, bytes(nbytes))  # other bytes than before: the text is noted anew
        forget = world.store.text_calls.forget(ns.id, keys.packed, 32)
        if when == "before":
            assert world.run(forget) == N
            assert world.run(writing.seal()) == [("refused", "cancelled")]
        else:
            first = world.sim.start(forget if when == "after" else writing.seal())
            second = world.sim.start(writing.seal() if when == "after" else forget)
            world.sim.finish(first)
            world.sim.finish(second)
        world.sim.finish(getting).release()
        rebuilds.unregister(runner)
        world.sim.advance(2.0)
        world.finish_all()
        assert state.blobs == {}
        assert world.run(world.store.texts.known(state, list(keys))) == 0
        world.audit(quiet=True)


async def _later(seconds: float, world: SimStore) -> int:
    await asyncio.sleep(seconds)
    return await world.store.text_calls.forget(NS.id, KEYS[1], 32)
