"""Whole contexts in a store: what replaces what, and what comes back before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.hint import Hint
from blobstore.namespace import Namespace
from blobstore.settings import TieringSettings
from blobstore.units import KIB, MIB
from tests.support.asked_store import N_FIT, AskedStore
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, content, opaque

NBYTES = 100 * KIB
DRAM_BYTES = 10 * NBYTES + 100 * KIB
GRACE_S = 60.0


class World(SimStore):
    """A store in which contexts are put by name; bytes follow from names."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        tiering = TieringSettings("lru", supersede_grace_s=GRACE_S)
        super().__init__(directory, tiering=tiering, **settings)
        self.ns: Namespace = self.declare(opaque(NBYTES))
        self.c = self.client()

    def __enter__(self) -> World:
        return self

    def put(self, keys: list[bytes], after: bytes = b"", **terms: Any) -> None:
        """Put blobs, one call each, a second apart."""
        for key in keys:
            self.sim.advance(1.0)
            answers = self.run(
                self.c.put(self.ns, [key], [payload(key)], parent_key=after, timeout_s=5.0, **terms)
            )
            assert answers == [("stored", "")]
            after = key

    def supersede(self, old: bytes, new: bytes) -> int:
        state = self.store.state(self.ns.id)
        return self.run(self.store.contexts.supersede(state, old, new))

    def prefetch(self, session: str) -> int:
        return self.run(self.store.contexts.prefetch(session))

    def tiers(self, keys: list[bytes]) -> list[str]:
        return ["+".join(facts.get("tiers", [])) for facts in self.c.stat(self.ns, keys)]

    def read(self, keys: list[bytes], **terms: Any) -> int:
        found = self.run(self.c.read(self.ns, keys, **terms))
        assert found == [payload(key) for key in keys[: len(found)]]
        return len(found)

    def reasons(self, crossing: str) -> dict[str, int]:
        counted: dict[str, dict[str, int]] = self.store.stats()["counters"]["moved_blobs"]
        return counted.get(crossing, {})


def payload(key: bytes) -> bytes:
    return content(int.from_bytes(key[:6], "little"), NBYTES)


HEAD, OLD, NEW = chain(2, "head"), chain(4, "old"), chain(3, "new")


def put_both(world: World) -> None:
    """A context that was compacted: the old branch and the new one share a head."""
    world.put(HEAD)
    world.put(OLD, HEAD[-1])
    world.put(NEW, HEAD[-1])


