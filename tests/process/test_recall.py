"""Blobs that are not in memory any more come back for a get: from disk, from text, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import Client, Keys, Namespace, RebuildJob, Terms
from blobstore.units import KIB
from tests.support.blobs import TOKENS, opaque, payload_of
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until, wait_s

NBYTES = 256 * KIB
N = 12
IDS = np.arange(TOKENS * N, dtype=np.uint32)
SPACE: Namespace = opaque(NBYTES)
KEYS: Keys = SPACE.keys(IDS)

Made = Callable[[bytes, int], bytes]


def other_bytes(key: bytes, nbytes: int) -> bytes:
    return payload_of(key[::-1], nbytes)


class Runner:
    """Makes the blobs of SPACE in this process, over a connection of its own."""

    def __init__(
        self,
        made: Made = payload_of,
        blob_s: float = 0.0,
        before: Callable[[RebuildJob, int], None] = lambda job, i: None,
    ) -> None:
        self.made_from = made
        self.before = before
        """Called before a blob is made."""
        self.blob_s = blob_s
        self.jobs: list[tuple[int, int]] = []
        """Position and length."""
        self.n_made = 0

    def __call__(self, job: RebuildJob) -> None:
        self.jobs.append((job.position, len(job)))
        assert job.tokens.tolist() == IDS[job.position : job.position + len(job.tokens)].tolist()
        if job.position:
            assert job.parent is not None
            assert bytes(job.parent[0]) == payload_of(KEYS[0], NBYTES)
        for i in range(len(job)):
            if i >= job.wanted:
                break
            wait_s(self.blob_s)
            self.before(job, i)
            job[i][:] = self.made_from(job.keys[i], NBYTES)
            job.seal(i)
            self.n_made += 1


@contextmanager
def served(run: Daemon, runner: Runner) -> Iterator[Runner]:
    """While it lasts, `runner` is there."""
    with Client(run.address) as kv, kv.serve_rebuilds([kv.namespace(SPACE)], runner):
        yield runner


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as made:
        yield made


@pytest.fixture
def kv(run: Daemon) -> Iterator[Client]:
    with Client(run.address, timeout_s=10.0) as client:
        put(client)
        yield client


def put(kv: Client, retention: str = "durable") -> None:
    payloads = [payload_of(key, NBYTES) for key in KEYS]
    results = kv.put_from(kv.namespace(SPACE), KEYS, payloads, token_ids=IDS, retention=retention)
    assert results == ["stored"] * N


def terms(kv: Client, **told: str) -> None:
    kv.namespace(SPACE, terms=Terms(**told))


def chill(kv: Client, first: int = 0) -> None:
    """On SSD alone from blob `first` on."""
    assert kv.drop(kv.namespace(SPACE), KEYS[first:], tier="dram") == N - first


def read(kv: Client, keys: Keys = KEYS, made: Made = payload_of) -> tuple[int, dict[str, int], str]:
    """How many leading blobs a get gives, where they came from, why no more; all are right."""
    with kv.get(kv.namespace(SPACE), keys, timeout_s=10.0) as lease:
        for key, payload in zip(keys, lease, strict=False):
            assert payload == made(key, NBYTES)
        return len(lease), dict(lease.served), lease.reason


class TestFromText:
    def test_a_dropped_context_comes_back_with_the_same_bytes(
        self, run: Daemon, kv: Client
    ) -> None:
        with served(run, Runner()) as runner:
            assert kv.drop(kv.namespace(SPACE), KEYS) == N
            hit = kv.match(kv.namespace(SPACE), KEYS)
            assert (hit.blobs, hit.rebuildable) == (0, N)
            assert read(kv) == (N, {"rebuild": N}, "")
            assert runner.jobs == [(0, N)]
            assert read(kv) == (N, {"dram": N}, "")
            kv.drop(kv.namespace(SPACE), KEYS[3:])
            assert kv.match(kv.namespace(SPACE), KEYS).rebuild_eta_s > 0
            assert read(kv) == (N, {"dram": 3, "rebuild": N - 3}, "")

    def test_a_context_is_resumed_after_a_restart(self, tmp_path: Path) -> None:
        with daemon(tmp_path) as run, Client(run.address) as kv:
            put(kv)
            kv.drop(kv.namespace(SPACE), KEYS)
            run.process.terminate()
            run.wait()
        with (
            daemon(tmp_path) as run,
            served(run, Runner()),
            Client(run.address, timeout_s=10.0) as kv,
        ):
            assert read(kv) == (N, {"rebuild": N}, "")

    def test_a_window_of_a_context_brings_what_it_continues_along(
        self, run: Daemon, kv: Client
    ) -> None:
        kv.drop(kv.namespace(SPACE), KEYS)
        with served(run, Runner()):
            assert read(kv, KEYS[6:]) == (N - 6, {"rebuild": N - 6}, "")
            assert read(kv) == (N, {"dram": N}, "")

    def test_a_get_of_many_windows_is_filled(self, run: Daemon, kv: Client) -> None:
        kv.drop(kv.namespace(SPACE), KEYS)
        buffers = [np.empty(NBYTES, np.uint8) for _ in KEYS]
        with served(run, Runner()):
            assert kv.get_into(kv.namespace(SPACE), KEYS, buffers, timeout_s=10.0) == N
        for key, buffer in zip(KEYS, buffers, strict=True):
            assert buffer.tobytes() == payload_of(key, NBYTES)

    def test_without_text_it_is_a_miss(self, run: Daemon, kv: Client) -> None:
        ns = kv.namespace(SPACE)
        kv.forget(ns, KEYS)
        terms(kv, text="off")
        put(kv)
        kv.drop(ns, KEYS)
        with served(run, Runner()) as runner:
            assert read(kv) == (0, {}, "absent")
        assert runner.jobs == []

    def test_a_caller_without_time_gets_his_miss_and_the_next_one_the_result(
        self, run: Daemon, kv: Client
    ) -> None:
        ns = kv.namespace(SPACE)
        kv.drop(ns, KEYS)
        with served(run, Runner(blob_s=0.2)) as runner:
            with kv.get(ns, KEYS, timeout_s=0.5) as lease:
                assert len(lease) < N
                assert lease.reason == "deadline"
            poll_until(lambda: runner.n_made == N, 20.0)
            assert read(kv)[0] == N
            assert len(runner.jobs) == 1

    def test_a_runner_that_raises_is_a_miss(self, run: Daemon, kv: Client) -> None:
        def fails(key: bytes, nbytes: int) -> bytes:
            if key == KEYS[4]:
                raise RuntimeError("out of memory")
            return payload_of(key, nbytes)

        kv.drop(kv.namespace(SPACE), KEYS)
        with served(run, Runner(fails)):
            assert read(kv) == (4, {"rebuild": 4}, "failed")


class TestFromDisk:
    def test_never_gives_what_is_in_memory_alone(self, run: Daemon, kv: Client) -> None:
        terms(kv, recall="never")
        chill(kv, 5)
        assert read(kv) == (5, {"dram": 5}, "not_loaded")

    def test_rebuild_does_not_wait_for_the_disk(self, run: Daemon, kv: Client) -> None:
        terms(kv, recall="rebuild")
        chill(kv)
        with served(run, Runner()):
            assert read(kv) == (N, {"rebuild": N}, "")
        assert kv.stats()["counters"]["loaded_blobs"] == 0

    def test_what_a_failing_runner_does_not_make_is_loaded(self, run: Daemon, kv: Client) -> None:
        def fails(key: bytes, nbytes: int) -> bytes:
            raise RuntimeError("no")

        terms(kv, recall="rebuild")
        chill(kv)
        with served(run, Runner(fails)):
            assert read(kv) == (N, {"ssd": N}, "")

    def test_both_sides_meet(self, tmp_path: Path) -> None:
        """The disk is slowed to a blob in 100 ms, and so is the runner."""
        rate = {"BLOBSTORE__TIERING__FETCH_RATE": str(10 * NBYTES)}
        with (
            daemon(tmp_path, environ=rate) as run,
            Client(run.address, timeout_s=30.0) as kv,
            served(run, Runner(blob_s=0.1)),
        ):
            put(kv)
            terms(kv, recall="both")
            chill(kv)
            n, origins, reason = read(kv)
            assert (n, reason) == (N, "")
            assert origins["ssd"] + origins["rebuild"] == N
            assert min(origins.values()) > 0

    def test_where_both_sides_meet_both_stop(self, tmp_path: Path) -> None:
        """The runner makes its next blob once the slowed disk has given as many."""
        rate = {"BLOBSTORE__TIERING__FETCH_RATE": str(10 * NBYTES)}
        with (
            daemon(tmp_path, environ=rate) as run,
            Client(run.address, timeout_s=30.0) as kv,
            Client(run.address, timeout_s=30.0) as watcher,
        ):

            def n_loaded() -> int:
                loaded: int = watcher.stats()["counters"]["loaded_blobs"]
                return loaded

            def idle() -> bool:
                stats = watcher.stats()
                return not stats["mover"]["loads"] and not stats["rebuild"]["running"]

            def in_step(job: RebuildJob, i: int) -> None:
                poll_until(lambda: n_loaded() >= i or i >= job.wanted, 20.0, "the disk has given")

            put(kv)
            terms(kv, recall="both")
            chill(kv)
            with served(run, Runner(before=in_step)) as runner:
                n, origins, reason = read(kv)
                assert (n, reason) == (N, "")
                assert min(origins["ssd"], origins["rebuild"]) > 1
                poll_until(idle, 20.0, "nobody works")
            assert runner.n_made < N
            assert n_loaded() < N
            assert runner.n_made + n_loaded() <= N + 2, (runner.n_made, n_loaded())


class TestDivergence:
    @pytest.mark.parametrize("told", ["accept", "report"])
    @pytest.mark.parametrize("where", ["text", "ssd"])
    def test_other_bytes_replace_those_of_before(
        self, run: Daemon, kv: Client, told: str, where: str
    ) -> None:
        ns = kv.namespace(SPACE)
        terms(kv, recall="rebuild", divergence=told)
        if where == "text":
            kv.drop(ns, KEYS)
        else:
            kv.drop(ns, KEYS)
            put(kv, "standard")
            poll_until(lambda: kv.stat(ns, KEYS)[-1]["tiers"] == ["dram", "ssd"])
            chill(kv)
        with served(run, Runner(other_bytes)):
            assert read(kv, made=other_bytes) == (N, {"rebuild": N}, "")
        assert kv.stats()["counters"]["diverged_blobs"] == {told: N}
        assert len(kv.stats()["rebuild"]["divergences"]) == (N if told == "report" else 0)
        story = [event["what"] for event in kv.explain(ns, KEYS)[0]["story"]]
        assert ("diverged" in story) == (told == "report")
        poll_until(lambda: kv.stats()["tiers"]["ssd"]["dirty_bytes"] == 0)
        chill(kv)
        assert read(kv, made=other_bytes) == (N, {"ssd": N}, "")
        assert kv.verify()["corrupt"] == []

    @pytest.mark.parametrize("told", ["accept", "report"])
    def test_durable_bytes_on_disk_are_given_whatever_a_runner_makes(
        self, run: Daemon, kv: Client, told: str
    ) -> None:
        terms(kv, recall="rebuild", divergence=told)
        chill(kv)
        with served(run, Runner(other_bytes)):
            assert read(kv) == (N, {"ssd": N}, "")
        assert kv.stats()["counters"]["diverged_blobs"].keys() == {"reject"}

    def test_a_strict_service_is_given_the_old_bytes_from_disk(
        self, run: Daemon, kv: Client
    ) -> None:
        terms(kv, recall="rebuild", divergence="reject")
        chill(kv)
        with served(run, Runner(other_bytes)):
            assert read(kv) == (N, {"ssd": N}, "")

    def test_a_strict_service_gets_a_miss_rather_than_other_bytes(
        self, run: Daemon, kv: Client
    ) -> None:
        terms(kv, divergence="reject")
        kv.drop(kv.namespace(SPACE), KEYS[6:])
        with served(run, Runner(other_bytes)):
            assert read(kv) == (6, {"dram": 6}, "divergent")
