from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.keys import Keys
from blobstore.namespace import Namespace
from blobstore.settings import TieringSettings
from blobstore.units import KIB, MIB
from tests.support.blobs import TOKENS, opaque, payload_of
from tests.support.sim_runner import SimRunner, put_told, sim_runner, tell
from tests.support.sim_store import SimStore
from tests.support.store_client import Reading, StoreClient

NBYTES = 100 * KIB
N = 8
IDS = list(range(TOKENS * N))


class World(SimStore):
    """A store with one context of `n` blobs and their texts."""

    def __init__(self, directory: Path, *, n: int = N, fetch_rate: int = 0) -> None:
        super().__init__(
            directory,
            dram_bytes=8 * MIB,
            ssd_bytes=16 * MIB,
            lent_bytes_max=8 * MIB,
            tiering=TieringSettings("lru", fetch_rate=fetch_rate),
        )
        self.n = n
        self.ns: Namespace = self.declare(opaque(NBYTES))
        self.ids = list(range(TOKENS * n))
        self.keys: Keys = self.ns.keys(np.array(self.ids))
        self.c: StoreClient = self.client()
        put_told(self, self.c, self.ns, self.keys, self.ids)

    def __enter__(self) -> World:
        return self

    def payloads(self) -> list[bytes]:
        return [payload_of(key, NBYTES) for key in self.keys]

    def drop(self, first: int = 0) -> None:
        """Of the context only text is left from blob `first` on."""
        self.call(self.c.drop, self.ns, list(self.keys[first:]))
        self.finish_all()

    def chill(self, first: int = 0) -> None:
        """The context is on SSD alone from blob `first` on."""
        self.finish_all()
        self.call(self.c.drop, self.ns, list(self.keys[first:]), "dram")
        assert [f["tiers"] for f in self.c.stat(self.ns, list(self.keys[first:]))] == [["ssd"]] * (
            self.n - first
        )

    def get(self, timeout_s: float = 60.0, **terms: bool) -> Reading:
        return self.run(self.c.get(self.ns, list(self.keys), timeout_s=timeout_s, **terms))

    def read(self, timeout_s: float = 60.0) -> tuple[int, dict[str, int]]:
        """How much of the context a get gives, and from where; what it gives is right."""
        reading = self.get(timeout_s)
        assert reading.payloads() == self.payloads()[: len(reading)]
        reading.release()
        return len(reading), reading.served

    def took_s(self, timeout_s: float = 600.0) -> float:
        """How long a get of all takes."""
        started_s = self.sim.clock()
        assert self.read(timeout_s)[0] == self.n
        return self.sim.clock() - started_s


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


def other_bytes(key: bytes, nbytes: int) -> bytes:
    """What a runner makes that does not compute to the same bits."""
    return payload_of(key[::-1], nbytes)