@pytest.fixture
def small(tmp_path: Path) -> Iterator[World]:
    """Ten blobs fit into DRAM, and there is no SSD."""
    with World(tmp_path, dram_bytes=DRAM_BYTES, staging_bytes=64 * KIB, ssd_bytes=0) as made:
        yield made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Ten blobs fit into DRAM, and all on SSD."""
    with World(tmp_path, dram_bytes=DRAM_BYTES, staging_bytes=64 * KIB, ssd_bytes=8 * MIB) as made:
        yield made


class TestDram:
    def test_the_old_branch_goes_first_and_no_living_context_loses_a_blob(
        self, small: World
    ) -> None:
        other = chain(1, "other")
        small.put(other)  # colder than all else
        put_both(small)
        small.read(HEAD + OLD)  # the old branch was used last
        assert small.supersede(OLD[-1], NEW[-1]) == 4
        small.sim.advance(GRACE_S)
        small.put(chain(4, "more"))
        assert small.tiers(OLD) == [""] * 4
        assert small.tiers(other + HEAD + NEW) == ["dram"] * 6
        assert small.reasons("dram>none") == {"superseded": 4}
        assert small.store.stats()["superseded"] == {"blobs": 0, "branches": 0}

    def test_within_the_grace_period_the_coldest_goes(self, small: World) -> None:
        other = chain(1, "other")
        small.put(other)
        put_both(small)
        small.read(HEAD + OLD)
        small.supersede(OLD[-1], NEW[-1])
        small.sim.advance(GRACE_S - 5)
        small.put(chain(1, "more"))
        assert small.tiers(OLD) == ["dram"] * 4
        assert small.tiers(other) == [""]

    def test_a_use_takes_it_back_at_once(self, small: World) -> None:
        put_both(small)
        small.supersede(OLD[-1], NEW[-1])
        small.sim.advance(GRACE_S)
        assert small.read(HEAD + OLD) == 6
        assert small.store.stats()["superseded"]["blobs"] == 0
        small.put(chain(3, "more"))
        assert small.tiers(HEAD + OLD) == ["dram"] * 6

    def test_a_lease_from_before_is_no_use(self, small: World) -> None:
        put_both(small)
        lease = small.run(small.c.get(small.ns, HEAD + OLD))
        small.supersede(OLD[-1], NEW[-1])
        small.sim.advance(GRACE_S)
        small.put(chain(2, "more"))
        assert small.tiers(OLD) == ["dram"] * 4  # somebody reads it
        small.call(lease.release)
        small.put(chain(4, "others"))
        assert small.tiers(OLD) == [""] * 4

    def test_what_is_put_on_top_keeps_what_it_continues(self, small: World) -> None:
        put_both(small)
        small.supersede(OLD[-1], NEW[-1])
        small.sim.advance(GRACE_S)
        small.put(chain(1, "branch"), OLD[1])
        assert small.store.stats()["superseded"]["blobs"] == 2

    def test_explain_tells_of_it(self, small: World) -> None:
        put_both(small)
        small.supersede(OLD[-1], NEW[-1])
        told = small.call(small.store.explain, small.ns.id, OLD[-1] + NEW[-1], 32)
        assert told[0]["standing"] == {"first_in_s": GRACE_S}
        assert told[1]["standing"] == {}
        small.sim.advance(GRACE_S)
        told = small.call(small.store.explain, small.ns.id, OLD[-1], 32)
        assert told[0]["standing"] == {"first_in_s": 0.0}
        assert told[0]["next"]["dram"][0] == OLD[-1].hex()


class TestSsd:
    def test_the_old_branch_leaves_dram_and_ssd_before_others(self, tmp_path: Path) -> None:
        with World(tmp_path, dram_bytes=2 * MIB, ssd_bytes=4 * MIB) as world:
            put_both(world)
            world.finish_all()
            world.read(HEAD + OLD)
            world.supersede(OLD[-1], NEW[-1])
            world.sim.advance(GRACE_S)
            n = 0
            while any(world.tiers(OLD)):
                world.put(chain(1, f"more {n}"))
                world.finish_all()
                n += 1
                assert n < 60
            assert world.reasons("ssd>none") == {"superseded": 4}
            assert "" not in world.tiers(HEAD + NEW)
            assert all(any(world.tiers(chain(1, f"more {at}"))) for at in range(n))

    def shed(self, world: World, n: int) -> None:
        """Make room for so many blobs on SSD."""
        assert world.store._writeback is not None
        assert world.call(world.store._writeback._room.shed, n * NBYTES)
        world.finish_all()

    def test_all_of_the_branch_goes_before_others_wherever_its_copies_are(
        self, world: World
    ) -> None:
        put_both(world)
        world.finish_all()
        world.supersede(OLD[-1], NEW[-1])
        world.sim.advance(GRACE_S)
        self.shed(world, 3)
        assert world.tiers(OLD) == ["dram+ssd", "", "", ""]
        assert world.tiers(HEAD + NEW) == ["dram+ssd"] * 5
        world.audit(quiet=True)

    def test_what_somebody_reads_of_it_stays(self, world: World) -> None:
        put_both(world)
        world.finish_all()
        lease = world.run(world.c.get(world.ns, HEAD + OLD[:2]))
        world.supersede(OLD[-1], NEW[-1])
        world.sim.advance(GRACE_S)
        self.shed(world, 3)
        assert world.tiers(OLD) == ["dram+ssd", "dram+ssd", "", ""]
        assert world.tiers(NEW)[-1] == "dram"  # the next in order, whose DRAM has room
        world.call(lease.release)
        assert world.read(HEAD + OLD) == 4

    def test_its_room_counts_as_free_for_what_comes(self, world: World) -> None:
        """So that nothing is refused for want of room that the old branch only holds."""
        put_both(world)
        world.finish_all()
        writeback = world.store._writeback
        assert writeback is not None
        before = writeback._free_bytes()
        world.supersede(OLD[-1], NEW[-1])
        assert writeback._free_bytes() == before
        world.sim.advance(GRACE_S)
        assert writeback._free_bytes() == before + 4 * NBYTES
        self.shed(world, 4)
        world.finish_all()
        assert world.store.superseded.ssd_bytes == 0
        assert writeback._free_bytes() >= before + 4 * NBYTES

    def test_marks_survive_a_restart(self, world: World) -> None:
        put_both(world)
        world.finish_all()
        assert world.supersede(OLD[-1], NEW[-1]) == 4
        world.reopen()
        assert world.store.stats()["superseded"] == {"blobs": 4, "branches": 1}
        world.sim.advance(GRACE_S)
        told = world.call(world.store.explain, world.ns.id, OLD[0], 32)
        assert told[0]["standing"]["first_in_s"] == 0.0
        world.c = world.client()
        assert world.read(HEAD + OLD) == 6
        world.reopen()
        assert world.store.stats()["superseded"] == {"blobs": 0, "branches": 0}


class TestMover:
    """Blobs that wait in DRAM until it is decided whether they are written to SSD."""

    @pytest.fixture
    def asked(self, tmp_path: Path) -> Iterator[AskedStore]:
        with AskedStore(tmp_path, supersede_grace_s=GRACE_S) as made:
            made.put("old", 4)
            made.put("new", 2)
            state = made.store.state(made.ns.id)
            leaves = chain(4, "old")[-1], chain(2, "new")[-1]
            assert made.run(made.store.contexts.supersede(state, *leaves)) == 4
            yield made
            made.finish_all()
            made.audit(quiet=True)

    def test_a_replaced_context_is_not_written_to_make_room(self, asked: AskedStore) -> None:
        asked.sim.advance(GRACE_S)
        asked.fill(N_FIT + 2)
        asked.settle()
        assert asked.tiers("old", 4) == [[]] * 4
        assert asked.counter("refused_blobs")["ssd"] == {"superseded": 4}
        assert asked.counter("moved_blobs")["dram>none"]["superseded"] == 4
        assert all("ssd" in tiers or "dram" in tiers for tiers in asked.tiers("new", 2))

    def test_within_the_grace_period_it_is_written_like_others(self, asked: AskedStore) -> None:
        asked.fill(N_FIT)
        asked.settle()
        assert all("ssd" in tiers for tiers in asked.tiers("old", 4))

    def test_nor_is_it_written_when_the_store_closes(self, asked: AskedStore) -> None:
        asked.sim.advance(GRACE_S)
        asked.reopen()
        asked.c = asked.client()
        assert asked.tiers("old", 4) == [[]] * 4
        assert asked.tiers("new", 2) == [["ssd"]] * 2

    def test_a_use_makes_it_worth_a_write_again(self, asked: AskedStore) -> None:
        asked.sim.advance(GRACE_S)
        assert asked.read("old", 4)
        asked.reopen()
        asked.c = asked.client()
        assert asked.tiers("old", 4) == [["ssd"]] * 4


class TestSessions:
    """Of a session whose context is the old branch, unless it is said."""

    @pytest.fixture
    def world(self, world: World) -> World:
        put_both(world)
        world.read(HEAD + OLD, hint=Hint("s"))
        world.sim.advance(1.0)
        world.finish_all()
        return world

    def cold(self, world: World, keys: list[bytes]) -> None:
        """On SSD alone."""
        world.finish_all()
        world.call(world.c.drop, world.ns, keys, "dram")
        assert world.tiers(keys) == ["ssd"] * len(keys)

    def test_its_context_comes_back_before_its_turn(self, world: World) -> None:
        self.cold(world, OLD)
        assert world.prefetch("s") == 4
        world.finish_all()
        assert world.tiers(HEAD + OLD) == ["dram+ssd"] * 6
        assert world.prefetch("s") == 0
        assert world.prefetch("unknown") == 0

    def test_after_a_restart_too(self, world: World) -> None:
        world.reopen()
        world.c = world.client()
        assert world.tiers(HEAD + OLD) == ["ssd"] * 6
        assert world.prefetch("s") == 6
        world.finish_all()
        assert world.tiers(HEAD + OLD) == ["dram+ssd"] * 6

    def test_what_is_left_comes_back_where_the_end_has_gone(self, world: World) -> None:
        world.call(world.c.drop, world.ns, OLD[2:])
        self.cold(world, OLD[:2])
        assert world.prefetch("s") == 2
        world.reopen()
        assert world.prefetch("s") == 4

    def test_what_was_saved_of_it_comes_back_where_its_end_was_lost(self, world: World) -> None:
        late = chain(1, "late")
        world.put(late, OLD[-1], hint=Hint("s"))
        world.sim.advance(1.0)
        found = world.store.sessions.find("s")
        assert found is not None
        assert (found.key, found.held) == (late[0], OLD[-1])
        world.store.index.on_discarded = lambda record: None  # as if it had never been written
        world.call(world.c.drop, world.ns, late)
        self.cold(world, OLD)
        assert world.prefetch("s") == 4

    def test_it_is_known_at_once(self, world: World) -> None:
        self.cold(world, OLD)
        world.read(HEAD, hint=Hint("another"))
        world.call(world.c.drop, world.ns, NEW)
        self.cold(world, HEAD)
        assert world.prefetch("another") == 2

    def test_a_compacted_one_goes_on_with_its_new_context(self, world: World) -> None:
        world.supersede(OLD[-1], NEW[-1])
        self.cold(world, OLD)
        self.cold(world, HEAD + NEW)
        assert world.prefetch("s") == 5

    def test_to_ask_for_a_replaced_context_is_to_use_it(self, world: World) -> None:
        world.supersede(OLD[-1], NEW[-1])
        world.call(world.c.prefetch, world.ns, HEAD + OLD)
        assert world.store.stats()["superseded"]["blobs"] == 0
