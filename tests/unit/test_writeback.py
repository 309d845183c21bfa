from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.namespace import Namespace
from blobstore.settings import TieringSettings
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import Answers, StoreClient, chain, content, opaque

NBYTES = 100 * KIB


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, tiering=TieringSettings("lru")) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def ns(world: SimStore) -> Namespace:
    return world.declare(opaque(NBYTES))


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


def payloads(n: int, first: int = 0) -> list[bytes]:
    return [content(number, NBYTES) for number in range(first, first + n)]


def tiers(client: StoreClient, ns: Namespace, keys: list[bytes]) -> list[list[str]]:
    return [facts.get("tiers", []) for facts in client.stat(ns, keys)]


def counters(world: SimStore) -> dict[str, int]:
    found: dict[str, int] = world.store.stats()["counters"]
    return found


class DiskThatFails:
    """From now on, and until `works`, steps called `names` fail."""

    def __init__(self, world: SimStore, *names: str, code: int = errno.ENOSPC) -> None:
        self.works = False
        self._names = names
        self._code = code
        world.disk.before_step = self

    def __call__(self, name: str, path: Path) -> None:
        if not self.works and name in self._names:
            raise OSError(self._code, os.strerror(self._code))


def put(
    world: SimStore, client: StoreClient, ns: Namespace, keys: list[bytes], **terms: Any
) -> Answers:
    found = payloads(len(keys))
    return world.run(client.put(ns, keys, found, timeout_s=5.0, **terms))


