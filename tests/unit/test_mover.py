from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore import mover as module
from blobstore.index import Record
from blobstore.tiering.admission import Admission, Verdict
from blobstore.tiering.budget import Budget
from blobstore.tiering.policy import Policy, Use
from blobstore.units import KIB, MIB
from tests.support.asked_store import (
    N_FIT,
    NBYTES,
    UNLIKELY,
    WORTH,
    AskedStore,
    hang,
    payloads,
)
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, content, opaque


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AskedStore]:
    with AskedStore(tmp_path) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


class TestAhead:
    def test_a_blob_is_written_at_once_while_ssd_has_room_to_spare(self, world: AskedStore) -> None:
        world.admission.say = lambda record: Verdict(True, "room")
        world.put("a")
        world.rest()
        assert world.tiers("a") == [["dram", "ssd"]]
        assert world.counter("moved_blobs")["dram>ssd"] == {"room": 1}

    def test_else_it_waits_in_dram_and_costs_no_write(self, world: AskedStore) -> None:
        world.fill(10)
        world.settle()
        assert world.written() == 0
        assert "pwritev" not in world.disk.history
        assert world.mover.stats()["waiting_blobs"] == 10
        assert world.mover.stats()["waiting_bytes"] == 10 * NBYTES

    def test_the_coldest_are_written_before_their_room_is_needed(self, world: AskedStore) -> None:
        world.fill(N_FIT)
        world.settle()
        n = world.written()
        assert 0 < n < N_FIT // 2
        stands = [world.tiers(str(number)) for number in range(N_FIT)]
        assert stands == [[["dram", "ssd"]]] * n + [[["dram"]]] * (N_FIT - n)
        low_bytes = world.store.residency.capacity_bytes // 16
        assert low_bytes <= world.mover.stats()["ready_bytes"] <= 4 * low_bytes
        assert world.counter("moved_blobs")["dram>ssd"] == {"worth": n}

    def test_room_made_ahead_is_had_without_waiting(self, world: AskedStore) -> None:
        world.fill(N_FIT)
        for number in range(N_FIT, 3 * N_FIT):
            world.settle()
            assert world.put(str(number), timeout_s=0.0) == [("stored", "")]
        assert world.mover.stats()["puts_waited"] == 0
        assert world.counter("dropped") == 0
        for number in range(3 * N_FIT):
            assert world.read(str(number))

    def test_what_left_for_ssd_is_exclusive_and_what_came_back_is_not(
        self, world: AskedStore
    ) -> None:
        world.fill(N_FIT + 4)
        world.settle()
        assert world.tiers("0") == [["ssd"]]
        assert world.read("0")
        assert world.tiers("0") == [["dram", "ssd"]]
        assert world.counter("moved_blobs")["ssd>dram"] == {"get": 1}
        world.settle()
        world.call(world.c.drop, world.ns, chain(1, "0"), "dram")
        assert world.tiers("0") == [["ssd"]]
        story = world.store.stories.of(world.ns.id, chain(1, "0")[0])
        crossings = [event["what"] for event in story if ">" in event["what"]]
        assert crossings == ["dram>ssd", "dram>none", "ssd>dram", "dram>none"]


