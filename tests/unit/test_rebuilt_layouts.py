"""Rebuilds of layouts whose layers look back differently: windows, states, latents, heads."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import shake_128
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import (
    BoundNamespace,
    Client,
    KVLayout,
    LayerGroup,
    Namespace,
    RebuildJob,
    Shard,
    Terms,
)
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store

TOKENS = 16
N = 6
TAIL = 5
IDS = np.arange(100, 100 + N * TOKENS + TAIL, dtype=np.uint32)
WAIT_S = 20.0

FULL = LayerGroup.attention(layers=2, heads=2, head_size=8)
LAYOUTS = {
    "sliding": (FULL, LayerGroup.sliding(layers=3, heads=2, head_size=8, window=TOKENS + 3)),
    "wide window": (LayerGroup.sliding(layers=2, heads=2, head_size=8, window=4 * TOKENS), FULL),
    "state": (LayerGroup.state(layers=2, heads=2, state_bytes=96), FULL),
    "state alone": (LayerGroup.state(layers=3, heads=2, state_bytes=4096),),
    "latent": (LayerGroup.latent(layers=2, width=12), FULL),
}


@pytest.fixture(params=LAYOUTS)
def namespace(request: pytest.FixtureRequest) -> Namespace:
    groups = LAYOUTS[request.param]
    heads = 1 if any(group.kind == "latent" for group in groups) else 2
    return Namespace("m", KVLayout(groups, head_groups=heads), tokens_per_blob=TOKENS)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "s") as served:
        yield served


@pytest.fixture
def kv(served: ServedStore) -> Iterator[Client]:
    with Client(served.address, timeout_s=WAIT_S) as kv:
        yield kv


class Model:
    """Computes blobs as a model does: each layer from what of the past it looks back on."""

    def __init__(self, namespace: Namespace) -> None:
        self.layout = namespace.layout
        self._kinds = [group for group in self.layout.groups for _ in range(group.layers)]

    def blob(self, ids: np.ndarray, start: int, end: int, before: list[bytes]) -> list[bytes]:
        """The parts of the blob of tokens `start` to `end`; `before` are those of the last one."""
        made = []
        for part in self.layout.parts(end - start):
            group = self._kinds[part.layers[0]]
            seen = {
                "state": ids[start:end],
                "sliding": ids[max(0, start - group.window) : end],
            }.get(group.kind, ids[:end])
            state = before[part.index] if before and group.kind == "state" else b""
            named = repr((part.layers, part.heads, start)).encode()
            made.append(shake_128(named + seen.tobytes() + state).digest(part.nbytes))
        return made

    def blobs(self, ids: np.ndarray) -> list[list[bytes]]:
        """The parts of all blobs of a context."""
        made: list[list[bytes]] = []
        for start in range(0, len(ids), TOKENS):
            end = min(start + TOKENS, len(ids))
            made.append(self.blob(ids, start, end, made[-1] if made else []))
        return made


class Runner:
    """A model runner that goes on from the leased end of the context, and from nothing else."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.positions: list[int] = []

    def __call__(self, job: RebuildJob) -> None:
        self.positions.append(job.position)
        assert job.context is not None
        ids = np.concatenate([job.context, job.tokens])
        parent = job.parent
        last = len(job.context_keys) - 1
        before = [bytes(part) for part in parent.parts(last)] if parent is not None else []
        at = job.position
        for index in range(len(job)):
            if index >= job.wanted:
                return
            end = at + len(job.blob_tokens(index))
            before = self._model.blob(ids, at, end, before)
            for view, part in zip(job.parts(index), before, strict=True):
                view[:] = part
            job.seal(index)
            at = end


def put(kv: Client, namespace: Namespace, **terms: str) -> BoundNamespace:
    ns = kv.namespace(namespace, terms=Terms(**terms))
    payloads = [b"".join(parts) for parts in Model(namespace).blobs(IDS)]
    keys = ns.keys(IDS, tail=True)
    results = kv.put_from(ns, keys, payloads, token_ids=IDS, retention="durable")
    assert results == ["stored"] * (N + 1)
    return ns


