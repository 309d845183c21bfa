"""Jobs as runners get them, and what becomes of what they continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.index import NamespaceState
from blobstore.rebuild_queue import SILENT_S
from blobstore.rebuild_tasks import Task
from blobstore.rebuild_wait import Wait
from blobstore.rebuilds import JOB_S_UNKNOWN, LATE, Rebuilds
from blobstore.runners import Runner
from blobstore.settings import TieringSettings
from blobstore.text_entry import TextEntry
from blobstore.units import KIB, MIB
from tests.support.blobs import TOKENS, opaque, payload_of
from tests.support.sim_runner import put_told
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient

NBYTES = 8 * KIB
N = 6
LONG_S = 30.0


class World(SimStore):
    """A store with one context of N blobs and a runner, which the test is."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, dram_bytes=8 * MIB, tiering=TieringSettings("lru"))
        self.ns = self.declare(opaque(NBYTES))
        self.ids = list(range(TOKENS * N))
        self.keys = list(self.ns.keys(np.array(self.ids)))
        self.c: StoreClient = self.client()
        put_told(self, self.c, self.ns, self.ns.keys(np.array(self.ids)), self.ids)
        self.entries: list[TextEntry] = []
        for entry in self.run(self.store.texts.chain(self.state, self.keys)):
            assert entry is not None
            self.entries.append(entry)

    def __enter__(self) -> World:
        return self

    @property
    def state(self) -> NamespaceState:
        return self.store.state(self.ns.id)

    @property
    def rebuilds(self) -> Rebuilds:
        return self.store.rebuilds

    def register(self, *, beats: bool = True) -> Runner:
        return self.rebuilds.register("r", [self.ns.id], 4, beats=beats)

    def drop(self, start: int, stop: int = N) -> None:
        self.call(self.c.drop, self.ns, self.keys[start:stop])
        self.finish_all()

    def begin(self, start: int, stop: int = N) -> Wait:
        return self.call(
            self.rebuilds.begin, self.state, self.keys[start:stop], self.entries[start:stop],
            deadline_s=self.sim.clock() + LONG_S,
        )  # fmt: skip

    def next(self, runner: Runner, timeout_s: float = 0.0) -> Task | None:
        return self.run(self.rebuilds.next(runner, timeout_s))

    def task(self, runner: Runner) -> Task:
        task = self.next(runner)
        assert task is not None
        return task

    def make(self, runner: Runner, task: Task, n: int | None = None) -> None:
        """Put the leading blobs of a job."""
        before = task.context_keys[-1] if task.context_keys else b""
        for index, key in enumerate(task.keys[:n]):
            loan = self.run(self.c.reserve(self.ns, [key], parent_key=before, job=task.job_id))
            loan.write(0, payload_of(key, NBYTES))
            assert self.run(loan.seal()) == [("stored", "")]
            self.call(self.rebuilds.progress, runner, task.job_id, index + 1)
            before = key

    def end(self, runner: Runner, task: Task, reason: str = "", seconds: float = 1.0) -> bool:
        return self.call(self.rebuilds.end, runner, task.job_id, len(task.keys), reason, seconds)

    def heirs(self, at: int) -> int:
        """How many keep the blob from vanishing."""
        heirs: int = self.state.blobs[self.keys[at]].heirs
        return heirs


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


def test_a_job_tells_all_that_a_runner_needs(world: World) -> None:
    world.drop(4)
    runner = world.register()
    wait = world.begin(4)
    task = world.task(runner)
    assert (task.keys, task.position, task.wanted) == (world.keys[4:], 4 * TOKENS, 2)
    assert np.frombuffer(task.tokens, "<u4").tolist() == world.ids[4 * TOKENS :]
    assert task.context_keys == world.keys[:4]
    assert np.frombuffer(task.context, "<u4").tolist() == world.ids[: 4 * TOKENS]
    assert (task.deadline_s, task.limit_s) == (LONG_S, JOB_S_UNKNOWN)
    world.make(runner, task)
    assert (wait.ended.result(), wait.n_sealed) == ("", 2)
    assert world.end(runner, task)


