"""What a runner reserves and seals, without a runner: jobs are what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import InvalidRequest, SizeMismatch
from blobstore.index import NamespaceState
from blobstore.layer_group import LayerGroup
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.text_entry import TextEntry
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, digest_of, opaque

NBYTES = 100 * KIB
JOB = 7


class Jobs:
    """One job that makes `left`, each blob with the bytes of before."""

    def __init__(self, payloads: dict[bytes, bytes]) -> None:
        self.left = dict(payloads)
        self.told: list[bytes] = []

    def entry(self, job_id: int, ns: NamespaceState, key: bytes) -> TextEntry | None:
        if job_id != JOB or key not in self.left:
            return None
        return TextEntry(b"", 0, bytes(64), NBYTES, digest_of(self.left[key]))

    def made(self, job_id: int, key: bytes) -> None:
        assert job_id == JOB
        self.told.append(key)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, dram_bytes=2 * MIB) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def ns(world: SimStore) -> Namespace:
    return world.declare(opaque(NBYTES))


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


KEYS = chain(4)
PAYLOADS = [content(number, NBYTES) for number in range(4)]
OTHERS = [content(100 + number, NBYTES) for number in range(4)]


@pytest.fixture
def jobs(world: SimStore) -> Jobs:
    made = Jobs(dict(zip(KEYS, PAYLOADS, strict=True)))
    world.store.writers._jobs = made
    return made


def test_what_is_on_ssd_alone_is_lent_and_becomes_readable(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.put_cold(client, ns, KEYS, PAYLOADS)
    assert world.run(client.reserve(ns, KEYS)).reasons == ["exists"] * 4
    answers = world.run(client.put(ns, KEYS, PAYLOADS, job=JOB))
    assert answers == [("stored", "")] * 4
    assert [facts["tiers"] for facts in client.stat(ns, KEYS)] == [["dram", "ssd"]] * 4
    assert world.run(client.read(ns, KEYS)) == PAYLOADS
    assert world.reads() == 0
    assert jobs.told == KEYS
    counters = world.store.stats()["counters"]
    assert counters["rebuilt_blobs"] == {"stored": 4}
    assert counters["put_blobs"] == {"stored": 4}


def test_what_is_in_dram_is_not_made_again(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.run(client.put(ns, KEYS, PAYLOADS))
    writing = world.run(client.reserve(ns, KEYS, job=JOB))
    assert writing.reasons == ["exists"] * 4
    assert world.run(writing.seal()) == [("exists", "")] * 4


def test_what_comes_back_meanwhile_is_kept_as_it_is(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.put_cold(client, ns, KEYS, PAYLOADS)
    writing = world.run(client.reserve(ns, KEYS, job=JOB))
    assert writing.reasons == [""] * 4
    reading = world.run(client.get(ns, KEYS))
    for index, payload in enumerate(OTHERS):
        writing.write(index, payload)
    assert [result for result, _ in world.run(writing.seal())] == ["divergent"] * 4
    assert reading.payloads() == PAYLOADS
    assert world.store.stats()["counters"]["diverged_blobs"] == {}
    reading.release()


def test_what_is_being_loaded_is_not_lent(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.put_cold(client, ns, KEYS, PAYLOADS)
    loading = world.sim.start(client.get(ns, KEYS))
    writing = world.sim.start(client.reserve(ns, KEYS, job=JOB))
    assert writing.result().reasons == ["exists"] * 4
    world.call(writing.result().abort)
    reading = world.sim.finish(loading)
    assert reading.payloads() == PAYLOADS
    reading.release()


def test_only_the_leading_keys_that_a_job_still_makes_are_lent(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    del jobs.left[KEYS[2]]
    writing = world.run(client.reserve(ns, KEYS, job=JOB))
    assert writing.reasons == ["", "", "cancelled", "cancelled"]
    world.call(writing.abort)
    assert world.run(client.reserve(ns, KEYS, job=JOB + 1)).reasons == ["cancelled"] * 4


def test_a_job_that_ends_while_its_runner_waits_for_room_gets_none(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    others = [world.client(f"other {n}") for n in range(2)]
    full = [world.run(other.reserve(ns, chain(8, other.holder.name))) for other in others]
    waiting = world.sim.start(client.reserve(ns, KEYS, job=JOB, timeout_s=5.0))
    assert not waiting.done()
    jobs.left.clear()
    for writing in full:
        assert writing.reasons == [""] * 8
        world.call(writing.abort)
    assert world.sim.finish(waiting).reasons == ["cancelled"] * 4
    assert client.holder.lent_bytes == 0


def test_a_blob_of_another_size_is_not_made(
    world: SimStore, client: StoreClient, jobs: Jobs
) -> None:
    layout = KVLayout((LayerGroup("attention", 2, 2, 64, "fp16"),))
    sized = world.declare(Namespace("m", layout, tokens_per_blob=16))
    with pytest.raises(SizeMismatch, match="16 tokens, not 5"):
        world.run(client.reserve(sized, KEYS[:1], tail_tokens=5, job=JOB))
    assert client.holder.lent_bytes == 0


def test_a_blob_has_the_tokens_that_it_had(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    """Where the size is the same for any number, a runner may not say how many."""
    writing = world.run(client.reserve(ns, KEYS[:1], tail_tokens=5, job=JOB))
    writing.write(0, PAYLOADS[0])
    assert world.run(writing.seal()) == [("stored", "")]
    assert world.store.state(ns.id).blobs[KEYS[0]].tokens == 16


def test_a_group_makes_nothing_again(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    with pytest.raises(InvalidRequest, match="group"):
        world.run(client.reserve(ns, KEYS, job=JOB, group=("engine", 1)))


def test_a_blob_of_another_size_is_not_taken(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.put_cold(client, ns, KEYS[:1], PAYLOADS[:1])
    state = world.store.state(ns.id)
    state.blobs[KEYS[0]].nbytes += 1
    try:
        answers = world.run(client.put(ns, KEYS[:1], PAYLOADS[:1], job=JOB))
    finally:
        state.blobs[KEYS[0]].nbytes -= 1
    assert answers == [("refused", "busy")]


def test_a_crash_leaves_the_old_bytes_or_the_new_ones(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.put_cold(client, ns, KEYS, PAYLOADS)
    assert world.run(client.put(ns, KEYS, OTHERS, job=JOB)) == [("stored", "")] * 4
    world.crash()
    found = world.run(world.client().read(ns, KEYS))
    assert len(found) == 4
    for payload, old, new in zip(found, PAYLOADS, OTHERS, strict=True):
        assert payload in (old, new)
    assert world.run(world.store.verify(60.0))["corrupt"] == []


def test_durable_bytes_on_ssd_are_never_replaced_by_others(
    world: SimStore, ns: Namespace, client: StoreClient, jobs: Jobs
) -> None:
    world.put_cold(client, ns, KEYS, PAYLOADS)
    again = world.run(client.put(ns, KEYS, PAYLOADS, retention="durable"))
    assert again == [("exists", "")] * 4
    made = [PAYLOADS[0], *OTHERS[1:]]
    assert world.run(client.put(ns, KEYS, made, job=JOB)) == [
        ("stored", ""),
        *[("refused", "divergent")] * 3,
    ]
    assert world.run(client.read(ns, KEYS)) == PAYLOADS
    assert world.store.stats()["counters"]["diverged_blobs"] == {"reject": 3}
