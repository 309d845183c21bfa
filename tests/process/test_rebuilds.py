"""Blobs that are gone come back from a model runner, whatever becomes of runners and readers."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.clients import (
    AsyncClient,
    AsyncRebuildJob,
    BoundNamespace,
    Client,
    KVLayout,
    LayerGroup,
    RebuildJob,
    Terms,
)
from blobstore.clients.rebuilds import POLL_S
from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.namespace import Namespace
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until, poll_until_async
from tests.support.rebuild_runner import (
    NAMESPACE,
    TOKENS,
    ids_of,
    make,
    payload_of,
    payloads_of,
    put_and_drop,
    read,
    rebuilds,
    runner,
)

WAIT_S = 30.0
LAYERED = KVLayout((LayerGroup.attention(layers=2, heads=8, head_size=64),))
"""Of as many bytes as that of NAMESPACE."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path, environ={"BLOBSTORE__TIERING__POLICY": "lru"}) as run:
        yield run


@pytest.fixture
def kv(run: Daemon) -> Iterator[Client]:
    with Client(run.address, timeout_s=WAIT_S) as kv:
        yield kv


@pytest.fixture
def ns(kv: Client) -> BoundNamespace:
    return kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))


def test_what_was_dropped_comes_back(kv: Client, ns: BoundNamespace, run: Daemon) -> None:
    ids = ids_of(8)
    payloads = put_and_drop(kv, ns, ids, keep=3)
    with runner(run.address) as program:
        assert read(kv, ns, ids) == (payloads, "")
        assert program.hear() == {"job": 5, "position": 3 * TOKENS}


