"""The clients' contract for many users of one client: every verb at once, every byte checked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import isawaitable
from typing import Any

import numpy as np
import pytest

from blobstore.clients import AsyncClient, BoundNamespace, Client, Keys, Namespace
from blobstore.units import KIB
from tests.support.blobs import chain, opaque, payload_of, payloads_of
from tests.support.daemon import Daemon
from tests.support.http_daemon import HttpDaemon

NBYTES = 80 * KIB
LENGTH = 5
SHARED = 3
"""Blobs of the context that all have in common, such as a system prompt."""

Steps = Generator[Callable[[], Any], Any, None]
"""Calls of a client, made by whoever runs them: so that one agent serves both kinds."""


class Agent:
    """Puts contexts of its own and one of everyone's, and does all else to them, in any order."""

    def __init__(self, kv: Any, namespace: Namespace, seed: int) -> None:
        self._kv = kv
        self._namespace = namespace
        self._rng = random.Random(seed)
        self._seeds = iter(range(1000 * (seed + 1), 1000 * (seed + 2)))
        self._own: list[Keys] = []
        self._ns: BoundNamespace

    def live(self, turns: int) -> Steps:
        """So many things, one after the other."""
        self._ns = yield partial(self._kv.namespace, self._namespace)
        verbs = [
            self._put_from, self._put, self._give_up, self._lease, self._stream, self._copy,
            self._share, self._pin, self._prefetch, self._drop, self._look, self._ask,
        ]  # fmt: skip
        for _ in range(turns):
            yield from self._rng.choice(verbs)()
        for keys in self._own:
            yield from self._check(keys)
            assert (yield partial(self._kv.drop, self._ns, keys[:1])) == LENGTH

    def _context(self) -> Keys:
        return self._rng.choice(self._own) if self._own else Keys(b"")

    def _new(self) -> Keys:
        return chain(self._namespace, next(self._seeds), LENGTH)

    def _put_from(self) -> Steps:
        keys, retention = self._new(), self._rng.choice(["standard", "durable"])
        contents = payloads_of(keys, NBYTES)
        results = yield partial(self._kv.put_from, self._ns, keys, contents, retention=retention)
        assert results == ["stored"] * LENGTH
        self._own.append(keys)

    def _put(self) -> Steps:
        keys = self._new()
        for at in (0, 2):
            part, parent = keys[at : at + 2 if at == 0 else LENGTH], keys[at - 1] if at else None
            writer = yield partial(self._kv.put, self._ns, part, parent=parent)
            for i, key in enumerate(part):
                writer[i][:] = payload_of(key, NBYTES)
            yield writer.seal
            assert writer.results == ["stored"] * len(part)
        self._own.append(keys)

    def _give_up(self) -> Steps:
        keys = self._new()
        writer = yield partial(self._kv.put, self._ns, keys)
        writer[0][:] = b"\xee" * NBYTES
        writer.abort()
        assert (yield partial(self._kv.exists, self._ns, keys)) == [False] * LENGTH

    def _lease(self) -> Steps:
        yield from self._check(self._context())

    def _check(self, keys: Keys) -> Steps:
        lease = yield partial(self._kv.get, self._ns, keys)
        assert (len(lease), lease.reason) == (len(keys), "")
        assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)
        lease.release()

    def _stream(self) -> Steps:
        keys = self._context()
        lease = yield partial(self._kv.get, self._ns, keys, stream=True)
        assert len(lease) == len(keys)
        for i, key in enumerate(keys):
            assert (yield partial(lease.wait, i))
            assert lease[i] == payload_of(key, NBYTES)

    def _copy(self) -> Steps:
        keys = self._context()
        target = np.zeros((len(keys), NBYTES), np.uint8)
        assert (yield partial(self._kv.get_into, self._ns, keys, target)) == len(keys)
        assert [row.tobytes() for row in target] == payloads_of(keys, NBYTES)

    def _share(self) -> Steps:
        keys = chain(self._namespace, 0, SHARED)
        contents = payloads_of(keys, NBYTES)
        results = yield partial(self._kv.put_from, self._ns, keys, contents)
        assert set(results) <= {"stored", "exists"}
        yield from self._check(keys)

    def _pin(self) -> Steps:
        keys = self._context()
        assert (yield partial(self._kv.pin, self._ns, keys, 60.0)) == len(keys)
        assert (yield partial(self._kv.pin, self._ns, keys, 0)) == len(keys)

    def _prefetch(self) -> Steps:
        keys = self._context()
        yield partial(self._kv.drop, self._ns, keys, "dram")
        assert (yield partial(self._kv.prefetch, self._ns, keys)) <= len(keys)

    def _drop(self) -> Steps:
        if not self._own:
            return
        keys = self._own.pop(self._rng.randrange(len(self._own)))
        assert (yield partial(self._kv.drop, self._ns, keys[2:3])) == LENGTH - 2
        assert (yield partial(self._kv.match, self._ns, keys)).blobs == 2
        assert (yield partial(self._kv.drop, self._ns, keys[:1])) == 2
        assert (yield partial(self._kv.exists, self._ns, keys)) == [False] * LENGTH

    def _look(self) -> Steps:
        keys = self._context()
        hit = yield partial(self._kv.match, self._ns, keys)
        assert (hit.blobs, len(hit.tiers)) == (len(keys), len(keys))
        facts = yield partial(self._kv.stat, self._ns, keys)
        assert [blob["key"] for blob in facts] == [key.hex() for key in keys]
        unknown = self._new()
        assert (yield partial(self._kv.match, self._ns, unknown)).blobs == 0

    def _ask(self) -> Steps:
        assert (yield self._kv.ping)
        stats = yield self._kv.stats
        assert "counters" in stats


