"""What the store tells its plan, and keeps of sessions, while clients get and put."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.hint import Hint
from blobstore.index import Record
from blobstore.namespace import Namespace
from blobstore.sessions import FILE_NAME
from blobstore.store import MAINTAIN_S
from blobstore.tiering.policy import Use
from blobstore.units import KIB, MIB
from blobstore.uses import PAUSE_S
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 100 * KIB


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, dram_bytes=2 * MIB) as made:
        yield made


@pytest.fixture
def ns(world: SimStore) -> Namespace:
    return world.declare(opaque(NBYTES))


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


@pytest.fixture
def told(world: SimStore) -> list[Use[Record]]:
    """What the plan is told from now on."""
    found: list[Use[Record]] = []
    world.store.uses._tell = found.append
    return found


def payloads(n: int) -> list[bytes]:
    return [content(number, NBYTES) for number in range(n)]


def keys_of(use: Use[Record]) -> list[bytes]:
    return [record.key for record in use.items]


class TestUses:
    def test_a_request_is_a_get_and_the_put_that_continues_it(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        keys = chain(6)
        world.run(client.put(ns, keys[:4], payloads(4)))
        world.sim.advance(400.0)
        hint = Hint("s", 3, "main", "tool_use")
        world.run(client.read(ns, keys, hint=hint))
        world.sim.advance(2.0)
        world.run(client.put(ns, keys[4:], payloads(2), parent_key=keys[3], hint=hint))
        world.sim.advance(2.0)
        first, got, put = told
        assert (keys_of(first), first.n_held, first.continues) == (keys[:4], 0, False)
        assert (keys_of(got), got.n_held, got.continues) == (keys[:4], 4, False)
        assert (got.prompt_tokens, got.session, got.turn) == (6 * 16, "s", 3)
        assert (keys_of(put), put.n_held, put.continues) == (keys, 4, True)
        assert (put.kind, put.finish) == ("main", "tool_use")
        assert got.now_s - first.now_s == pytest.approx(400, abs=1)

    def test_the_match_before_tells_how_long_the_prompt_is_and_the_one_after_how_it_ended(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        keys = chain(6)
        world.run(client.put(ns, keys[:4], payloads(4)))
        world.sim.advance(400.0)
        told.clear()
        asked = b"".join(keys)
        hint = Hint("s", 3)
        assert world.call(world.store.match, ns.id, asked, 32, hint=hint)[0] == 4
        world.run(client.read(ns, keys[:4], hint=hint))
        world.sim.advance(2.0)
        world.call(world.store.match, ns.id, asked, 32, hint=Hint("s", 3, finish="stop"))
        world.sim.advance(2.0)
        got, ended = told
        assert (got.n_held, got.prompt_tokens, got.finish) == (4, 6 * 16, "")
        assert (ended.n_held, ended.continues, ended.finish) == (4, True, "stop")

    def test_it_is_told_after_the_answer(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1)))
        world.sim.advance(1.0)
        world.run(client.read(ns, chain(1)))
        assert len(told) == 1
        world.sim.advance(PAUSE_S)
        assert len(told) == 2

    def test_a_get_from_ssd_is_a_use_as_one_from_dram(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        keys = chain(3)
        world.put_cold(client, ns, keys, payloads(3))
        world.sim.advance(10.0)
        told.clear()
        world.run(client.read(ns, [*keys, *chain(1, "absent")]))
        world.sim.advance(1.0)
        (use,) = told
        assert (keys_of(use), use.n_held, use.prompt_tokens) == (keys, 3, 4 * 16)

    def test_keys_put_as_roots_are_uses_of_their_own(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        keys = chain(3)
        for key in keys:
            world.run(client.put(ns, [key], payloads(1)))
        world.sim.advance(10.0)
        told.clear()
        world.run(client.read(ns, keys))
        world.sim.advance(1.0)
        assert sorted(map(keys_of, told)) == sorted([key] for key in keys)

    def test_misses_refusals_and_looks_are_no_uses(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        keys = chain(3)
        world.run(client.put(ns, keys, payloads(3)))
        world.sim.advance(10.0)
        told.clear()
        world.run(client.read(ns, chain(3, "absent")))
        assert client.match(ns, keys) == 3
        client.exists(ns, keys)
        client.stat(ns, keys)
        world.call(client.prefetch, ns, keys)
        world.run(client.put(ns, keys, payloads(3)))  # they exist
        world.run(client.put(ns, chain(1, "orphan"), payloads(1), parent_key=b"x" * 32))
        world.sim.advance(10.0)
        assert told == []

    def test_what_a_reader_follows_is_told_once_it_is_published(
        self, world: SimStore, ns: Namespace, client: StoreClient, told: list[Use[Record]]
    ) -> None:
        keys = chain(2)
        world.run(client.put(ns, keys[:1], payloads(1)))
        world.sim.advance(400.0)
        told.clear()
        writing = world.run(client.reserve(ns, keys[1:], parent_key=keys[0]))
        reading = world.run(client.get(ns, keys, stream=True, wait_for_writers=True))
        world.sim.advance(1.0)
        assert [keys_of(use) for use in told] == [keys[:1]]
        writing.abort()
        reading.release()
        world.sim.advance(1.0)
        assert len(told) == 1

    def test_the_plan_forgets_what_is_dropped(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        forgotten: list[bytes] = []
        world.store.index.on_discarded = lambda record: forgotten.append(record.key)
        keys = chain(3)
        world.run(client.put(ns, keys, payloads(3)))
        world.finish_all()
        assert world.call(client.drop, ns, keys, "dram") == 3
        assert forgotten == []
        world.call(client.drop, ns, keys[1:])
        assert sorted(forgotten) == sorted(keys[1:])


def test_the_gap_of_a_get_is_since_the_use_before_whatever_tier_it_is_from(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    keys = chain(2)
    gaps = world.store.counters.ages.reuse_gap
    world.put_cold(client, ns, keys, payloads(2))
    for before_s, tier in ((300.0, "ssd"), (700.0, "dram")):
        (facts,) = client.stat(ns, keys[1:])
        assert tier in facts["tiers"]
        counted, told_s = gaps.count, gaps.sum_s
        world.sim.advance(before_s)
        world.run(client.read(ns, keys))
        world.sim.advance(1.0)
        assert gaps.count == counted + 1
        assert gaps.sum_s - told_s == pytest.approx(before_s, abs=3)


def test_what_was_being_written_when_it_was_asked_for_had_not_been_idle(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    world.sim.advance(1000.0)
    writing = world.run(client.reserve(ns, chain(1)))
    reading = world.sim.start(client.get(ns, chain(1), wait_for_writers=True, timeout_s=5.0))
    world.run(writing.seal([content(0, NBYTES)]))
    world.finish_all()
    reading.result().release()
    world.sim.advance(1.0)
    assert world.store.counters.ages.reuse_gap.sum_s < 3.0


class TestSessions:
    def test_they_survive_a_restart(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        keys = chain(3)
        world.run(client.put(ns, keys, payloads(3), hint=Hint("s")))
        world.sim.advance(400.0)
        world.run(client.read(ns, keys, hint=Hint("s")))
        world.finish_all()
        world.reopen()
        record = world.store.state(ns.id).blobs[keys[0]]
        facts = world.store.sessions.facts_of(record, world.sim.clock())
        assert (facts["session"], facts["turn"]) == ("s", 1)
        assert facts["gap_s"] == pytest.approx(400, abs=1)
        assert world.store.stats()["sessions"] == {"known": 1, "why_cold": ""}

    def test_a_crash_costs_no_more_than_what_came_since_they_were_saved(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(1, "a"), payloads(1), hint=Hint("a")))
        world.finish_all()
        world.sim.advance(MAINTAIN_S + 1)
        world.finish_all()
        world.run(client.put(ns, chain(1, "b"), payloads(1), hint=Hint("b")))
        world.sim.advance(1.0)
        world.crash()
        assert len(world.store.sessions) == 1

    def test_a_damaged_file_starts_with_none(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(1), payloads(1), hint=Hint("s")))
        world.finish_all()
        world.close()
        path = world.settings.data_dir / FILE_NAME
        path.write_bytes(path.read_bytes()[:-1])
        world.open()
        assert world.store.stats()["sessions"]["known"] == 0
        assert "damaged" in world.store.stats()["sessions"]["why_cold"]

    def test_without_ssd_nothing_is_written(self, tmp_path: Path) -> None:
        with SimStore(tmp_path / "none", ssd_bytes=0) as world:
            ns = world.declare(opaque(NBYTES))
            world.run(world.client().put(ns, chain(1), payloads(1), hint=Hint("s")))
            world.sim.advance(MAINTAIN_S + 1)
        assert not (tmp_path / "none" / FILE_NAME).exists()


def test_pins_of_clients_are_counted_apart(
    world: SimStore, ns: Namespace, client: StoreClient
) -> None:
    keys = chain(2)
    world.run(client.put(ns, keys, payloads(2)))
    assert world.call(client.pin, ns, keys, 60.0) == 2
    assert world.call(client.pin, ns, keys, 30.0) == 2
    assert world.store.stats()["pinned_by_clients"] == {"blobs": 2, "bytes": 2 * NBYTES}
    world.call(client.pin, ns, keys[1:], 0.0)
    assert world.store.stats()["pinned_by_clients"] == {"blobs": 1, "bytes": NBYTES}
    world.sim.advance(31.0)
    assert world.store.stats()["pinned_by_clients"] == {"blobs": 0, "bytes": 0}
    world.finish_all()
    world.audit(quiet=True)