class TestMissing:
    def test_what_was_dropped_is_made_again(self, world: World) -> None:
        world.drop()
        with sim_runner(world, world.ns) as runner:
            assert world.read() == (N, {"rebuild": N})
        assert len(runner.jobs) == 1
        assert runner.made == list(world.keys)
        story = world.store.explain(world.ns.id, world.keys[0], 32)[0]["story"]
        assert ("none>dram", "rebuilt") in [(event["what"], event["why"]) for event in story]

    def test_only_what_is_missing_is_made(self, world: World) -> None:
        world.drop(5)
        with sim_runner(world, world.ns) as runner:
            assert world.read() == (N, {"dram": 5, "rebuild": 3})
        assert runner.made == list(world.keys[5:])
        assert runner.jobs[0].position == 5 * TOKENS

    def test_without_a_runner_it_is_a_miss(self, world: World) -> None:
        world.drop(2)
        reading = world.get()
        assert (len(reading), reading.reason) == (2, "absent")
        reading.release()

    def test_after_a_restart_texts_bring_a_context_back(self, world: World) -> None:
        world.drop()
        world.reopen()
        world.c = world.client()
        with sim_runner(world, world.ns):
            assert world.read() == (N, {"rebuild": N})

    def test_a_match_tells_what_could_be_made_and_how_long_it_takes(self, world: World) -> None:
        packed = world.keys.packed
        with sim_runner(world, world.ns, blob_s=0.5):
            assert world.store.text_calls.rebuildable(world.ns.id, packed, 32, N) is None
            world.drop(2)
            further = world.store.text_calls.rebuildable(world.ns.id, packed, 32, 2)
            assert further is not None
            assert world.run(_awaited(further)) == (N - 2, 0.0)
            world.read()
            world.drop(2)
            further = world.store.text_calls.rebuildable(world.ns.id, packed, 32, 2)
            assert further is not None
            n, eta_s = world.run(_awaited(further))
            assert n == N - 2
            assert eta_s == pytest.approx(0.5 * n, rel=0.1)
        assert world.store.text_calls.rebuildable(world.ns.id, packed, 32, 2) is None

    def test_a_text_that_is_not_known_ends_what_comes_back(self, world: World) -> None:
        world.drop()
        state = world.store.state(world.ns.id)
        world.run(world.store.texts.forget(state, [world.keys[6]]))
        with sim_runner(world, world.ns):
            assert world.read() == (6, {"rebuild": 6})

    def test_what_a_writer_puts_meanwhile_is_taken(self, world: World) -> None:
        world.drop()
        with sim_runner(world, world.ns, blob_s=4.0):
            getting = world.sim.start(world.c.get(world.ns, list(world.keys), timeout_s=60.0))
            world.sim.advance(1.0)
            put_told(world, world.client("other"), world.ns, world.keys, world.ids)
            reading = world.sim.finish(getting)
            assert world.sim.clock() < 1040
            assert reading.payloads() == world.payloads()
            reading.release()


class TestTerms:
    def test_fetch_never_rebuilds(self, world: World) -> None:
        tell(world, world.ns, recall="fetch")
        world.drop(4)
        with sim_runner(world, world.ns) as runner:
            assert world.read() == (4, {"dram": 4})
        assert not runner.jobs

    def test_never_gives_what_is_in_dram_and_nothing_else(self, world: World) -> None:
        tell(world, world.ns, recall="never")
        world.chill(3)
        with sim_runner(world, world.ns) as runner:
            reading = world.get()
            assert (len(reading), reading.reason) == (3, "not_loaded")
            reading.release()
        assert not runner.jobs
        assert world.reads() == 0

    def test_rebuild_leaves_the_disk_alone(self, world: World) -> None:
        tell(world, world.ns, recall="rebuild")
        world.chill()
        with sim_runner(world, world.ns):
            assert world.read() == (N, {"rebuild": N})
        assert world.reads() == 0
        tiers = [facts["tiers"] for facts in world.c.stat(world.ns, list(world.keys))]
        assert tiers == [["dram", "ssd"]] * N

    @pytest.mark.parametrize(("blob_s", "origin"), [(0.001, "rebuild"), (1.0, "ssd")])
    def test_fastest_does_what_was_faster_of_late(
        self, tmp_path: Path, blob_s: float, origin: str
    ) -> None:
        with (
            World(tmp_path, fetch_rate=10 * NBYTES) as world,
            sim_runner(world, world.ns, blob_s=blob_s),
        ):
            world.drop()
            world.read()
            tell(world, world.ns, recall="fetch")
            for _ in range(4):
                world.chill()
                world.read()
            tell(world, world.ns, recall="fastest")
            world.chill()
            assert world.read() == (N, {origin: N})

    def test_fastest_loads_what_nobody_ever_rebuilt(self, world: World) -> None:
        world.chill()
        with sim_runner(world, world.ns) as runner:
            assert world.read() == (N, {"ssd": N})
        assert not runner.jobs


