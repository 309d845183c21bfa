"""Forked children: they connect for themselves, and cannot harm or read what is the parent's."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import AsyncClient, BoundNamespace, Client, KVLayout, Namespace
from blobstore.errors import WrongProcess
from blobstore.protocol import Abort, Get, Hello, Seal
from tests.support.both_clients import Blocking
from tests.support.polling import poll_until
from tests.support.scripted_daemon import ScriptedDaemon

NBYTES = 5000
NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES), tokens_per_blob=16)
KEYS = NAMESPACE.keys(range(16 * 4))

# Only what runs in a child after the fork is under test: Python warns of threads, which the
# scripted daemon has.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        for number, key in enumerate(KEYS[:3]):
            daemon.store(NAMESPACE, key, bytes([number + 1]) * NBYTES)
        yield daemon


@pytest.fixture
def kv(daemon: ScriptedDaemon) -> Iterator[Client]:
    with Client(daemon.address) as kv:
        yield kv


@pytest.fixture
def ns(kv: Client) -> BoundNamespace:
    return kv.namespace(NAMESPACE)


def in_child(work: Callable[[], object]) -> int:
    """How a forked child that runs `work` exits: 0, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # a fault is what some of these children are for
        try:
            work()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 0)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_child_reads_and_writes_over_its_own_connection(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    assert kv.match(ns, KEYS).blobs == 3

    def child() -> None:
        with kv.get(ns, KEYS) as lease:
            assert [view[0] for view in lease] == [1, 2, 3]
        with kv.put(ns, KEYS[3:]) as writer:
            writer[0][:] = b"\x04" * NBYTES
        assert writer.results == ["stored"]

    assert in_child(child) == 0
    assert len(daemon.seen(Hello)) == 2
    with kv.get(ns, KEYS) as lease:
        assert [view[0] for view in lease] == [1, 2, 3, 4]
    assert len(daemon.seen(Hello)) == 2, "the parent's connection was left alone"


@pytest.mark.parametrize("leave", [lambda: None, lambda: sys.exit(0), lambda: os._exit(0)])
def test_a_child_that_exits_leaves_the_parent_as_it_was(
    leave: Callable[[], None], daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    lease = kv.get(ns, KEYS)
    assert in_child(leave) == 0
    assert lease[2][0] == 3
    assert kv.ping()
    assert daemon.released() == []
    assert len(daemon.seen(Hello)) == 1
    lease.release()
    assert poll_until(daemon.released) == [1]


def test_leases_of_the_parent_are_refused_in_a_child(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with kv.get(ns, KEYS) as lease:

        def child() -> None:
            for use in (
                lambda: lease[0],
                lambda: list(lease),
                lambda: lease.parts(0),
                lambda: lease.wait(0),
            ):
                with pytest.raises(WrongProcess, match="parent process"):
                    use()
            lease.release()
            with kv.get(ns, KEYS) as mine:
                assert mine[0][0] == 1

        assert in_child(child) == 0
        assert lease[0][0] == 1
        assert kv.ping()
        assert poll_until(daemon.released) == [2], "the child's own"


def test_a_view_of_the_parent_faults_in_a_child(kv: Client, ns: BoundNamespace) -> None:
    view = kv.get(ns, KEYS)[0]
    assert in_child(lambda: view[0]) == -signal.SIGSEGV
    assert view[0] == 1


def test_a_view_faults_in_a_child_though_its_client_is_gone(
    daemon: ScriptedDaemon, ns: BoundNamespace
) -> None:
    with Client(daemon.address) as kv:
        view = kv.get(ns, KEYS)[0]
    assert in_child(lambda: view[0]) == -signal.SIGSEGV
    assert view[0] == 1


def test_writers_of_the_parent_are_refused_in_a_child(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with kv.put(ns, KEYS[3:]) as writer:
        view = writer[0]

        def child() -> None:
            with pytest.raises(WrongProcess, match="parent process"):
                writer.seal()
            writer.abort()
            with pytest.raises(WrongProcess, match="parent process"):
                writer[0]

        assert in_child(child) == 0
        assert in_child(lambda: view.__setitem__(0, 1)) == -signal.SIGSEGV
        view[:] = b"\x04" * NBYTES
    assert writer.results == ["stored"]
    assert kv.ping()
    assert len(daemon.seen(Seal)) == 1
    assert daemon.seen(Abort) == []


def test_a_block_that_a_child_leaves_by_exit_does_nothing_to_the_daemon(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    pid = 0
    with kv.put(ns, KEYS[3:]) as writer, kv.get(ns, KEYS):
        pid = os.fork()
        if pid == 0:
            try:
                with writer:
                    sys.exit(7)
            except SystemExit:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        writer[0][:] = b"\x04" * NBYTES
    assert writer.results == ["stored"]
    assert daemon.seen(Abort) == []


def test_a_fork_while_other_threads_are_in_calls_leaves_no_lock_taken(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with kv.get(ns, KEYS) as lease:
                assert lease[0][0] == 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()

    def child() -> None:
        signal.alarm(20)  # a lock that stays taken would hang
        with kv.get(ns, KEYS) as lease:
            assert lease[0][0] == 1
        assert kv.ping()

    try:
        assert [in_child(child) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert kv.ping()
    poll_until(lambda: not daemon.leases or not kv.ping())


def test_a_fork_in_the_middle_of_a_call_leaves_the_reply_to_the_parent(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.silence(Get)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(len(kv.get(ns, KEYS, timeout_s=20))))
    thread.start()
    poll_until(lambda: daemon.unanswered)
    assert in_child(lambda: kv.close()) == 0
    assert in_child(lambda: kv.ping() or sys.exit(1)) == 0
    daemon.answer_late()
    thread.join()
    assert found == [3]


def _get_in_process(kv: Client, ns: BoundNamespace) -> None:
    with kv.get(ns, KEYS) as lease:
        assert [view[0] for view in lease] == [1, 2, 3]


def _get_anew(address: str) -> None:
    with Client(address) as kv:
        _get_in_process(kv, kv.namespace(NAMESPACE))


def test_multiprocessing_by_fork_and_by_spawn(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    forked = multiprocessing.get_context("fork").Process(target=_get_in_process, args=(kv, ns))
    spawned = multiprocessing.get_context("spawn").Process(target=_get_anew, args=(daemon.address,))
    for process in (forked, spawned):
        process.start()
    for process in (forked, spawned):
        process.join(60)
        assert process.exitcode == 0
        process.close()
    _get_in_process(kv, ns)
    assert len(daemon.seen(Hello)) == 3


def test_an_async_client_connects_anew_in_a_child(daemon: ScriptedDaemon) -> None:
    with Blocking(daemon.address) as kv:
        ns = kv.namespace(NAMESPACE)
        lease = kv.get(ns, KEYS)
        client: AsyncClient = kv._client

        def child() -> None:
            async def get() -> None:
                async with client.get(ns, KEYS) as mine:
                    assert mine[1][0] == 2

            with pytest.raises(WrongProcess):
                lease[0]
            asyncio.run(get())

        assert in_child(child) == 0
        assert lease[1][0] == 2
        assert kv.ping()
        assert len(daemon.seen(Hello)) == 2
        lease.release()


def test_arrays_of_numpy_over_a_lease_fault_in_a_child_too(kv: Client, ns: BoundNamespace) -> None:
    array = np.frombuffer(kv.get(ns, KEYS)[1], np.uint8)
    assert in_child(lambda: int(array.sum())) == -signal.SIGSEGV
    assert int(array.sum()) == 2 * NBYTES