class TestRefused:
    def test_what_is_refused_is_lost_when_its_room_is_needed_and_not_before(
        self, tmp_path: Path
    ) -> None:
        with AskedStore(tmp_path, UNLIKELY) as world:
            world.fill(N_FIT)
            world.settle()
            assert all(world.tiers(str(number)) == [["dram"]] for number in range(N_FIT))
            n = world.counter("refused_blobs")["ssd"]["unlikely"]
            assert 0 < n < N_FIT // 2
            world.fill(2 * N_FIT, first=N_FIT)
            world.settle()
            assert world.written() == 0
            assert world.counter("moved_blobs")["dram>none"] == {"refused": 2 * N_FIT}
            assert world.mover.stats()["puts_waited"] == 0
            world.audit(quiet=True)

    def test_a_use_makes_the_mover_think_again(self, world: AskedStore) -> None:
        world.admission.say = lambda record: UNLIKELY
        world.fill(N_FIT)
        world.settle()
        record = world.store.state(world.ns.id).blobs[chain(1, "0")[0]]
        assert world.admission.asked.count(record) == 2  # at its seal, and when it was coldest
        assert not world.mover.waits(record)
        assert world.read("0")
        assert world.mover.waits(record)
        world.admission.say = lambda record: WORTH
        world.fill(N_FIT + 2, first=N_FIT)
        world.settle()
        assert world.tiers("0") == [["ssd"]]

    def test_a_chain_is_asked_about_from_its_end_and_lost_from_there(
        self, world: AskedStore
    ) -> None:
        keys = chain(N_FIT - 2, "c")
        keep = set(keys[:10])
        world.admission.say = lambda record: WORTH if record.key in keep else UNLIKELY
        assert world.put("c", len(keys)) == [("stored", "")] * len(keys)
        world.fill(20)
        world.settle()
        stands = world.tiers("c", len(keys))
        held = [bool(tiers) for tiers in stands]
        assert held == sorted(held, reverse=True)
        assert all("ssd" in tiers for tiers in stands[:10])
        assert not any("ssd" in tiers for tiers in stands[10:])

    def test_a_blob_larger_than_ssd_is_held_in_dram_until_its_room_is_needed(
        self, tmp_path: Path
    ) -> None:
        with SimStore(
            tmp_path, dram_bytes=16 * MIB, ssd_bytes=4 * MIB, lent_bytes_max=16 * MIB
        ) as world:
            huge, client = world.declare(opaque(6 * MIB)), world.client()
            for number in range(3):
                answers = world.run(client.put(huge, chain(1, str(number)), [content(1, 6 * MIB)]))
                assert answers == [("stored", "")]
                world.finish_all()
            assert client.exists(huge, [chain(1, str(number))[0] for number in range(3)]) == [
                False, True, True,
            ]  # fmt: skip
            assert world.store.counters.refused_blobs["ssd"]["too_large"] >= 1
            assert world.store.counters.ssd_evicted == 0

    def test_with_nothing_to_write_with_puts_go_on(self, tmp_path: Path) -> None:
        """A write budget of zero."""
        with AskedStore(tmp_path) as world:
            world.mover._admission = Admission(8 * MIB, Budget.per_day(0))
            world.fill(3 * N_FIT)
            assert world.written() == 0
            assert world.counter("refused_blobs")["ssd"]["budget"] > 0
            assert world.put("durable", retention="durable") == [("stored", "")]
            assert world.tiers("durable") == [["dram", "ssd"]]
            world.finish_all()
            world.audit(quiet=True)