class TestFaults:
    def test_a_late_runner_is_not_waited_for_when_the_disk_has_it(self, world: World) -> None:
        tell(world, world.ns, recall="rebuild")
        world.chill()
        with sim_runner(world, world.ns, blob_s=50.0):
            started_s = world.sim.clock()
            assert world.read(10.0) == (N, {"ssd": N})
            assert world.sim.clock() - started_s < 8.0

    def test_a_runner_that_fails_is_not_missed_when_the_disk_has_it(self, world: World) -> None:
        tell(world, world.ns, recall="rebuild", divergence="reject")
        world.chill()
        with sim_runner(world, world.ns, payload=other_bytes) as runner:
            assert world.read() == (N, {"ssd": N})
        assert runner.results == [("refused", "divergent")]

    @pytest.mark.parametrize("at", [0, 3, N - 1])
    def test_what_the_disk_lost_is_made_again(self, world: World, at: int) -> None:
        world.chill()
        world.rot(world.ssd_extent(world.ns, world.keys[at]))
        with sim_runner(world, world.ns) as runner:
            assert world.read() == (N, {"ssd": N - 1, "rebuild": 1})
        assert runner.made == [world.keys[at]]
        world.finish_all()
        assert world.run(world.store.verify(60.0))["corrupt"] == []
        world.chill()
        assert world.read() == (N, {"ssd": N})

    def test_a_caller_with_no_time_gets_his_miss_in_time_and_the_result_is_kept(
        self, world: World
    ) -> None:
        world.drop()
        with sim_runner(world, world.ns, blob_s=1.0):
            started_s = world.sim.clock()
            reading = world.get(timeout_s=2.5)
            assert world.sim.clock() - started_s < 2.6
            assert reading.reason == "deadline"
            assert len(reading) == 2
            reading.release()
            world.sim.advance(0.1)
            for _ in range(10):
                world.rest()
                world.sim.advance(1.0)
            world.rest()
            assert world.read(0.5) == (N, {"dram": N})

    def test_32_readers_have_it_made_once_and_the_first_may_go(self, world: World) -> None:
        world.drop()
        with sim_runner(world, world.ns, blob_s=1.0) as runner:
            clients = [world.client(f"c{n}") for n in range(32)]
            gets = [
                world.sim.start(client.get(world.ns, list(world.keys), timeout_s=60.0))
                for client in clients
            ]
            world.rest()
            gets[0].cancel()
            world.rest()
            for client, get in zip(clients[1:], gets[1:], strict=True):
                reading = world.sim.finish(get)
                assert reading.payloads() == world.payloads()
                reading.release()
                client.exit()
            assert len(runner.jobs) == 1
            assert runner.made == list(world.keys)

    def test_what_nobody_wants_any_longer_is_not_made(self, world: World) -> None:
        world.drop()
        with sim_runner(world, world.ns, blob_s=1.0) as runner:
            get = world.sim.start(world.c.get(world.ns, list(world.keys), timeout_s=60.0))
            world.rest()
            world.sim.advance(1.5)
            world.rest()
            get.cancel()
            world.rest()
            world.sim.advance(20.0)
            world.rest()
            assert len(runner.made) <= 2

    def test_blobs_that_came_are_held_until_the_lease(self, world: World) -> None:
        """Somebody wants the room while the rest of a context is made."""
        world.drop()
        with sim_runner(world, world.ns, blob_s=1.0) as runner:
            get = world.sim.start(world.c.get(world.ns, list(world.keys), timeout_s=60.0))
            world.rest()
            for _ in range(5):
                world.sim.advance(1.0)
                world.rest()
            assert len(runner.made) > 2
            assert world.call(world.c.drop, world.ns, runner.made, "dram") == 0
            reading = world.sim.finish(get)
            assert reading.payloads() == world.payloads()
            assert reading.served == {"rebuild": N}
            reading.release()
        assert world.reads() == 0