def run(steps: Steps) -> None:
    """Make the calls of an agent."""
    outcome: Any = None
    try:
        while True:
            outcome = steps.send(outcome)()
    except StopIteration:
        return


async def run_async(steps: Steps) -> None:
    """Make and await the calls of an agent."""
    outcome: Any = None
    try:
        while True:
            called = steps.send(outcome)()
            outcome = await called if isawaitable(called) else called
    except StopIteration:
        return


def agents(kv: Any, model: str, n: int, turns: int) -> Iterable[Steps]:
    return (Agent(kv, opaque(NBYTES, model), seed).live(turns) for seed in range(n))


WAYS = ("socket", "http")


def address(way: str, run: Daemon) -> tuple[str, str]:
    """Of the daemon, and the token that goes with it."""
    if way == "socket":
        return run.address, ""
    door = HttpDaemon(run)
    return door.url, door.token


@pytest.mark.parametrize("way", WAYS)
def test_eight_threads_on_one_client(shared: Daemon, other: Client, model: str, way: str) -> None:
    where, token = address(way, shared)
    with Client(where, timeout_s=20.0, token=token) as kv, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run, agent) for agent in agents(kv, model, 8, turns=150)]:
            done.result()
    assert other.verify(timeout_s=60.0)["corrupt"] == []


@pytest.mark.parametrize("way", WAYS)
async def test_fifty_tasks_on_one_client(
    shared: Daemon, other: Client, model: str, way: str
) -> None:
    where, token = address(way, shared)
    async with AsyncClient(where, timeout_s=20.0, token=token) as kv:
        await asyncio.gather(*(run_async(agent) for agent in agents(kv, model, 50, turns=25)))
    assert other.verify(timeout_s=60.0)["corrupt"] == []


async def test_blocks_of_an_async_client_are_those_of_the_other(
    shared: Daemon, other: Client, model: str
) -> None:
    namespace = opaque(NBYTES, model)
    keys = chain(namespace, 1, LENGTH)
    async with AsyncClient(shared.address) as kv:
        ns = await kv.namespace(namespace)
        async with kv.put(ns, keys) as writer:
            for i, key in enumerate(keys):
                writer[i][:] = payload_of(key, NBYTES)
        assert writer.results == ["stored"] * LENGTH
        hit = await kv.match(ns, keys)
        async with kv.get(ns, keys[: hit.blobs], stream=True) as lease:
            for i, key in enumerate(keys):
                assert await lease.wait(i)
                assert lease[i] == payload_of(key, NBYTES)
        with other.get(ns, keys) as same:
            assert [bytes(view) for view in same] == payloads_of(keys, NBYTES)