def test_what_a_job_continues_is_kept_until_it_ends(world: World) -> None:
    world.drop(4)
    runner = world.register()
    world.begin(4)
    assert world.heirs(3) == 0
    task = world.task(runner)
    assert world.heirs(3) == 1
    world.make(runner, task)
    world.end(runner, task)
    assert world.heirs(3) == 0


@pytest.mark.parametrize("way", ["unregister", "late", "close"])
def test_and_let_go_of_however_it_ends(way: str, world: World) -> None:
    world.drop(4)
    runner = world.register()
    wait = world.begin(4)
    world.task(runner)
    if way == "unregister":
        assert world.call(world.rebuilds.unregister, runner)
        assert not world.call(world.rebuilds.unregister, runner)
    elif way == "late":
        world.sim.advance(SILENT_S + 1.0)
        world.call(world.store.tick)
    else:
        world.call(world.rebuilds.close)
    assert wait.ended.result() == ("late" if way == "late" else "runner_gone")
    assert world.heirs(3) == 0


def test_without_the_text_of_the_context_its_ids_are_not_told(world: World) -> None:
    world.drop(4)
    runner = world.register()
    world.run(world.store.texts.forget(world.state, world.keys[:1]))
    world.begin(4)
    task = world.task(runner)
    assert (task.context_keys, task.context) == (world.keys[:4], b"")


def test_what_is_gone_above_is_made_first(world: World) -> None:
    world.drop(4)
    runner = world.register()
    wait = world.begin(4)
    world.drop(1)
    task = world.task(runner)
    assert (task.keys, task.context_keys) == (world.keys[1:], world.keys[:1])
    world.make(runner, task)
    assert (wait.ended.result(), wait.n_sealed) == ("", 2)


def test_if_its_text_is_known(world: World) -> None:
    world.drop(4)
    runner = world.register()
    wait = world.begin(4)
    world.drop(1)
    world.run(world.store.texts.forget(world.state, [world.keys[2]]))
    assert world.next(runner) is None
    assert wait.ended.result() == "no_text"


def test_what_another_had_made_and_is_gone_is_made_again(world: World) -> None:
    world.drop(2)
    first, second = world.register(), world.register()
    wait = world.begin(2)
    task = world.task(first)
    world.make(first, task, 2)
    world.call(world.rebuilds.end, first, task.job_id, 2, "failed", 1.0)
    world.drop(3)
    again = world.task(second)
    assert again.keys == world.keys[2:]
    for before, key in zip(world.keys[1:], again.keys, strict=False):
        loan = world.run(world.c.reserve(world.ns, [key], parent_key=before, job=again.job_id))
        if key != world.keys[2]:  # which is there still
            loan.write(0, payload_of(key, NBYTES))
        world.run(loan.seal())
    world.end(second, again)
    assert (wait.ended.result(), wait.n_sealed) == ("", 4)


def test_what_is_not_held_was_not_made(world: World) -> None:
    world.drop(3)
    runner = world.register()
    wait = world.begin(3)
    task = world.task(runner)
    assert world.call(world.rebuilds.progress, runner, task.job_id, 3) == 3
    assert (wait.n_sealed, wait.ended.done()) == (0, False)
    world.end(runner, task)
    assert wait.ended.result() == "incomplete"
    assert world.store.rebuilds.stats()["blobs"] == 0


def test_speed_is_learned_from_what_was_made(world: World) -> None:
    world.drop(2)
    runner = world.register()
    assert world.run(world.rebuilds.estimate_s(world.state, 0, TOKENS)) is None
    world.begin(2)
    task = world.task(runner)
    world.make(runner, task)
    world.sim.advance(4.0)
    world.end(runner, task, seconds=2.0)
    estimate_s = world.run(world.rebuilds.estimate_s(world.state, 2 * TOKENS, 4 * TOKENS))
    assert estimate_s == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan")])