class TestDivergence:
    def diverge(self, world: World) -> SimRunner:
        with sim_runner(world, world.ns, payload=other_bytes) as runner:
            reading = world.get()
            self.given = reading.payloads()
            reading.release()
        return runner

    @pytest.mark.parametrize("where", ["text", "ssd"])
    @pytest.mark.parametrize("terms", ["accept", "report"])
    def test_other_bytes_are_taken_everywhere(self, world: World, terms: str, where: str) -> None:
        tell(world, world.ns, recall="rebuild", divergence=terms)
        if where == "text":
            world.drop()
        else:
            world.chill()
        self.diverge(world)
        new = [other_bytes(key, NBYTES) for key in world.keys]
        assert self.given == new
        world.finish_all()
        counters = world.store.stats()["counters"]
        assert counters["diverged_blobs"] == {terms: N}
        reports = world.store.stats()["rebuild"]["divergences"]
        assert len(reports) == (N if terms == "report" else 0)
        if reports:
            assert reports[0]["key"] == world.keys[0].hex()
            assert reports[0]["was"] != reports[0]["is"]
        world.chill()
        assert world.run(world.c.read(world.ns, list(world.keys))) == new  # of the disk
        world.audit()
        world.reopen()
        world.c = world.client()
        assert world.run(world.c.read(world.ns, list(world.keys))) == new

    def test_the_text_knows_the_bytes_that_were_taken(self, world: World) -> None:
        tell(world, world.ns, recall="rebuild", divergence="accept")
        world.drop()
        self.diverge(world)
        world.drop()
        tell(world, world.ns, divergence="reject")
        self.diverge(world)
        assert self.given == [other_bytes(key, NBYTES) for key in world.keys]

    def test_a_strict_service_gets_the_same_bytes_or_none(self, world: World) -> None:
        tell(world, world.ns, divergence="reject")
        world.drop()
        with sim_runner(world, world.ns, payload=other_bytes):
            reading = world.get()
            assert (len(reading), reading.reason) == (0, "divergent")
        assert world.store.stats()["counters"]["diverged_blobs"] == {"reject": 1}

    def test_a_put_is_never_refused_for_it(self, world: World) -> None:
        tell(world, world.ns, divergence="reject")
        world.drop()
        payloads = [other_bytes(key, NBYTES) for key in world.keys]
        answers = world.run(world.c.put(world.ns, list(world.keys), payloads, timeout_s=5.0))
        assert answers == [("stored", "")] * N


