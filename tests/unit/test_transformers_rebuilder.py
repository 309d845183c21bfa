"""A model of transformers as a runner: what it makes of a job is what was stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import Client
from blobstore.clients.transformers import StoredCache
from blobstore.clients.transformers.rebuilder import Rebuilder
from blobstore.errors import InvalidRequest, SizeMismatch
from tests.support.polling import poll_until
from tests.support.served_store import served_store
from tests.support.tiny_models import answer, prompt, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

STEP = 8
BLOBS = 12
ANSWER = 12


@pytest.fixture
def kv(tmp_path: Path) -> Iterator[Client]:
    with served_store(tmp_path / "socket") as store, Client(store.address, timeout_s=20.0) as kv:
        yield kv


class Job:
    """What a handler sees of a job, whose wanted blobs may become fewer."""

    def __init__(self, ids: Any, parent: list[memoryview], nbytes: int) -> None:
        self.tokens = np.array(ids, np.uint32)
        self.parent = parent or None
        self.wanted = len(self.tokens) // STEP
        self.wanted_after: dict[int, int] = {}
        """What is wanted once a blob is sealed."""
        self.payloads = [bytearray(nbytes) for _ in range(self.wanted)]
        self.sealed: list[int] = []

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, blob: int) -> memoryview:
        assert not self.sealed or blob > self.sealed[-1]
        return memoryview(self.payloads[blob])

    def seal(self, blob: int) -> None:
        self.sealed.append(blob)
        self.wanted = self.wanted_after.get(blob, self.wanted)


def handle(cache: StoredCache, job: Any, blobs_at_once: int) -> None:
    Rebuilder(cache.portions, blobs_at_once * STEP)(job)


def stored(kv: Client, kind: str) -> tuple[StoredCache, Any, list[memoryview]]:
    """A cache, the ids of one context, and the payloads of its blobs."""
    cache = StoredCache(kv, tiny(kind), tokens_per_blob=STEP)
    ids = prompt(BLOBS * STEP, 1)[0].tolist()
    return cache, ids, cache.rebuild(ids)


def close(job: Job, payloads: list[memoryview], blobs: range) -> None:
    for own, other in zip(job.payloads, blobs, strict=False):
        made, kept = (np.frombuffer(data, np.float32) for data in (own, payloads[other]))
        np.testing.assert_allclose(made, kept, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("kind", ["grouped", "sliding", "sliding and full", "latent"])
def test_blobs_come_in_portions_on_from_what_is_leased(kv: Client, kind: str, first: int) -> None:
    cache, ids, payloads = stored(kv, kind)
    job = Job(ids[first * STEP :], payloads[:first], payloads[0].nbytes)
    handle(cache, job, 3)
    assert job.sealed == {0: [2, 5, 8, 11], 5: [2, 5, 6]}[first]
    close(job, payloads, range(first, BLOBS))


def test_it_stops_where_the_rest_is_not_wanted_any_more(kv: Client) -> None:
    cache, ids, payloads = stored(kv, "grouped")
    job = Job(ids, [], payloads[0].nbytes)
    job.wanted_after = {3: 5}
    handle(cache, job, 2)
    assert job.sealed == [1, 3, 5]
    assert not any(job.payloads[6])
    given_up = Job(ids, [], payloads[0].nbytes)
    given_up.wanted_after = {1: 0}
    handle(cache, given_up, 2)
    assert given_up.sealed == [1]


def test_what_is_no_job_of_this_model_fails(kv: Client) -> None:
    cache, ids, payloads = stored(kv, "grouped")
    partial = Job(ids[:-3], [], payloads[0].nbytes)
    with pytest.raises(InvalidRequest, match="are no blobs"):
        handle(cache, partial, 4)
    of_another = Job(ids, [memoryview(b"abc")], payloads[0].nbytes)
    with pytest.raises(SizeMismatch, match="this model's have"):
        handle(cache, of_another, 4)
    assert partial.sealed == of_another.sealed == []


@pytest.mark.parametrize("kind", ["grouped", "sliding", "sliding and full", "latent"])
def test_a_dropped_prefix_is_restored_while_a_runner_serves(kv: Client, kind: str) -> None:
    model = tiny(kind)
    cache = StoredCache(kv, model, tokens_per_blob=STEP)
    ids = prompt(61, 1)
    plain = answer(model, ids, ANSWER)
    past, _ = cache.restore(ids)
    out = answer(model, ids, ANSWER, past)
    assert cache.store(out, past) == 9
    keys = cache.ns.keys(out[0].tolist())
    kv.drop(cache.ns, keys[3:])
    assert cache.restore(ids)[1] == 3 * STEP  # nobody can rebuild
    with cache.serve_rebuilds(tokens_at_once=2 * STEP) as server:
        past, n = cache.restore(ids)
        assert n == 7 * STEP
        assert torch.equal(answer(model, ids, ANSWER, past), plain)
        poll_until(lambda: not server.stats()["running"], 10.0, "the runner is done")
        told = server.stats()
    assert (told["jobs"], told["failed"], told["blobs"]) == (1, 0, 4)
    kv.drop(cache.ns, keys)
    past, n = cache.restore(ids)
    assert (n, past.get_seq_length()) == (0, 0)
