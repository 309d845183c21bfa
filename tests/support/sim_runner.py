"""A model runner inside a simulation: it makes blobs again at a pace that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from blobstore.keys import Keys
from blobstore.namespace import Namespace
from blobstore.rebuild_tasks import Task
from blobstore.terms import Terms
from tests.support.blobs import payload_of
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient


class SimRunner:
    """Serves the rebuilds of one namespace, a blob every `blob_s` seconds."""

    def __init__(
        self,
        world: SimStore,
        ns: Namespace,
        *,
        blob_s: float = 0.1,
        payload: Callable[[bytes, int], bytes] = payload_of,
        name: str = "runner",
    ) -> None:
        self.world = world
        self.ns = ns
        self.blob_s = blob_s
        self.payload = payload
        self.jobs: list[Task] = []
        self.made: list[bytes] = []
        """Keys, in the order in which they were sealed."""
        self.results: list[tuple[str, str]] = []
        self._client = world.client(name)
        self._rebuilds = world.store.rebuilds
        self.runner = self._rebuilds.register(name, [ns.id], 1)
        self._serving = world.sim.start(self._serve())

    def stop(self) -> None:
        """The runner says goodbye."""
        self._rebuilds.unregister(self.runner)
        self._serving.cancel()
        self.world.loop.run_until_complete(asyncio.gather(self._serving, return_exceptions=True))

    async def _serve(self) -> None:
        while (task := await self._rebuilds.next(self.runner, 3600.0)) is not None:
            self.jobs.append(task)
            started_s = self.world.sim.clock()
            n, reason = await self._make(task)
            took_s = self.world.sim.clock() - started_s
            self._rebuilds.end(self.runner, task.job_id, n, reason, took_s)

    async def _compute(self, task: Task, n: int) -> None:
        """Take the time for one blob, with a sign of life every second."""
        left_s = self.blob_s
        while left_s > 0:
            await asyncio.sleep(min(left_s, 1.0))
            left_s -= 1.0
            self._rebuilds.progress(self.runner, task.job_id, n)

    async def _make(self, task: Task) -> tuple[int, str]:
        before = task.context_keys[-1] if task.context_keys else b""
        wanted = task.wanted
        for n, key in enumerate(task.keys):
            if n >= wanted:
                return n, ""
            await self._compute(task, n)
            writing = await self._client.reserve(
                self.ns, [key], parent_key=before, job=task.job_id, timeout_s=5.0
            )
            writing.write(0, self.payload(key, self.ns.layout.nbytes(0)))
            ((result, why),) = await writing.seal()
            self.results.append((result, why))
            if result == "refused":
                return n, why
            self.made.append(key)
            before = key
            wanted = self._rebuilds.progress(self.runner, task.job_id, n + 1)
        return len(task.keys), ""


@contextmanager
def sim_runner(world: SimStore, ns: Namespace, **terms: Any) -> Iterator[SimRunner]:
    """A runner that is there for a while."""
    runner = SimRunner(world, ns, **terms)
    try:
        yield runner
    finally:
        runner.stop()


def put_told(
    world: SimStore, client: StoreClient, ns: Namespace, keys: Keys, ids: Sequence[int]
) -> None:
    """Put a chain with its token ids."""
    nbytes = ns.layout.nbytes(0)
    tokens = np.array(ids, "<u4").tobytes()
    payloads = [payload_of(key, nbytes) for key in keys]
    answers = world.run(client.put(ns, list(keys), payloads, tokens=tokens, timeout_s=5.0))
    assert [result for result, _ in answers] == ["stored"] * len(keys)
    world.finish_all()


def tell(world: SimStore, ns: Namespace, **terms: str) -> None:
    """Agree on terms for a namespace."""
    world.run(world.store.texts.tell(world.store.state(ns.id), Terms(**terms)))