class TestBothEnds:
    N = 24

    @pytest.fixture(autouse=True)
    def steady(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The disk gives a blob at a time, also after a rest."""
        monkeypatch.setattr("blobstore.loader.PACE_BURST_BYTES", NBYTES)

    def times(self, directory: Path, blob_s: float, load_s: float) -> dict[str, float]:
        """How long a get takes each way; both sides are known from before."""
        took_s = {}
        with (
            World(directory, n=self.N, fetch_rate=int(NBYTES / load_s)) as world,
            sim_runner(world, world.ns, blob_s=blob_s),
        ):
            for way in ("rebuild", "fetch", "both"):
                tell(world, world.ns, recall=way)
                world.chill()
                world.sim.advance(100.0)
                took_s[way] = world.took_s()
                world.rest()
        return took_s

    def test_at_equal_speeds_it_takes_little_more_than_half(self, tmp_path: Path) -> None:
        took_s = self.times(tmp_path, 1.0, 1.0)
        assert min(took_s["rebuild"], took_s["fetch"]) / took_s["both"] >= 1.6

    @pytest.mark.parametrize(("blob_s", "load_s"), [(3.0, 1.0), (1.0, 3.0), (9.0, 1.0), (1.0, 9.0)])
    def test_a_slow_side_never_holds_up_the_fast_one(
        self, tmp_path: Path, blob_s: float, load_s: float
    ) -> None:
        took_s = self.times(tmp_path, blob_s, load_s)
        assert took_s["both"] <= 1.1 * min(took_s["rebuild"], took_s["fetch"])

    def test_it_works_when_nothing_is_known_of_the_runner(self, tmp_path: Path) -> None:
        with World(tmp_path, n=self.N, fetch_rate=NBYTES) as world:
            tell(world, world.ns, recall="both")
            world.chill()
            with sim_runner(world, world.ns, blob_s=1.0):
                n, served = world.read()
            assert n == self.N
            assert min(served["rebuild"], served["ssd"]) >= self.N // 4

    @pytest.mark.parametrize("at", [0, 12, 20, 23])
    def test_what_the_disk_lost_is_made_again(self, tmp_path: Path, at: int) -> None:
        with World(tmp_path, n=self.N, fetch_rate=NBYTES) as world:
            tell(world, world.ns, recall="both")
            world.chill()
            world.rot(world.ssd_extent(world.ns, world.keys[at]))
            with sim_runner(world, world.ns, blob_s=1.0):
                assert world.took_s() < 24.0
            world.run(world.store.verify(60.0))  # of the first nobody may have asked the disk
            world.finish_all()
            assert world.run(world.store.verify(60.0))["corrupt"] == []

    def test_a_runner_that_stands_still_leaves_all_to_the_disk(self, tmp_path: Path) -> None:
        with World(tmp_path, n=self.N, fetch_rate=10 * NBYTES) as world:
            tell(world, world.ns, recall="both")
            world.chill()
            with sim_runner(world, world.ns, blob_s=500.0):
                assert world.took_s() < 10.0


async def _awaited(found: object) -> tuple[int, float]:
    answer: tuple[int, float] = await found  # type: ignore[misc]
    return answer


def test_cancelling_a_get_lets_go_of_everything(world: World) -> None:
    world.drop(4)
    with sim_runner(world, world.ns, blob_s=1.0):
        get = world.sim.start(world.c.get(world.ns, list(world.keys), timeout_s=60.0))
        world.rest()
        get.cancel()
        world.rest()
        with pytest.raises(asyncio.CancelledError):
            get.result()
        assert world.store.residency.pinned_bytes == 0


def test_what_a_runner_only_says_it_made_is_loaded_and_not_learned_from(world: World) -> None:
    world.chill()
    tell(world, world.ns, recall="rebuild")
    rebuilds = world.store.rebuilds
    runner = rebuilds.register("liar", [world.ns.id], 1)
    getting = world.sim.start(world.c.get(world.ns, list(world.keys), timeout_s=60.0))
    task = world.run(rebuilds.next(runner, 5.0))
    assert task is not None
    rebuilds.end(runner, task.job_id, N, "", 0.001)
    reading = world.sim.finish(getting)
    assert (reading.payloads(), reading.served) == (world.payloads(), {"ssd": N})
    reading.release()
    assert rebuilds.stats()["blobs"] == 0
    assert world.run(rebuilds.estimate_s(world.store.state(world.ns.id), 0, N)) is None
    rebuilds.unregister(runner)


def test_what_is_brought_ahead_keeps_nobody_from_the_room(world: World) -> None:
    runner = world.store.rebuilds.register("frozen", [world.ns.id], 1)
    contexts = [world.keys]
    for seed in range(1, 9):
        ids = list(range(seed * 1000, seed * 1000 + TOKENS * N))
        contexts.append(world.ns.keys(np.array(ids)))
        put_told(world, world.c, world.ns, contexts[-1], ids)
    for keys in contexts:
        world.call(world.c.drop, world.ns, list(keys[N - 1 :]))
        state = world.store.state(world.ns.id)
        assert world.call(world.store.recall.bring_ahead, state, list(keys))
    world.run(asyncio.sleep(20.0))
    assert world.store.rebuilds.stats()["jobs"] == len(contexts)
    others = [f"{number:032d}".encode() for number in range(40)]
    writing = world.run(world.c.reserve(world.ns, others, timeout_s=30.0))
    assert writing.reasons == [""] * 40
    world.call(writing.abort)
    world.store.rebuilds.unregister(runner)
    world.rest()


def test_what_is_forgotten_while_the_rest_comes_is_not_made(world: World) -> None:
    world.chill()
    world.drop(6)
    tell(world, world.ns, recall="both")
    assert world.store._loader is not None
    world.store._loader.begin = lambda *records, stream: 0  # type: ignore[method-assign]
    with sim_runner(world, world.ns, blob_s=2.0) as runner:
        getting = world.sim.start(world.c.get(world.ns, list(world.keys), timeout_s=60.0))
        world.run(asyncio.sleep(3.0))
        forget = world.store.text_calls.forget(world.ns.id, world.keys[6], 32)
        assert world.run(forget) == N - 6
        reading = world.sim.finish(getting)
        reading.release()
        world.run(asyncio.sleep(30.0))
        assert (len(reading), reading.reason) == (6, "no_text")
        assert runner.made == list(world.keys[:6])


def test_what_is_forgotten_while_its_text_is_read_is_not_made(world: World) -> None:
    world.drop()
    read, forget = world.store.texts.chain, world.store.text_calls.forget

    async def read_late(*names: object) -> object:
        entries = await read(*names)  # type: ignore[arg-type]
        world.store.texts.chain = read  # type: ignore[method-assign]
        await forget(world.ns.id, world.keys.packed, 32)
        return entries

    world.store.texts.chain = read_late  # type: ignore[assignment, method-assign]
    with sim_runner(world, world.ns) as runner:
        assert world.read() == (0, {})
        assert runner.jobs == []


def test_what_follows_blobs_that_were_loaded_does_not_wait_for_their_rebuild(world: World) -> None:
    world.chill()
    world.drop(6)
    tell(world, world.ns, recall="both")
    with sim_runner(world, world.ns, blob_s=2.0) as runner:
        assert world.took_s() < 2.5 * 2.0 + 2.0, "one of the first six at most, and the last two"
        assert runner.made[-2:] == list(world.keys[6:])


class TestKeysThatAreNoChain:
    """A get may name anything; what is made for it is right for whoever comes next."""

    def test_a_blob_is_made_after_what_it_continues_or_not_at_all(self, world: World) -> None:
        other_ids = list(range(5000, 5000 + TOKENS * N))
        others = world.ns.keys(np.array(other_ids))
        put_told(world, world.c, world.ns, others, other_ids)
        world.drop()
        world.call(world.c.drop, world.ns, list(others))
        mixed = [*world.keys[:3], *others[3:]]
        with sim_runner(world, world.ns) as runner:
            reading = world.run(world.c.get(world.ns, mixed, timeout_s=60.0))
            assert reading.payloads() == world.payloads()[:3]
            reading.release()
            assert runner.made == mixed[:3]

    def test_a_partial_blob_ends_a_run(self, world: World) -> None:
        ids = [*range(7000, 7000 + TOKENS * 2 + 3)]
        keys = world.ns.keys(np.array(ids), tail=True)
        put = world.c.put(
            world.ns, list(keys), [payload_of(key, NBYTES) for key in keys],
            tokens=np.array(ids, "<u4").tobytes(), tail_tokens=3, timeout_s=5.0,
        )  # fmt: skip
        assert {result for result, _ in world.run(put)} == {"stored"}
        world.finish_all()
        world.call(world.c.drop, world.ns, list(keys))
        world.drop()
        with sim_runner(world, world.ns) as runner:
            asked = [*keys, *world.keys]
            reading = world.run(world.c.get(world.ns, asked, timeout_s=60.0))
            assert len(reading) == 3
            reading.release()
        assert len(runner.jobs[0].tokens) == 4 * len(ids)