class TestDurable:
    def test_it_is_said_after_the_commit_and_not_before(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        before = world.disk.history.count("after_commit")
        asked = world.sim.start(client.put(ns, chain(1), payloads(1), retention="durable"))
        while not asked.done():
            assert world.disk.history.count("after_commit") == before
            assert world.sim.step()
        assert asked.result() == [("stored", "")]
        assert world.disk.history.count("after_commit") == before + 1
        order = [s for s in world.disk.history if s in ("pwritev", "sync", "before_commit")]
        assert order.index("pwritev") < order.index("sync")
        world.crash("dropped")
        assert world.run(world.client().read(ns, chain(1))) == payloads(1)

    @pytest.mark.parametrize("step", range(40))
    def test_a_crash_at_any_step_loses_nothing_that_was_said(
        self, tmp_path: Path, step: int
    ) -> None:
        with SimStore(tmp_path, seed=step) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            tasks = {}
            for number in range(4):
                writing = client.put(
                    ns, chain(1, str(number)), payloads(1, number), retention="durable"
                )
                tasks[number] = world.sim.start(writing)
            for _ in range(step):
                world.sim.step()
            said = {number for number, task in tasks.items() if task.done()}
            world.crash("torn", seed=step)
            client = world.client()
            for number in range(4):
                found = world.run(client.read(ns, chain(1, str(number))))
                assert found in ([], payloads(1, number))
                assert found or number not in said
            world.audit(quiet=True)

    def test_a_standard_blob_can_be_made_durable(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(2))
        world.finish_all()
        assert put(world, client, ns, chain(2), retention="durable") == [("exists", "")] * 2
        world.crash("dropped")
        client = world.client()
        for number in range(100):  # more than the tier holds
            key = chain(1, f"flood {number}")
            world.run(client.put(ns, key, payloads(1, number), timeout_s=5.0))
            world.finish_all()
        assert counters(world)["ssd_evicted"] > 0
        assert world.run(client.read(ns, chain(2))) == payloads(2)
        assert [facts["retention"] for facts in client.stat(ns, chain(2))] == ["durable"] * 2

    def test_a_blob_made_durable_while_its_row_is_committed_is_durable(
        self, tmp_path: Path
    ) -> None:
        """Whatever the moment: when it is said, the row says so too."""
        for steps in range(12):
            with SimStore(tmp_path / str(steps), seed=steps) as world:
                ns, client = world.declare(opaque(NBYTES)), world.client()
                put(world, client, ns, chain(1))
                for _ in range(steps):
                    world.sim.step()
                answers = put(world, client, ns, chain(1), retention="durable")
                assert answers == [("exists", "")]
                world.crash("dropped")
                facts = world.client().stat(ns, chain(1))[0]
                assert facts["retention"] == "durable"

    def test_it_is_not_said_before_what_it_continues_is_on_the_disk(self, tmp_path: Path) -> None:
        for seed in range(20):
            with SimStore(tmp_path / str(seed), seed=seed) as world:
                ns, client = world.declare(opaque(NBYTES)), world.client()
                keys = chain(3)
                put(world, client, ns, keys[:2])
                answers = world.run(
                    client.put(ns, keys[2:], payloads(1), parent_key=keys[1], retention="durable")
                )
                assert answers == [("stored", "")]
                world.crash("dropped")
                assert world.client().exists(ns, keys) == [True] * 3

    def test_two_at_once_wait_for_the_same_commit(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1))
        world.finish_all()
        first, second = (
            world.sim.start(client.put(ns, chain(1), payloads(1), retention="durable"))
            for _ in range(2)
        )
        assert not first.done()
        assert not second.done()
        assert world.sim.finish(first) == world.sim.finish(second) == [("exists", "")]

    def test_a_commit_that_fails_refuses_it_and_leaves_a_standard_blob(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        disk = DiskThatFails(world, "before_commit", code=errno.EIO)
        answers = put(world, client, ns, chain(2), retention="durable")
        assert answers[0] == ("refused", "storage_failed")
        assert answers[1] in (("refused", "storage_failed"), ("refused", "full"))
        assert world.run(client.read(ns, chain(2))) == payloads(2)
        assert [facts["retention"] for facts in client.stat(ns, chain(2))] == ["standard"] * 2
        assert counters(world)["ssd_errors"] >= 1
        disk.works = True
        world.crash("kept")
        assert world.client().exists(ns, chain(2)) == [False, False]

    def test_it_cannot_continue_a_volatile_one(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        root, leaf = chain(2)
        put(world, client, ns, [root], retention="volatile")
        answers = put(world, client, ns, [leaf], parent_key=root, retention="durable")
        assert answers == [("refused", "invalid_request")]
        assert client.exists(ns, [leaf]) == [True]

    def test_without_a_disk_it_is_refused(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, ssd_bytes=0) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            answers = put(world, client, ns, chain(1), retention="durable")
            assert answers == [("refused", "invalid_request")]
            assert world.run(client.read(ns, chain(1))) == payloads(1)

    def test_a_drop_before_the_commit_is_told(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        asked = world.sim.start(client.put(ns, chain(1), payloads(1), retention="durable"))
        assert not asked.done()
        world.call(client.drop, ns, chain(1))
        assert world.sim.finish(asked)[0][0] == "refused"

    def test_it_is_never_evicted_from_a_full_tier(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        stored = []
        for number in range(100):
            key = chain(1, str(number))
            answers = world.run(
                client.put(ns, key, payloads(1, number), retention="durable", timeout_s=5.0)
            )
            if answers != [("stored", "")]:
                assert answers == [("refused", "full")]
                break
            stored.append(number)
            world.finish_all()
        assert 20 < len(stored) < 100
        for number in stored:
            assert world.run(client.read(ns, chain(1, str(number)))) == payloads(1, number)


class TestVolatile:
    def test_it_never_reaches_the_disk_nor_survives(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(2), retention="volatile")
        world.finish_all()
        assert tiers(client, ns, chain(2)) == [["dram"], ["dram"]]
        assert "pwritev" not in world.disk.history
        world.reopen()
        assert world.client().exists(ns, chain(2)) == [False, False]

    def test_a_standard_put_of_it_saves_it(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1), retention="volatile")
        assert put(world, client, ns, chain(1)) == [("exists", "")]
        world.finish_all()
        assert tiers(client, ns, chain(1)) == [["dram", "ssd"]]

    def test_a_volatile_put_of_a_standard_blob_changes_nothing(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1))
        put(world, client, ns, chain(1), retention="volatile")
        assert client.stat(ns, chain(1))[0]["retention"] == "standard"


class TestSlowDisk:
    def test_five_times_dram_is_acknowledged_and_readable(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """B32: puts wait for the disk, nothing that was acknowledged is lost."""
        stored = []
        for number in range(40):
            key = chain(1, str(number))
            asked = world.sim.start(client.put(ns, key, payloads(1, number), timeout_s=60.0))
            for _ in range(3):  # the disk does a little, now and then
                if not asked.done():
                    world.sim.step()
            assert world.sim.finish(asked) == [("stored", "")]
            stored.append(number)
            assert counters(world)["lost_unsaved"] == 0
        for number in stored:
            assert world.run(client.read(ns, chain(1, str(number)))) == payloads(1, number)
        assert counters(world)["dropped"] == 0

    def test_a_disk_that_does_nothing_makes_puts_wait_and_keeps_what_there_is(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        for number in range(7):
            writing = client.put(ns, chain(1, str(number)), payloads(1, number), timeout_s=0.0)
            asked = world.sim.start(writing)
            while not asked.done():  # only the work of digesting
                world.sim.jobs.run_one("hash")
                world.sim.loop.run_ready()
        waiting = world.sim.start(client.reserve(ns, chain(1), timeout_s=5.0))
        world.sim.advance(4.9)
        assert not waiting.done()
        world.sim.step()
        writing_ = world.sim.finish(waiting)
        assert writing_.reasons == [""]
        world.call(writing_.abort)
        for number in range(7):
            assert world.run(client.read(ns, chain(1, str(number)))) == payloads(1, number)


class TestFullDisk:
    """B37: others filled the file system."""

    def test_dram_goes_on_and_the_disk_comes_back_without_a_restart(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(2, "before"), retention="durable")
        world.disk.capacity_bytes = world.disk.allocated_total()
        for number in range(20):
            key = chain(1, f"full {number}")
            answers = world.run(client.put(ns, key, payloads(1, number), timeout_s=5.0))
            assert answers == [("stored", "")]
            assert world.run(client.read(ns, key)) == payloads(1, number)
            world.finish_all()
            world.sim.advance(1.0)
        assert counters(world)["ssd_errors"] > 0
        assert counters(world)["unsaved"] > 0
        answers = put(world, client, ns, chain(1, "durable"), retention="durable")
        assert answers[0][0] == "refused"
        assert answers[0][1] in ("full", "storage_failed")
        assert world.run(client.read(ns, chain(2, "before"))) == payloads(2)
        world.disk.capacity_bytes = 1 << 40
        world.sim.advance(10.0)
        answers = put(world, client, ns, chain(1, "durable"), retention="durable")
        assert answers[0][0] in ("exists", "stored")
        world.finish_all()
        answers = put(world, client, ns, chain(2, "after"))
        world.finish_all()
        assert tiers(client, ns, chain(2, "after")) == [["dram", "ssd"]] * 2
        world.crash("dropped")
        client = world.client()
        for name, n in (("before", 2), ("durable", 1), ("after", 2)):
            assert world.run(client.read(ns, chain(n, name))) == payloads(n)

    def test_blobs_that_were_not_saved_are_counted_when_they_are_lost(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        DiskThatFails(world, "pwritev", "create", code=errno.EIO)
        for number in range(20):
            world.run(client.put(ns, chain(1, str(number)), payloads(1, number), timeout_s=5.0))
            world.finish_all()
        held = sum(client.exists(ns, [chain(1, str(number))[0]])[0] for number in range(20))
        assert 0 < held < 20
        assert counters(world)["unsaved"] == 20
        assert counters(world)["lost_unsaved"] == 20 - held

    def test_blobs_that_were_not_saved_are_saved_when_the_disk_works_again(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        disk = DiskThatFails(world, "pwritev", "create", code=errno.EIO)
        put(world, client, ns, chain(3))
        world.finish_all()
        assert tiers(client, ns, chain(3)) == [["dram"]] * 3
        disk.works = True
        world.sim.advance(10.0)
        world.finish_all()
        assert tiers(client, ns, chain(3)) == [["dram", "ssd"]] * 3

    def test_a_namespace_that_is_new_while_the_disk_fails_is_served_and_saved_later(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """Rows of a namespace that the catalogue does not know would fail every commit."""
        disk = DiskThatFails(world, "before_commit")
        late = world.declare(opaque(NBYTES, "late"))
        put(world, client, late, chain(1))
        assert world.run(client.read(late, chain(1))) == payloads(1)
        world.rest()
        disk.works = True
        world.sim.advance(10.0)
        assert put(world, client, ns, chain(1), retention="durable") == [("stored", "")]
        assert put(world, client, late, chain(1), retention="durable") == [("exists", "")]
        world.crash("dropped")
        assert world.run(world.client().read(late, chain(1))) == payloads(1)

    def test_a_failing_commit_does_not_stop_the_ones_after_it(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1, "a"), retention="durable")
        disk = DiskThatFails(world, "before_commit", code=errno.EIO)
        world.call(client.drop, ns, chain(1, "a"))
        put(world, client, ns, chain(1, "b"))
        world.sim.rest()
        world.sim.advance(3.0)
        disk.works = True
        world.finish_all()
        put(world, client, ns, chain(1, "c"), retention="durable")
        world.finish_all()
        world.crash("dropped")
        assert world.client().exists(ns, [chain(1, n)[0] for n in "ac"]) == [False, True]


class TestRemovals:
    def test_a_key_put_again_after_a_drop_keeps_its_new_row(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1), retention="durable")
        world.call(client.drop, ns, chain(1))
        other = [content(9, NBYTES)]
        answers = world.run(client.put(ns, chain(1), other, retention="durable"))
        assert answers == [("stored", "")]
        world.crash("dropped")
        assert world.run(world.client().read(ns, chain(1))) == other

    def test_what_is_dropped_before_its_row_was_rewritten_has_none(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        for steps in range(12):
            key = chain(1, str(steps))
            put(world, client, ns, key)
            world.finish_all()
            put(world, client, ns, chain(1, f"other {steps}"))
            for _ in range(steps):  # at some of them a commit is under way
                world.sim.step()
            asked = world.sim.start(client.put(ns, key, payloads(1), retention="durable"))
            world.call(client.drop, ns, key)
            world.sim.finish(asked)
            world.finish_all()
            world.audit(quiet=True)
            assert client.exists(ns, key) == [False]

    def test_what_is_dropped_while_it_is_written_leaves_nothing(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        for steps in range(12):
            put(world, client, ns, chain(3, str(steps)))
            for _ in range(steps):
                world.sim.step()
            world.call(client.drop, ns, chain(1, str(steps)))
            world.finish_all()
            world.audit(quiet=True)
            assert world.store.stats()["tiers"]["ssd"]["live_bytes"] == 0
            assert world.store.stats()["tiers"]["dram"]["used_bytes"] == 0

    def test_extents_are_freed_only_after_the_commit_that_removed_their_rows(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1), retention="durable")
        live = world.store.stats()["tiers"]["ssd"]["live_bytes"]
        world.call(client.drop, ns, chain(1))
        commits = world.disk.history.count("after_commit")
        while world.store.stats()["tiers"]["ssd"]["live_bytes"] == live:
            assert world.sim.step()
        assert world.disk.history.count("after_commit") > commits


class TestEviction:
    def test_a_tier_that_is_steadily_full_takes_what_comes(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        for number in range(200):
            key = chain(1, str(number))
            answers = world.run(client.put(ns, key, payloads(1, number), timeout_s=5.0))
            assert answers == [("stored", "")]
            world.rest()
            world.sim.clock.advance(1.0)
        world.finish_all()
        world.audit(quiet=True)
        stats = world.store.stats()
        assert stats["counters"]["unsaved"] == 0
        assert stats["counters"]["ssd_evicted"] > 100
        held = [n for n in range(200) if client.exists(ns, chain(1, str(n)))[0]]
        assert held == list(range(200 - len(held), 200)), "the latest are those that stay"
        assert len(held) > 40
        read = 0
        for number in reversed(held):  # the last ones, in DRAM alone so far, push others out now
            found = world.run(client.read(ns, chain(1, str(number))))
            assert found in ([], payloads(1, number))
            read += bool(found)
        assert read >= len(held) - 10

    def test_leaves_go_before_what_they_continue(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.put_cold(client, ns, chain(10), payloads(10))
        for number in range(80):
            world.sim.clock.advance(1.0)
            world.run(client.put(ns, chain(1, str(number)), payloads(1), timeout_s=5.0))
            world.finish_all()
        held = client.exists(ns, chain(10))
        assert held == sorted(held, reverse=True)
        assert not held[-1]
        world.audit(quiet=True)

    def test_a_blob_larger_than_the_tier_pushes_nobody_out(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, dram_bytes=16 * MIB, lent_bytes_max=16 * MIB) as world:
            ns, client = world.declare(opaque(NBYTES)), world.client()
            huge = world.declare(opaque(10 * MIB, "huge"))
            put(world, client, ns, chain(5))
            world.finish_all()
            payload = content(1, 10 * MIB)
            assert world.run(client.put(huge, chain(1), [payload])) == [("stored", "")]
            world.finish_all()
            assert counters(world)["ssd_evicted"] == 0
            assert tiers(client, huge, chain(1)) == [["dram"]]

    def test_leased_blobs_stay_on_a_full_tier(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(2))
        world.finish_all()
        reading = world.run(client.get(ns, chain(2)))
        for number in range(100):
            world.run(client.put(ns, chain(1, str(number)), payloads(1), timeout_s=5.0))
            world.finish_all()
        assert tiers(client, ns, chain(2)) == [["dram", "ssd"]] * 2
        reading.release()


class TestClose:
    def test_dirty_blobs_are_flushed(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """B39: a clean stop keeps all that was sealed."""
        put(world, client, ns, chain(5))
        world.reopen()
        client = world.client()
        assert world.run(client.read(ns, chain(5))) == payloads(5)
        assert world.store.stats()["blobs"] == 5

    def test_a_flush_is_bounded_by_its_time(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        DiskThatFails(world, "before_commit", code=errno.EIO)
        put(world, client, ns, chain(2))
        before_s = world.sim.clock()
        world.close(drain_s=3.0)
        assert world.sim.clock() - before_s < 5.0
        world.disk.before_step = lambda name, path: None
        world.open()

    def test_times_of_use_are_known_after_a_restart(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1, "a"))
        world.sim.advance(10.0)
        put(world, client, ns, chain(1, "b"))
        world.finish_all()
        world.sim.advance(10.0)
        world.run(client.read(ns, chain(1, "a")))
        world.sim.advance(10.0)
        world.reopen()
        client = world.client()
        idle = [client.stat(ns, chain(1, name))[0]["idle_s"] for name in "ab"]
        assert idle[0] == pytest.approx(10.0, abs=0.5)
        assert idle[1] == pytest.approx(20.0, abs=0.5)

    def test_times_of_use_reach_the_disk_once_a_minute(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        put(world, client, ns, chain(1))
        world.finish_all()
        world.sim.advance(61.0)
        world.finish_all()
        commits = world.disk.history.count("after_commit")
        for _ in range(20):
            world.run(client.read(ns, chain(1)))
        world.finish_all()
        assert world.disk.history.count("after_commit") == commits
        world.sim.advance(61.0)
        world.finish_all()
        assert world.disk.history.count("after_commit") == commits + 1