def test_many_readers_of_one_context_cause_one_rebuild(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(6)
    payloads = put_and_drop(kv, ns, ids)
    with runner(run.address, "gate") as program, ThreadPoolExecutor(32) as readers:
        reads = [readers.submit(read, kv, ns, ids) for _ in range(32)]
        program.hear()
        poll_until(lambda: rebuilds(kv)["waiting"] == 32, WAIT_S, "all of them wait")
        program.tell("go")
        assert all(each.result() == (payloads, "") for each in reads)
        assert program.ask("stats")["jobs"] == 1


@pytest.mark.parametrize("closed", [True, False], ids=["client is closed", "call is cancelled"])
async def test_the_first_of_many_readers_leaves_and_strands_nobody(
    closed: bool, run: Daemon
) -> None:
    """The daemon hears of a closed client at once, of a cancelled call when it answers that."""
    ids = ids_of(4)
    async with (
        AsyncClient(run.address, timeout_s=WAIT_S) as kv,
        AsyncClient(run.address, timeout_s=WAIT_S) as first_kv,
    ):
        ns = await kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
        keys, payloads = ns.keys(ids), payloads_of(ids)
        await kv.put_from(ns, keys, payloads, token_ids=ids)
        await kv.drop(ns, keys)

        async def read_by(client: AsyncClient) -> list[bytes]:
            async with client.get(ns, keys) as lease:
                return [bytes(view) for view in lease]

        async def waiting(n: int) -> None:
            async with asyncio.timeout(WAIT_S):
                while (await kv.stats())["rebuild"]["waiting"] != n:
                    await asyncio.sleep(0.01)

        with runner(run.address, "gate") as program:
            first = asyncio.ensure_future(read_by(first_kv))
            await asyncio.to_thread(program.hear)
            others = [asyncio.ensure_future(read_by(kv)) for _ in range(31)]
            await waiting(32)
            if closed:
                await first_kv.close()
            else:
                first.cancel()
            (left,) = await asyncio.gather(first, return_exceptions=True)
            assert left == [] if closed else isinstance(left, asyncio.CancelledError)
            await waiting(31 if closed else 32)
            assert not any(other.done() for other in others)
            program.tell("go")
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.gather(*others) == [payloads] * 31
            assert (await asyncio.to_thread(program.ask, "stats"))["jobs"] == 1
        stats = (await kv.stats())["rebuild"]
        assert (stats["ended"], stats["blobs"]) == ({"made": 1}, 4)


def test_a_runner_that_is_killed_is_followed_by_another(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(5)
    payloads = put_and_drop(kv, ns, ids)
    with runner(run.address, "gate") as first, ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read, kv, ns, ids)
        first.hear()
        with runner(run.address):
            first.kill()
            assert reading.result() == (payloads, "")
    assert kv.stats()["lent_bytes"] == 0


def test_without_another_the_reader_has_its_miss(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(5)
    put_and_drop(kv, ns, ids, keep=2)
    with runner(run.address, "gate") as only, ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read, kv, ns, ids)
        only.hear()
        only.kill()
        payloads, reason = reading.result()
    assert len(payloads) == 2
    assert reason
    assert rebuilds(kv)["runners"] == 0
    poll_until(lambda: kv.stats()["lent_bytes"] == 0, WAIT_S, "nothing is lent")


def test_a_frozen_runner_is_late_and_comes_back(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(4)
    payloads = put_and_drop(kv, ns, ids)
    with runner(run.address, "gate") as frozen, ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read, kv, ns, ids)
        frozen.hear()
        with runner(run.address) as other:
            frozen.signal(signal.SIGSTOP)
            assert reading.result() == (payloads, "")
            other.hear()
        frozen.signal(signal.SIGCONT)
        frozen.tell("go")  # it makes them as well, or is told that nobody wants them
        poll_until(lambda: rebuilds(kv)["able"] == 1, WAIT_S, "it is heard of again")
        again = ids_of(3, seed=1)
        payloads = put_and_drop(kv, ns, again)
        reading = readers.submit(read, kv, ns, again)
        frozen.hear()
        frozen.tell("go")
        assert reading.result() == (payloads, "")


@pytest.mark.parametrize("way", ["raise", "skip"])
def test_a_runner_that_fails_is_followed_by_another(
    way: str, kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(4)
    put_and_drop(kv, ns, ids)
    with runner(run.address, way) as failing:
        payloads, reason = read(kv, ns, ids)
        assert len(payloads) == (0 if way == "raise" else 1)
        assert reason
        failing.hear()
    kv.drop(ns, ns.keys(ids))
    with runner(run.address):
        assert read(kv, ns, ids) == (payloads_of(ids), "")


def test_a_handler_that_makes_nothing_has_failed(kv: Client, ns: BoundNamespace) -> None:
    ids = ids_of(4)
    put_and_drop(kv, ns, ids, keep=1)
    with kv.serve_rebuilds([ns], lambda job: None) as server:
        payloads, reason = read(kv, ns, ids)
        assert (len(payloads), bool(reason)) == (1, True)
        poll_until(lambda: server.stats()["failed"] == 1, WAIT_S, "it has failed")
    assert rebuilds(kv)["blobs"] == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_that_ends_amid_a_job_is_found_again_and_shows_nothing_half(
    stop: signal.Signals, tmp_path: Path
) -> None:
    ids, half, go = ids_of(6), threading.Event(), threading.Event()
    jobs: list[int] = []

    def handle(job: RebuildJob) -> None:
        """The first time some are sealed, one is not, and one is half written when it ends."""
        jobs.append(job.position)
        if len(jobs) > 1:
            make(job)
            return
        for index in range(len(job)):
            if index == 3:
                job[3][:100] = b"x" * 100
                half.set()
                assert go.wait(WAIT_S)  # the daemon is another one by now
            job[index][:] = payload_of(ids[: index * TOKENS], job.blob_tokens(index))
            if index != 2:
                job.seal(index)

    def begun() -> Daemon:
        started = Daemon(tmp_path, environ={"BLOBSTORE__TIMES__DRAIN_S": "1"})
        started.wait_ready()
        return started

    run = begun()
    try:
        with Client(run.address, timeout_s=WAIT_S) as kv, ThreadPoolExecutor(1) as readers:
            ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
            payloads = put_and_drop(kv, ns, ids)
            poll_until(lambda: kv.stats()["texts"]["pending"] == 0, WAIT_S, "texts are on disk")
            with kv.serve_rebuilds([ns], handle) as server:
                reading = readers.submit(read, kv, ns, ids)
                assert half.wait(WAIT_S)
                run.process.send_signal(stop)
                got, reason = reading.result(WAIT_S)
                assert (got, bool(reason)) == (payloads[: len(got)], True)
                run.wait()
                run = begun()
                go.set()
                ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
                n_kept = kv.match(ns, ns.keys(ids)).blobs
                assert n_kept <= 2, "of what was sealed a crash may lose some"
                poll_until(lambda: rebuilds(kv)["able"] == 1, WAIT_S, "it registered again")
                assert read(kv, ns, ids) == (payloads, "")
                poll_until(lambda: server.stats()["jobs"] == 2, WAIT_S, "both have ended")
            assert jobs[1] in (0, n_kept * TOKENS)
            poll_until(lambda: kv.stats()["lent_bytes"] == 0, WAIT_S, "nothing is lent")
            assert kv.verify()["corrupt"] == []
    finally:
        run.kill()


def test_a_deadline_ends_the_wait_and_not_the_job(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(4)
    payloads = put_and_drop(kv, ns, ids)
    with runner(run.address, "gate") as program:
        with kv.get(ns, ns.keys(ids), timeout_s=0.2) as lease:
            assert len(lease) == 0
        program.hear()
        program.tell("go")
        poll_until(lambda: kv.match(ns, ns.keys(ids)).blobs == 4, WAIT_S, "it was made")
        assert read(kv, ns, ids) == (payloads, "")


def test_what_was_to_be_continued_is_made_again_first(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    ids = ids_of(6)
    payloads = put_and_drop(kv, ns, ids, keep=3)
    with runner(run.address, "gate") as program, ThreadPoolExecutor(2) as readers:
        busy_with = ids_of(1, seed=7)
        put_and_drop(kv, ns, busy_with)
        before = readers.submit(read, kv, ns, busy_with)
        program.hear()
        reading = readers.submit(read, kv, ns, ids)
        poll_until(lambda: rebuilds(kv)["waiting"] == 2, WAIT_S, "the second job is queued")
        kv.drop(ns, ns.keys(ids))
        program.tell("go")
        before.result()
        assert program.hear() == {"job": 6, "position": 0}
        program.tell("go")
        reading.result()
        assert read(kv, ns, ids) == (payloads, "")


def test_registrations_for_what_is_not_declared_are_refused(kv: Client, ns: BoundNamespace) -> None:
    other = BoundNamespace(Namespace("rebuilt", NAMESPACE.layout, tokens_per_blob=8))
    with pytest.raises(UnknownNamespace):
        kv.serve_rebuilds([other], lambda job: None)
    with pytest.raises(InvalidRequest, match="concurrency"):
        kv.serve_rebuilds([ns], lambda job: None, concurrency=0)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(NAMESPACE, weights_digest="of other weights"),
        dataclasses.replace(NAMESPACE, layout=LAYERED),
    ],
    ids=["other weights", "another layout of the same size"],
)
def test_runners_get_no_jobs_of_another_namespace(
    other: Namespace, kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    assert other.nbytes == NAMESPACE.nbytes
    others = kv.namespace(other, terms=Terms(recall="rebuild"))
    ids, jobs = ids_of(3), list[bytes]()
    payloads = put_and_drop(kv, ns, ids)
    assert put_and_drop(kv, others, ids) == payloads  # under the same keys, what is more

    def handle(job: RebuildJob) -> None:
        jobs.append(job.namespace.id)
        make(job)

    with kv.serve_rebuilds([others], handle) as server:
        assert read(kv, ns, ids) == ([], "absent")
        assert read(kv, others, ids) == (payloads, "")
        kv.drop(others, others.keys(ids))
        with runner(run.address) as program:
            assert read(kv, ns, ids) == (payloads, "")
            assert program.hear()["job"] == 3
            kv.drop(ns, ns.keys(ids))
            assert read(kv, others, ids) == (payloads, "")
            assert read(kv, ns, ids) == (payloads, "")
            assert program.hear()["job"] == 3
        poll_until(lambda: server.stats()["jobs"] == 2, WAIT_S, "it has ended both of its own")
    assert jobs == [other.id] * 2


async def test_coroutines_serve_as_well(run: Daemon) -> None:
    ids = ids_of(8)
    async with AsyncClient(run.address, timeout_s=WAIT_S) as kv:
        ns = await kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
        keys, payloads = ns.keys(ids), payloads_of(ids)
        await kv.put_from(ns, keys, payloads, token_ids=ids)
        await kv.drop(ns, keys[2:])

        async def handle(job: AsyncRebuildJob) -> None:
            assert job.parent is not None
            assert [bytes(view) for view in job.parent] == payloads[:2]
            for index in range(len(job)):
                start = job.position + index * TOKENS
                job[index][:] = payload_of(ids[:start], job.blob_tokens(index))
                if index % 2:
                    await job.seal(index)

        async with await kv.serve_rebuilds([ns], handle, concurrency=2) as server:
            async with kv.get(ns, keys) as lease:
                assert [bytes(view) for view in lease] == payloads
            await poll_until_async(lambda: not server.stats()["running"], WAIT_S, "it is idle")
            stats = server.stats()
        assert (stats["jobs"], stats["failed"], stats["blobs"]) == (1, 0, 6)


def test_a_daemon_stops_at_once_though_runners_wait_for_jobs(
    kv: Client, ns: BoundNamespace, run: Daemon
) -> None:
    with runner(run.address), runner(run.address):
        poll_until(lambda: rebuilds(kv)["able"] == 2, WAIT_S, "both are there")
        run.process.terminate()
        assert run.wait(POLL_S - 0.5) == 0
