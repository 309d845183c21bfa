"""What the store says about one blob, and that it agrees with who may leave."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blobstore import ssd_room
from blobstore.explanation import KEPT, explained, kept_in_dram, kept_on_ssd, leaving_next
from blobstore.index import Index, Record
from blobstore.settings import TieringSettings
from blobstore.stories import Stories
from blobstore.tiering.lru import LeafLru
from blobstore.units import KIB
from tests.support.clock import FakeClock
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, content, opaque

NBYTES = 64 * KIB


class Plan:
    """Two orders, and an opinion."""

    def __init__(self, *, with_ssd: bool = True) -> None:
        self.dram: LeafLru[Record] = LeafLru()
        self.ssd: LeafLru[Record] | None = LeafLru() if with_ssd else None
        self.asked: tuple[list[Record], int] = ([], 0)

    def explain(
        self, item: Record, now_s: float, chain: Sequence[Record] = (), nbytes: int = 1
    ) -> dict[str, object]:
        if chain:
            self.asked = (list(chain), nbytes)
        age_s, worth = now_s - item.last_used, float(item.key[-1])
        return {"policy": "lru", "age_s": age_s, "worth": worth, "floor": {"ssd": 0.0}}


class Desk:
    """Records and all that is asked about them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.stories = Stories(self.clock)
        self.plan = Plan()
        self.state = Index().declare(opaque(NBYTES))

    def blob(self, number: int) -> Record:
        record = Record(self.state, number.to_bytes(8, "big"), None, NBYTES, 16)
        record.last_used = self.clock()
        return record

    def explain(self, record: Record, *, known: bool = True, **session: object) -> dict[str, Any]:
        return explained(
            self.state.id, record.key, record if known else None, self.clock(),
            self.stories, self.plan, leaving_next(self.plan.dram, self.plan.ssd), session,
            {"waits": True},
        )  # fmt: skip


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_facts_story_opinion_and_who_is_next_are_joined(desk: Desk) -> None:
    blob, colder = desk.blob(1), desk.blob(2)
    blob.ssd = True
    desk.stories.note(blob, "dram>ssd", "worth")
    desk.plan.dram.offer(colder, 1.0, NBYTES)
    desk.clock.advance(7.0)
    told = desk.explain(blob, turn=3)
    assert told["known"]
    assert told["tiers"] == ["ssd"]
    assert told["story"] == [{"ago_s": 7.0, "what": "dram>ssd", "why": "worth"}]
    assert (told["decision"]["policy"], told["decision"]["age_s"]) == ("lru", 7.0)
    assert told["next"] == {"dram": [colder.key.hex()], "ssd": []}
    assert told["session"] == {"turn": 3}
    assert told["standing"] == {"waits": True}


def test_what_would_be_written_along_is_asked_about_too(desk: Desk) -> None:
    blobs = [desk.blob(number) for number in range(4)]
    for above, below in itertools.pairwise(blobs):
        below.parent = above
    blobs[0].ssd = True
    blobs[3].packed = b"in DRAM"
    desk.explain(blobs[3])
    assert desk.plan.asked == (blobs[1:], 3 * NBYTES)


def test_asking_changes_nothing_in_the_order(desk: Desk) -> None:
    blobs = [desk.blob(number) for number in range(6)]
    for blob in blobs:
        desk.plan.dram.offer(blob, 1.0, NBYTES)
    before = list(desk.plan.dram.victims())
    assert desk.explain(blobs[0])["next"]["dram"] == [blob.key.hex() for blob in blobs[:3]]
    assert list(desk.plan.dram.victims()) == before


def test_what_may_not_leave_is_not_next_and_sets_no_floor(desk: Desk) -> None:
    blobs = [desk.blob(number) for number in range(3)]
    for blob in blobs:
        blob.ssd = True
        assert desk.plan.ssd is not None
        desk.plan.ssd.offer(blob, 1.0, NBYTES)
    blobs[0].pins = 1
    told = desk.explain(blobs[2])
    assert told["next"]["ssd"] == [blob.key.hex() for blob in blobs[1:]]
    assert told["decision"]["floor"] == {"dram": None, "ssd": 1.0}


def test_a_pin_of_a_client_is_told_apart(desk: Desk) -> None:
    blob = desk.blob(1)
    blob.ssd, blob.pins = True, 1
    assert kept_on_ssd(blob, pinned=True) == ["client_pin"]
    blob.pins = 2
    assert kept_on_ssd(blob, pinned=True) == ["client_pin", "pinned"]
    assert kept_on_ssd(blob) == ["pinned"]