class TestPressure:
    def test_a_put_waits_for_what_is_being_written_and_drops_nothing(
        self, world: AskedStore
    ) -> None:
        """B32 for blobs that nobody had decided about."""
        go_on = hang(world)
        world.fill(N_FIT)
        waiting = world.sim.start(
            world.c.put(world.ns, chain(1, "late"), payloads(1, "late"), timeout_s=5.0)
        )
        world.rest()
        world.sim.advance(1.0)
        assert not waiting.done()
        assert world.mover.coming_bytes > 0
        go_on()
        assert world.sim.finish(waiting) == [("stored", "")]
        assert world.counter("dropped") == 0
        assert world.mover.stats()["puts_waited"] == 1
        assert all(world.read(str(number)) for number in range(N_FIT))

    def test_it_is_told_when_the_disk_does_not_come_round(self, world: AskedStore) -> None:
        go_on = hang(world)
        world.fill(N_FIT)
        assert world.put("late") == [("refused", "full")]
        assert all(world.tiers(str(number)) == [["dram"]] for number in range(N_FIT))
        go_on()

    def test_warm_blobs_stay_while_cold_ones_are_being_written(self, world: AskedStore) -> None:
        world.admission.say = lambda record: Verdict(True, "room")
        world.fill(2)
        world.settle()
        world.admission.say = lambda record: WORTH
        world.fill(N_FIT - 2, first=2)
        assert world.read("0")
        assert world.read("1")  # on SSD as well, and the last used
        go_on = hang(world)
        waiting = world.sim.start(
            world.c.put(world.ns, chain(1, "late"), payloads(1, "late"), timeout_s=5.0)
        )
        world.sim.advance(0.1)
        world.rest()
        assert not waiting.done()
        assert world.tiers("0") == world.tiers("1") == [["dram", "ssd"]]
        go_on()
        assert world.sim.finish(waiting) == [("stored", "")]
        assert world.tiers("0") == world.tiers("1") == [["dram", "ssd"]]

    def test_they_go_when_that_takes_long(self, world: AskedStore) -> None:
        """B29: there is always a victim as long as anything may leave at all."""
        world.admission.say = lambda record: Verdict(True, "room")
        world.fill(2)
        world.settle()
        world.admission.say = lambda record: WORTH
        world.fill(N_FIT - 2, first=2)
        assert world.read("0")
        assert world.read("1")
        go_on = hang(world)
        assert world.put("now", timeout_s=0.0) == [("stored", "")]
        assert world.put("later", timeout_s=5.0) == [("stored", "")]
        assert world.tiers("0") == world.tiers("1") == [["ssd"]]
        go_on()

    def test_all_or_nothing(self, world: AskedStore) -> None:
        """B29: what there is suffices for one and not for two, and then nothing goes."""
        world.admission.say = lambda record: UNLIKELY
        world.fill(N_FIT)
        held = [
            world.run(world.c.get(world.ns, chain(1, str(number)))) for number in range(1, N_FIT)
        ]
        two = world.run(world.c.put(world.ns, chain(2, "two"), payloads(2, "two")))
        assert two == [("refused", "full")] * 2
        assert world.counter("dropped") == 0
        assert world.put("one", timeout_s=0.0) == [("stored", "")]
        for reading in held:
            world.call(reading.release)

    @pytest.mark.parametrize("verdict", [WORTH, UNLIKELY])
    def test_a_burst_of_four_times_the_tier_is_taken_in(
        self, tmp_path: Path, verdict: Verdict
    ) -> None:
        """B30."""
        with AskedStore(tmp_path, verdict) as world:
            tasks = [
                world.sim.start(
                    world.c.put(world.ns, chain(1, str(n)), payloads(1, str(n)), timeout_s=60.0)
                )
                for n in range(4 * N_FIT)
            ]
            answers = [world.sim.finish(task) for task in tasks]
            assert answers == [[("stored", "")]] * len(tasks)
            world.finish_all()
            world.audit(quiet=True)
            assert world.mover.stats()["waiting_blobs"] <= N_FIT

    def test_a_context_longer_than_dram_goes_through(self, world: AskedStore) -> None:
        """What a writer continues is written, though it may not be lost."""
        n = 3 * N_FIT
        keys, data = chain(n, "long"), payloads(n, "long")
        for start in range(0, n, 8):
            terms = {"parent_key": keys[start - 1]} if start else {}
            answers = world.run(
                world.c.put(
                    world.ns, keys[start : start + 8], data[start : start + 8],
                    timeout_s=5.0, **terms,
                )
            )  # fmt: skip
            assert answers == [("stored", "")] * len(keys[start : start + 8])
        assert world.c.match(world.ns, keys) == n
        for start in range(0, n, 8):
            part = keys[start : start + 8]
            assert world.run(world.c.read(world.ns, part)) == data[start : start + 8]

    def test_a_writer_of_it_is_refused_where_ssd_takes_nothing(self, tmp_path: Path) -> None:
        with AskedStore(tmp_path, UNLIKELY) as world:
            keys, data = chain(N_FIT, "long"), payloads(N_FIT, "long")
            assert world.put("long", N_FIT) == [("stored", "")] * N_FIT
            writing = world.run(
                world.c.reserve(world.ns, chain(1, "more"), parent_key=keys[-1], timeout_s=1.0)
            )
            assert writing.reasons == ["full"]
            world.call(writing.abort)
            assert world.run(world.c.read(world.ns, keys)) == data

    def test_free_room_in_pieces_is_joined_by_writing_what_lies_between(
        self, tmp_path: Path
    ) -> None:
        """B31, with blobs that nobody had decided about."""
        with AskedStore(tmp_path) as world:
            small, large, huge = (
                world.declare(opaque(kib * KIB, str(kib))) for kib in (32, 96, 512)
            )
            for number in range(28):
                ns = (small, large)[number % 2]
                payload = content(number, ns.layout.nbytes(16))
                answers = world.run(world.c.put(ns, chain(1, str(number)), [payload]))
                assert answers == [("stored", "")]
            for number in range(0, 28, 2):
                world.call(world.c.drop, small, chain(1, str(number)))
            assert world.store.stats()["tiers"]["dram"]["fragmentation"] > 0
            for number in range(6):
                put = world.c.put(
                    huge, chain(1, str(number)), [content(number, 512 * KIB)], timeout_s=5.0
                )
                assert world.run(put) == [("stored", "")]
                world.audit()
            assert world.counter("dropped") == 0
            for number in range(1, 28, 2):
                found = world.run(world.c.read(large, chain(1, str(number))))
                assert found == [content(number, 96 * KIB)]

    def test_a_client_that_wants_a_blob_out_of_dram_has_it_written(self, world: AskedStore) -> None:
        world.put("a", 2)
        assert world.call(world.c.drop, world.ns, chain(2, "a"), "dram") == 0
        world.rest()
        assert world.tiers("a", 2) == [["dram", "ssd"]] * 2
        assert world.call(world.c.drop, world.ns, chain(2, "a"), "dram") == 2
        assert world.read("a", 2)