def test_times_that_cannot_be_are_not_believed(seconds: float, world: World) -> None:
    world.drop(2)
    runner = world.register()
    world.begin(2)
    task = world.task(runner)
    world.make(runner, task)
    world.sim.advance(4.0)
    world.end(runner, task, seconds=seconds)
    assert world.rebuilds.stats()["seconds"] == pytest.approx(4.0, abs=0.5)


def test_each_runner_is_given_the_time_that_it_needs(world: World) -> None:
    n_tokens = sum(entry.n_tokens for entry in world.entries[3:])
    for name, seconds in (("slow", 100.0), ("fast", 1.0)):  # the last to have ended a job
        world.store.estimates.rebuilt(world.ns.id, name, 3 * TOKENS, n_tokens, seconds)
    world.drop(3)
    slow = world.rebuilds.register("slow", [world.ns.id], 1)
    world.begin(3)
    assert world.task(slow).limit_s == pytest.approx(LATE * 100.0, rel=0.1)


def test_a_runner_waits_for_its_job(world: World) -> None:
    world.drop(4)
    runner = world.register()
    asking = world.sim.start(world.rebuilds.next(runner, LONG_S))
    world.rest()
    assert not asking.done()
    world.begin(4)
    world.rest()
    assert asking.result() is not None


def test_a_runner_that_stops_is_told_that_there_is_nothing(world: World) -> None:
    runner = world.register()
    asking = world.sim.start(world.rebuilds.next(runner, LONG_S))
    world.rest()
    world.call(world.rebuilds.unregister, runner)
    world.rest()
    assert asking.result() is None


def test_whoever_asks_no_longer_takes_no_job(world: World) -> None:
    world.drop(4)
    runner = world.register()
    wait = world.begin(4)
    asking = world.sim.start(world.rebuilds.next(runner, LONG_S))
    asking.cancel()  # while the job is being put together
    world.rest()
    assert world.heirs(3) == 0
    assert world.task(runner).keys == world.keys[4:]
    assert not wait.ended.done()


def test_only_what_a_job_makes_is_expected(world: World) -> None:
    world.drop(4)
    runner = world.register()
    world.begin(4)
    entry = world.rebuilds.entry
    task = world.task(runner)
    assert entry(task.job_id, world.state, world.keys[4]) == world.entries[4]
    assert entry(task.job_id, world.state, world.keys[3]) is None
    assert entry(task.job_id + 1, world.state, world.keys[4]) is None
    world.call(world.rebuilds.unregister, runner)
    assert entry(task.job_id, world.state, world.keys[4]) is None


def test_blobs_of_one_who_does_not_say_so_count_when_they_are_sealed(world: World) -> None:
    world.drop(4)
    runner = world.register(beats=False)
    wait = world.begin(4)
    task = world.task(runner)
    world.sim.advance(SILENT_S + 1.0)
    world.call(world.store.tick)  # it is not expected to be heard of
    loan = world.run(
        world.c.reserve(world.ns, [world.keys[4]], parent_key=world.keys[3], job=task.job_id)
    )
    loan.write(0, payload_of(world.keys[4], NBYTES))
    world.run(loan.seal())
    assert wait.n_sealed == 1


def test_what_was_made_and_dropped_at_once_was_made(world: World) -> None:
    world.drop(4)
    runner = world.register()
    wait = world.begin(4)
    task = world.task(runner)
    before = world.keys[3]
    for key in task.keys:
        loan = world.run(world.c.reserve(world.ns, [key], parent_key=before, job=task.job_id))
        loan.write(0, payload_of(key, NBYTES))
        world.run(loan.seal())
        before = key
    world.drop(4)
    assert world.end(runner, task)
    assert (wait.ended.result(), runner.able) == ("", True)


def test_registrations_are_checked(world: World) -> None:
    for namespaces, concurrency, kind in (
        ([b"unknown" * 4], 1, UnknownNamespace),
        ([], 1, InvalidRequest),
        ([world.ns.id], 0, InvalidRequest),
        ([world.ns.id], 10_000, InvalidRequest),
    ):
        with pytest.raises(kind):
            world.rebuilds.register("r", namespaces, concurrency)
    assert not world.rebuilds.possible(world.state)
    world.register()
    assert world.rebuilds.possible(world.state)
