"""AsyncClient: cancellation, loops, threads; what it shares with Client is tested there."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from blobstore.clients import (
    AsyncClient,
    BoundNamespace,
    Client,
    KVLayout,
    Namespace,
    aio_runner,
    reading,
)
from blobstore.errors import InvalidRequest, Unavailable
from blobstore.protocol import Abort, Get, Hello, Match, Matched, Ping, Pong, Request, Reserve, Seal
from tests.support.connections import connection_of
from tests.support.polling import poll_until, poll_until_async
from tests.support.scripted_daemon import ScriptedDaemon

NBYTES = 5000
NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES), tokens_per_blob=16)
KEYS = NAMESPACE.keys(range(16 * 8))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        for number, key in enumerate(KEYS):
            daemon.store(NAMESPACE, key, bytes([number + 1]) * NBYTES)
        yield daemon


@pytest.fixture
async def kv(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address) as kv:
        yield kv


@pytest.fixture
async def ns(kv: AsyncClient) -> BoundNamespace:
    return await kv.namespace(NAMESPACE)


def match_n(request: Request) -> Matched:
    assert isinstance(request, Match)
    n = len(request.keys) // request.key_bytes
    return Matched(n, n, 0.0)


async def test_tasks_get_their_own_replies_in_whatever_order_they_come(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    daemon.silence(Match)
    calls = [asyncio.create_task(kv.match(ns, KEYS[:n])) for n in range(1, 9)]
    await poll_until_async(lambda: len(daemon.unanswered) == 8)
    random.Random(5).shuffle(daemon.unanswered)
    daemon.answer_late()
    assert [(await call).blobs for call in calls] == list(range(1, 9))


async def test_a_cancelled_get_gives_back_what_comes_late(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    daemon.silence(Get)
    call = asyncio.create_task(kv.get(ns, KEYS))
    await poll_until_async(lambda: daemon.unanswered)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    daemon.answer_late()
    assert await poll_until_async(daemon.released) == [1]


async def test_a_get_that_is_cancelled_when_its_reply_is_here_gives_it_back(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    call = asyncio.create_task(kv.get(ns, KEYS))
    await asyncio.sleep(0)  # it is sent
    connection: Any = connection_of(kv)
    receive = connection.receive

    def receive_and_cancel() -> None:
        receive()
        if daemon.leases:
            call.cancel()  # the future has its result, and the task did not run yet

    connection.loop.remove_reader(connection._fd)
    connection.loop.add_reader(connection._fd, receive_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await poll_until_async(daemon.released) == [1]


async def test_a_cancelled_put_aborts(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    keys = NAMESPACE.keys(range(1, 17))
    daemon.silence(Reserve)
    call = asyncio.create_task(kv.put(ns, keys))
    await poll_until_async(lambda: daemon.unanswered)
    call.cancel()
    daemon.answer_late()
    assert await poll_until_async(lambda: daemon.seen(Abort)) == [Abort(1)]

    async def write() -> None:
        async with kv.put(ns, keys) as writer:
            writer[0][:] = b"x" * NBYTES
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await poll_until_async(lambda: daemon.reservations)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert await poll_until_async(lambda: daemon.seen(Abort)[1:]) == [Abort(2)]
    assert daemon.seen(Seal) == []


async def test_a_cancelled_seal_names_what_may_still_be_in_reach(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    daemon.silence(Seal)
    writer = await kv.put(ns, NAMESPACE.keys(range(1, 17)))
    array = np.frombuffer(writer[0], np.uint8)
    call = asyncio.create_task(writer.seal())
    await poll_until_async(lambda: daemon.unanswered)
    call.cancel()
    assert await poll_until_async(lambda: daemon.seen(Abort)) == [Abort(1, [0])]
    del array
    assert len(await poll_until_async(daemon.handed_back)) == 1


async def test_cancelling_at_any_moment_never_mixes_replies(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    daemon.script[Match] = match_n
    rng = random.Random(3)
    cancelled = 0
    for _ in range(200):
        call = asyncio.create_task(kv.get(ns, KEYS[: rng.randint(1, 8)]))
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 400e-6))
        cancelled += call.cancel()
        n = rng.randint(1, 8)
        with await kv.get(ns, KEYS[:n]) as lease:
            assert [view[0] for view in lease] == list(range(1, n + 1))
        assert (await kv.match(ns, KEYS[:n])).blobs == n
        await asyncio.wait([call])
        if not call.cancelled():
            call.result().release()
        del call
    assert cancelled > 20
    assert await kv.ping()
    await poll_until_async(lambda: not daemon.leases)
    assert len(daemon.seen(Hello)) == 1, "no connection had to be given up"


async def test_a_deadline_passes_while_the_loop_goes_on(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    daemon.silence(Get)
    started_s = time.monotonic()
    lease, answered = await asyncio.gather(kv.get(ns, KEYS, timeout_s=0.1), kv.ping())
    assert (lease.reason, answered) == ("deadline", True)
    assert 0.09 < time.monotonic() - started_s < 2
    daemon.answer_late()
    assert await poll_until_async(daemon.released) == [1]


async def test_a_call_is_a_coroutine_or_a_block(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    opening = kv.get(ns, KEYS)
    assert inspect.isawaitable(opening)
    assert isinstance(opening, Coroutine)
    (await opening).release()
    async with kv.get(ns, KEYS[:2]) as lease:
        assert len(lease) == 2
    async with asyncio.timeout(5), await kv.get(ns, KEYS[:3]) as lease:
        assert len(lease) == 3
    assert len(await asyncio.wait_for(kv.get(ns, KEYS[:1]), 5)) == 1
    never = kv.get(ns, KEYS)
    never.close()
    with pytest.raises(InvalidRequest):
        kv.get(ns, b"no list")  # type: ignore[arg-type]


async def test_a_last_view_may_die_on_another_thread(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    views = [(await kv.get(ns, KEYS))[0] for _ in range(20)]
    threads = [threading.Thread(target=views.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert len(await poll_until_async(lambda: daemon.released()[19:])) == 1
    assert await kv.ping()


async def test_a_connection_that_breaks_on_another_thread_ends_its_calls(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    daemon.silence(Match)
    call = asyncio.create_task(kv.match(ns, KEYS, timeout_s=60))
    await poll_until_async(lambda: daemon.unanswered)
    connection: Any = connection_of(kv)
    await asyncio.to_thread(connection.fail, "as scripted")
    await poll_until_async(lambda: len(daemon.unanswered) == 2)  # it was asked once more
    daemon.answer_late()
    assert (await call).blobs == 8


async def test_a_daemon_that_does_not_read_does_not_stop_the_loop(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    go = threading.Event()

    def stall(request: Request) -> Matched:
        assert go.wait(10)
        return match_n(request)

    daemon.script[Match] = stall
    many = NAMESPACE.keys(range(16 * 5000))  # 160 kB each: more than the socket takes
    calls = [asyncio.create_task(kv.match(ns, many)) for _ in range(4)]
    await poll_until_async(lambda: daemon.seen(Match))
    lease = await kv.get(ns, KEYS, timeout_s=0.1)
    assert lease.reason == "deadline"
    go.set()
    assert [(await call).blobs for call in calls] == [5000] * 4
    await poll_until_async(lambda: daemon.released() == [1])


async def test_releases_are_sent_once_a_daemon_reads_again(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    lease = await kv.get(ns, KEYS)
    go = threading.Event()

    def stall(request: Request) -> Pong:
        assert go.wait(10)
        return Pong()

    daemon.script[Ping] = stall
    assert await kv.ping(timeout_s=0.02) is False
    many = NAMESPACE.keys(range(16 * 20000))
    assert (await kv.match(ns, many, timeout_s=0.05)).reason == "deadline"
    await asyncio.to_thread(lease.release)
    assert daemon.released() == []
    go.set()
    assert await poll_until_async(daemon.released) == [1]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_client_works_in_one_loop_after_another(factory: Any, daemon: ScriptedDaemon) -> None:
    kv = AsyncClient(daemon.address)
    leases = []

    async def work() -> None:
        ns = await kv.namespace(NAMESPACE)
        leases.append(await kv.get(ns, KEYS))
        buffer = bytearray(NBYTES)
        assert await kv.get_into(ns, KEYS[:1], [buffer]) == 1
        assert await kv.put_from(ns, NAMESPACE.keys(range(1, 17)), buffer) in (
            ["stored"],
            ["exists"],
        )

    for _ in range(2):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work())
    assert len(daemon.seen(Hello)) == 2
    assert [lease[0][0] for lease in leases] == [1, 1]
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(kv.close())
    for lease in leases:
        lease.release()
    poll_until(lambda: not daemon.peers)


def test_a_lease_outlives_the_loop_and_is_released_without_it(daemon: ScriptedDaemon) -> None:
    async def get() -> Any:
        kv = AsyncClient(daemon.address)
        return await kv.get(await kv.namespace(NAMESPACE), KEYS)

    lease = asyncio.run(get())
    gc.collect()
    assert lease[3][0] == 4
    assert daemon.released() == []
    lease.release()
    assert poll_until(daemon.released) == [1]
    del lease
    gc.collect()
    poll_until(lambda: not daemon.peers)


async def test_a_closed_client_keeps_its_leases_connected(
    daemon: ScriptedDaemon, ns: BoundNamespace
) -> None:
    kv = AsyncClient(daemon.address)
    lease = await kv.get(ns, KEYS)
    await kv.close()
    assert lease[0][0] == 1
    assert await kv.ping() is False
    peers = len(daemon.peers)
    await asyncio.to_thread(lease.release)
    assert await poll_until_async(daemon.released) == [1]
    await poll_until_async(lambda: len(daemon.peers) == peers - 1)


async def test_connecting_is_said_to_fail_only_where_it_was_asked_for(tmp_path: Path) -> None:
    kv = AsyncClient(f"unix:{tmp_path / 'nobody'}")
    assert kv.boot_id == 0
    assert await kv.ping() is False
    ns = await kv.namespace(NAMESPACE)
    assert await kv.get_into(ns, KEYS, bytearray(8 * NBYTES)) == 0
    assert await kv.put_from(ns, KEYS, bytes(8 * NBYTES)) == ["refused"] * 8
    with pytest.raises(Unavailable, match="no daemon answers"):
        await kv.connect()
    with pytest.raises(Unavailable, match="no daemon answers"):
        async with kv:
            pass


async def test_a_daemon_that_does_not_greet_is_unavailable_by_the_deadline(
    daemon: ScriptedDaemon,
) -> None:
    daemon.greet = lambda: None
    kv = AsyncClient(daemon.address, timeout_s=0.1)
    with pytest.raises(Unavailable, match="did not greet in time"):
        await kv.connect()
    assert await asyncio.gather(*(kv.ping() for _ in range(5))) == [False] * 5


async def test_many_tasks_connect_once(daemon: ScriptedDaemon) -> None:
    kv = AsyncClient(daemon.address)
    assert await asyncio.gather(*(kv.ping() for _ in range(20))) == [True] * 20
    assert len(daemon.seen(Hello)) == 1
    daemon.hang_up()
    assert await asyncio.gather(*(kv.ping() for _ in range(20))) == [True] * 20
    assert len(daemon.seen(Hello)) == 2
    await kv.close()


async def test_a_cancelled_copy_ends_before_the_callers_memory_is_its_own_again(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()
    copy_out = reading._copy_out

    def slow(*args: Any) -> None:
        started.set()
        assert go.wait(10)
        copy_out(*args)

    monkeypatch.setattr(reading, "_copy_out", slow)
    table = np.zeros((8, NBYTES), np.uint8)
    call = asyncio.create_task(kv.get_into(ns, KEYS, table))
    await asyncio.to_thread(started.wait)
    call.cancel()
    await asyncio.sleep(0)
    call.cancel()
    done, _ = await asyncio.wait([call], timeout=0.05)
    assert not done, "the copy is under way"
    assert daemon.released() == []
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (table[:, 0] == np.arange(1, 9)).all()
    assert await poll_until_async(daemon.released) == [1]


async def test_both_clients_share_blobs(
    daemon: ScriptedDaemon, kv: AsyncClient, ns: BoundNamespace
) -> None:
    keys = NAMESPACE.keys(range(2, 18))
    async with kv.put(ns, keys) as writer:
        writer[0][:] = b"y" * NBYTES

    def read() -> bytes:
        with Client(daemon.address) as other, other.get(ns, keys) as lease:
            return bytes(lease[0])

    assert await asyncio.to_thread(read) == b"y" * NBYTES


def test_the_copying_thread_is_not_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        assert await aio_runner.in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await aio_runner.in_thread(lambda: 1 // 0)

    asyncio.run(run())
