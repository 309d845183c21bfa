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


async def _later(seconds: float, world: SimStore) -> int:
    await asyncio.sleep(seconds)
    return await world.store.text_calls.forget(NS.id, KEYS[1], 32)