class TestBudget:
    def test_writes_keep_to_the_rate(self, tmp_path: Path) -> None:
        with AskedStore(tmp_path, demote_rate=NBYTES) as world:
            started_s = world.sim.clock()
            for number in range(3 * N_FIT):
                assert world.put(str(number), timeout_s=100.0) == [("stored", "")]
            elapsed_s = world.sim.clock() - started_s
            world.finish_all()
            assert world.written() <= elapsed_s + 2
            assert world.written() >= 2 * N_FIT
            assert world.counter("dropped") == 0

    def test_what_is_held_up_is_not_walked_along_at_every_look(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        walked: list[Record] = []
        of = module._Chain.of

        def counted(record: Record, longest: float = float("inf")) -> Any:
            walked.append(record)
            return of(record, longest)

        with AskedStore(tmp_path, demote_rate=1) as world:
            world.put("warm", 2)  # as much as may pass at once, and a debt of a day
            world.put("c", N_FIT - 2)
            world.settle()
            leaf = world.store.state(world.ns.id).blobs[chain(N_FIT - 2, "c")[-1]]
            assert world.mover.waits(leaf)
            monkeypatch.setattr(module._Chain, "of", counted)
            looks = len(world.admission.asked)
            for _ in range(20):
                world.sim.advance(1.0)
                assert not world.mover.may_leave(leaf, urgent=False)
            assert walked.count(leaf) <= 1
            assert len(world.admission.asked) - looks <= 1

    def test_a_load_for_a_get_waits_for_no_budget(self, tmp_path: Path) -> None:
        with AskedStore(tmp_path, demote_rate=1) as world:
            world.put("cold", 4, retention="durable")
            world.call(world.c.drop, world.ns, chain(4, "cold"), "dram")
            world.fill(N_FIT)
            reading = world.run(world.c.reserve(world.ns, chain(2, "pins"), timeout_s=0.0))
            before_s = world.sim.clock()
            assert world.read("cold", 4)
            assert world.sim.clock() - before_s < 1.0
            world.call(reading.abort)

    def test_what_is_loaded_ahead_keeps_to_its_own(self, tmp_path: Path) -> None:
        with AskedStore(tmp_path, promote_rate=2 * NBYTES) as world:
            world.put("cold", 8, retention="durable")
            world.call(world.c.drop, world.ns, chain(8, "cold"), "dram")
            assert world.call(world.c.prefetch, world.ns, chain(8, "cold")) == 2
            assert world.counter("refused_blobs")["dram"] == {"budget": 1}
            world.rest()
            assert world.counter("moved_blobs")["ssd>dram"] == {"prefetch": 2}
            world.sim.advance(1.0)
            assert world.call(world.c.prefetch, world.ns, chain(8, "cold")) == 2
            assert world.read("cold", 8)

    def test_what_is_loaded_ahead_leaves_the_reserve_to_loads(self, world: AskedStore) -> None:
        world.put("cold", 4, retention="durable")
        world.call(world.c.drop, world.ns, chain(4, "cold"), "dram")
        held = world.run(world.c.reserve(world.ns, chain(N_FIT, "lent"), timeout_s=0.0))
        assert world.call(world.c.prefetch, world.ns, chain(4, "cold")) == 0
        assert world.counter("refused_blobs")["dram"] == {"no_room": 1}
        assert world.read("cold", 3)
        world.call(held.abort)

    def test_a_clock_that_jumps_ahead_lets_no_flood_through(self, tmp_path: Path) -> None:
        with AskedStore(tmp_path, demote_rate=NBYTES) as world:
            world.fill(N_FIT)
            world.settle()
            before = world.written()
            world.sim.wall_jump_s = -3e7
            world.sim.clock.advance(1e6)
            world.fill(3, first=N_FIT)
            world.rest()
            assert world.written() - before <= 6


class TestDisk:
    @pytest.mark.parametrize("failing", [("pwritev", "create"), ("before_commit",)])
    def test_a_disk_that_fails_loses_what_had_to_go_and_says_so(
        self, world: AskedStore, failing: tuple[str, ...]
    ) -> None:
        def fail(name: str, path: Path) -> None:
            if name in failing:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        world.disk.before_step = fail
        for number in range(2 * N_FIT):
            assert world.put(str(number)) == [("stored", "")]
            world.rest()
        lost = world.counter("lost_unsaved")
        assert lost > 0
        assert lost == world.counter("moved_blobs")["dram>none"]["unsaved"]
        assert world.counter("ssd_errors") > 0
        world.disk.before_step = lambda name, path: None
        world.sim.advance(10.0)
        world.fill(N_FIT, first=2 * N_FIT)
        world.finish_all()
        assert world.counter("lost_unsaved") <= lost + N_FIT // 2
        assert world.counter("moved_blobs")["dram>ssd"]["worth"] > 0
        world.fill(N_FIT, first=3 * N_FIT)
        assert world.read(str(3 * N_FIT - 1))

    def test_what_could_not_be_written_spends_nothing_of_the_day(self, world: AskedStore) -> None:
        day_bytes = 1000.0 * NBYTES
        budget = world.admission.write_budget = Budget(0.0, day_bytes)

        def fail(name: str, path: Path) -> None:
            if name in ("pwritev", "create"):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        world.disk.before_step = fail
        for number in range(2 * N_FIT):
            world.put(str(number))
            world.rest()
            world.sim.advance(5.0)  # it is tried again now and then
        assert world.counter("ssd_errors") > 1
        assert budget.left_bytes(world.sim.clock()) == day_bytes
        world.disk.before_step = lambda name, path: None
        world.sim.advance(10.0)
        world.fill(N_FIT, first=2 * N_FIT)
        world.finish_all()
        assert world.written() > 0
        left_bytes = budget.left_bytes(world.sim.clock())
        assert left_bytes == day_bytes - world.written() * NBYTES

    def test_a_stop_writes_what_waits(self, world: AskedStore) -> None:
        """B39: a clean stop keeps what is worth it."""
        world.admission.say = lambda record: UNLIKELY if record.key in refused else WORTH
        refused = {chain(1, "3")[0], *chain(4, "c")[2:]}
        world.fill(5)
        world.put("c", 4)
        assert world.written() == 0
        world.reopen()
        world.c = world.client()
        assert [world.read(str(number)) for number in range(5)] == [True, True, True, False, True]
        assert world.c.match(world.ns, chain(4, "c")) == 2

    def test_a_crash_keeps_whole_chains_of_what_was_written(self, tmp_path: Path) -> None:
        for seed in range(10):
            with AskedStore(tmp_path / str(seed)) as world:
                for number in range(12):
                    world.put(str(number), 4)
                    for _ in range(seed):
                        world.sim.step()
                world.crash("torn", seed)
                world.c = world.client()
                for number in range(12):
                    held = world.c.exists(world.ns, chain(4, str(number)))
                    assert held == sorted(held, reverse=True)
                    n = sum(held)
                    assert n == 0 or world.read(str(number), n)


class Spy:
    """A policy that knows what is in its tier, and minds when it is told nonsense."""

    def __init__(self, inner: Policy[Record]) -> None:
        self._inner = inner
        self.inside: set[Record] = set()
        self.offered: set[Record] = set()

    def use(self, use: Use[Record]) -> None:
        self._inner.use(use)

    def enter(self, item: Record, nbytes: int) -> None:
        assert item not in self.inside
        assert nbytes == item.nbytes
        assert item.parent is None or item.parent in self.inside or item.parent.packed == b""
        self.inside.add(item)
        self._inner.enter(item, nbytes)

    def leave(self, item: Record) -> None:
        assert item not in self.offered
        self.inside.discard(item)
        self._inner.leave(item)

    def offer(self, item: Record, last_used: float, nbytes: int) -> None:
        assert item in self.inside
        self.offered.add(item)
        self._inner.offer(item, last_used, nbytes)

    def withdraw(self, item: Record) -> None:
        self.offered.discard(item)
        self._inner.withdraw(item)

    def victims(self) -> Iterator[Record]:
        return self._inner.victims()

    def __len__(self) -> int:
        return len(self._inner)


def spy_on(world: SimStore) -> tuple[Spy, Spy]:
    residency, writeback = world.store.residency, world.store._writeback
    assert writeback is not None
    dram, ssd = Spy(residency._policy), Spy(writeback._room._policy)
    residency._policy = residency._eviction._policy = dram
    writeback._room._policy = ssd
    return dram, ssd


def test_policies_know_what_is_in_their_tiers(world: AskedStore) -> None:
    """Also after loads that fail, drops, quarantine and failed searches for victims."""
    dram, ssd = spy_on(world)

    def check() -> None:
        world.finish_all()
        records = list(world.store.index.records())
        assert dram.inside == {record for record in records if record.packed}
        assert ssd.inside == {record for record in records if record.ssd is not False}

    for number in range(3 * N_FIT):
        world.put(f"{number}", 1 + number % 3)
        world.rest()
    check()
    name = next(str(n) for n in range(3 * N_FIT) if world.tiers(str(n)) == [["ssd"]])
    rotten = world.ssd_extent(world.ns, chain(1, name)[0])
    world.rot(rotten)
    assert not world.read(name)
    check()
    assert world.put("d", 3, retention="durable")
    world.call(world.c.drop, world.ns, chain(3, "d"), "dram")
    left = 2

    def fail(step: str, path: Path) -> None:
        nonlocal left
        if step == "preadv" and left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    world.disk.before_step = fail
    world.run(world.c.read(world.ns, chain(3, "d")))
    check()
    world.call(world.c.drop, world.ns, chain(1, "d"))
    assert world.run(world.c.put(world.ns, chain(N_FIT + 1, "x"), payloads(N_FIT + 1, "x")))
    check()