@pytest.mark.parametrize("n_kept", [0, 3, N])
def test_what_was_dropped_comes_back_byte_for_byte(
    kv: Client, namespace: Namespace, n_kept: int
) -> None:
    ns = put(kv, namespace, recall="rebuild")
    keys, runner = ns.keys(IDS, tail=True), Runner(Model(namespace))
    assert kv.drop(ns, keys[n_kept:]) == N + 1 - n_kept
    with kv.serve_rebuilds([ns], runner), kv.get(ns, keys) as lease:
        assert lease.served.get("rebuild") == N + 1 - n_kept
        for index, wanted in enumerate(Model(namespace).blobs(IDS)):
            assert [bytes(part) for part in lease.parts(index)] == wanted
    assert runner.positions == [n_kept * TOKENS]
    assert kv.verify()["corrupt"] == []


@pytest.mark.parametrize("recall", ["rebuild", "both"])
def test_what_is_on_disk_is_made_again_beside_it(
    kv: Client, namespace: Namespace, recall: str
) -> None:
    ns = put(kv, namespace, recall=recall, divergence="reject")
    keys = ns.keys(IDS, tail=True)
    poll_until(lambda: kv.stats()["tiers"]["ssd"]["dirty_bytes"] == 0, WAIT_S, "all is on disk")
    assert kv.drop(ns, keys[2:], tier="dram") == N - 1
    with kv.serve_rebuilds([ns], Runner(Model(namespace))), kv.get(ns, keys) as lease:
        wanted = [b"".join(parts) for parts in Model(namespace).blobs(IDS)]
        assert [bytes(view) for view in lease] == wanted
        assert "rebuild" in lease.served or recall == "both"
    assert kv.stats()["counters"]["diverged_blobs"] == {}


def test_a_rank_reads_its_share_of_what_was_rebuilt(kv: Client, namespace: Namespace) -> None:
    ns = put(kv, namespace, recall="rebuild")
    keys, wanted = ns.keys(IDS, tail=True), Model(namespace).blobs(IDS)
    kv.drop(ns, keys)
    n_ranks = namespace.layout.head_groups
    with kv.serve_rebuilds([ns], Runner(Model(namespace))):
        for rank in range(n_ranks):
            mine = kv.namespace(namespace, shard=Shard(rank, n_ranks))
            with kv.get(mine, keys) as lease:
                assert len(lease) == N + 1
                for index in range(N + 1):
                    parts = [bytes(part) for part in lease.parts(index)]
                    assert parts == [wanted[index][number] for number in mine.reads]


def test_a_reader_that_streams_has_each_part_once_it_is_there(
    kv: Client, namespace: Namespace
) -> None:
    ns = put(kv, namespace, recall="rebuild")
    keys, wanted = ns.keys(IDS, tail=True), Model(namespace).blobs(IDS)
    kv.drop(ns, keys[1:])
    with kv.serve_rebuilds([ns], Runner(Model(namespace))), kv.get(ns, keys, stream=True) as lease:
        assert len(lease) == N + 1
        for index in range(N + 1):
            for part in namespace.layout.needed_parts(index, N + 1, TOKENS, tail_tokens=TAIL):
                assert lease.wait(index, part)
                assert bytes(lease.parts(index)[part]) == wanted[index][part]


def test_a_runner_that_ends_before_the_last_layer_leaves_nothing_readable(
    kv: Client, namespace: Namespace
) -> None:
    ns = put(kv, namespace, recall="rebuild")
    keys, model = ns.keys(IDS, tail=True), Model(namespace)
    kv.drop(ns, keys)

    def handler(job: RebuildJob) -> None:
        parts = job.parts(0)
        for view, part in zip(parts[:-1], model.blobs(IDS)[0], strict=False):
            view[:] = part
        raise RuntimeError("out of memory before the last layer")

    with kv.serve_rebuilds([ns], handler), kv.get(ns, keys) as lease:
        assert (len(lease), lease.reason) == (0, "failed")
    assert kv.match(ns, keys).blobs == 0