def test_of_what_is_gone_its_story_is_left(desk: Desk) -> None:
    blob = desk.blob(1)
    assert desk.explain(blob, known=False) == {}
    desk.stories.note(blob, "dram>none", "refused")
    told = desk.explain(blob, known=False)
    assert (told["known"], told["key"], len(told["story"])) == (False, blob.key.hex(), 1)


def test_a_hole_has_no_decision(desk: Desk) -> None:
    hole = desk.blob(1)
    hole.hole = True
    assert desk.explain(hole)["decision"] == {}


def test_without_ssd_nobody_is_next_there(desk: Desk) -> None:
    desk.plan = Plan(with_ssd=False)
    assert desk.explain(desk.blob(1))["next"] == {"dram": []}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path) as made:
        yield made


def agree(world: SimStore) -> None:
    """A blob may leave a tier if, and only if, nothing is said to keep it there."""
    writeback = world.store._writeback
    assert writeback is not None
    may_leave_dram = set(world.store.residency._policy.victims())
    may_leave_ssd = set(filter(ssd_room._may_leave, writeback._room._policy.victims()))
    for record in world.store.index.records():
        kept_dram = kept_in_dram(record, waits=writeback.mover.waits(record))
        kept_ssd = kept_on_ssd(record)
        assert {*kept_dram, *kept_ssd} <= KEPT.keys()
        if record.packed:
            assert (record in may_leave_dram) == (not kept_dram), (record.depth, kept_dram)
        if record.ssd is not False:
            assert (record in may_leave_ssd) == (not kept_ssd), (record.depth, kept_ssd)


def test_what_is_said_to_keep_a_blob_is_what_keeps_it(world: SimStore) -> None:
    ns, client, keys = world.declare(opaque(NBYTES)), world.client(), chain(3)
    writing = world.sim.start(
        client.put(ns, keys, [content(n, NBYTES) for n in range(3)], timeout_s=5.0)
    )
    agree(world)
    world.finish_all()
    assert writing.done()
    agree(world)
    reading = world.run(client.get(ns, keys))
    agree(world)
    reading.release()
    agree(world)
    world.call(client.pin, ns, keys[2:], 7200.0)
    world.sim.advance(300.0)
    (told,) = world.call(world.store.explain, ns.id, keys[2], len(keys[2]))
    assert told["client_pin_s"] == pytest.approx(6900, abs=1)
    assert told["kept"]["dram"] == ["client_pin"]
    agree(world)
    world.call(client.pin, ns, keys[2:], 0.0)
    world.call(client.drop, ns, keys[1:], "dram")
    agree(world)
    for name, retention in (("kept", "durable"), ("here", "volatile")):
        world.run(client.put(ns, chain(1, name), [content(9, NBYTES)], retention=retention))
        world.finish_all()
        agree(world)


def test_a_blob_that_is_undecided_may_go_though_others_need_it(tmp_path: Path) -> None:
    """It goes to SSD then, and stays known."""
    tiering = TieringSettings(ssd_writes_per_day=1)
    with SimStore(tmp_path, tiering=tiering) as world:
        ns, client, keys = world.declare(opaque(NBYTES)), world.client(), chain(2)
        for first in (chain(1, "spends the budget"), keys[:1]):
            world.run(client.put(ns, first, [content(0, NBYTES)]))
            world.finish_all()
        (told,) = world.call(world.store.explain, ns.id, keys[0], len(keys[0]))
        assert told["tiers"] == ["dram"]
        assert told["standing"]["waits"]
        agree(world)
        writing = world.run(client.reserve(ns, keys[1:], parent_key=keys[0]))
        agree(world)
        record = world.store.state(ns.id).blobs[keys[0]]
        assert kept_in_dram(record, waits=True) == []
        assert kept_in_dram(record, waits=False) == ["only_copy"]
        writing.abort()


def test_the_store_tells_a_blob_s_whole_story(world: SimStore) -> None:
    ns, client, (key,) = world.declare(opaque(NBYTES)), world.client(), chain(1)

    def story() -> list[tuple[str, str]]:
        (told,) = world.call(world.store.explain, ns.id, key, len(key))
        return [(event["what"], event["why"]) for event in told["story"]]

    world.put_cold(client, ns, [key], [content(1, NBYTES)])
    written = [("put", ""), ("dram>ssd", "room"), ("dram>none", "asked")]
    assert story() == written
    world.run(client.get(ns, [key])).release()
    assert story() == [*written, ("ssd>dram", "get")]
    world.call(client.drop, ns, [key])
    (told,) = world.call(world.store.explain, ns.id, key, len(key))
    assert not told["known"]
    assert {event["what"] for event in told["story"][-2:]} == {"dram>none", "ssd>none"}
