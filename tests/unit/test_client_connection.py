"""One connection shared by threads: order, deadlines, late replies, broken streams."""

from __future__ import annotations

import gc
import itertools
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import BoundNamespace, Client, KVLayout, Namespace
from blobstore.clients import link as link_module
from blobstore.errors import BlobStoreError, Unavailable
from blobstore.protocol import (
    Abort,
    Get,
    Hello,
    Holding,
    Match,
    Matched,
    Ping,
    Pong,
    Release,
    Request,
    Reserve,
    Welcome,
)
from blobstore.transports.framing import pack
from tests.support.connections import connection_of
from tests.support.polling import poll_until
from tests.support.scripted_daemon import ScriptedDaemon

NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(100), tokens_per_blob=4)
KEYS = NAMESPACE.keys(range(40))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        yield daemon


@pytest.fixture
def kv(daemon: ScriptedDaemon) -> Iterator[Client]:
    with Client(daemon.address) as kv:
        yield kv


@pytest.fixture
def ns(kv: Client, daemon: ScriptedDaemon) -> BoundNamespace:
    for key in KEYS:
        daemon.store(NAMESPACE, key, b"x" * 100)
    return kv.namespace(NAMESPACE)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def match_n(request: Request) -> Matched:
    """An answer that tells which request it is for."""
    assert isinstance(request, Match)
    n = len(request.keys) // request.key_bytes
    return Matched(n, n, 0.0)


def test_threads_get_their_own_replies_in_whatever_order_they_come(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    calls = {n: pool.submit(kv.match, ns, KEYS[:n]) for n in range(1, 8)}
    poll_until(lambda: len(daemon.unanswered) == 7)
    random.Random(5).shuffle(daemon.unanswered)
    daemon.answer_late()
    assert {n: call.result(5).blobs for n, call in calls.items()} == {n: n for n in calls}


def test_many_calls_of_many_threads_never_mix(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.script[Match] = match_n

    def ask(seed: int) -> bool:
        rng = random.Random(seed)
        lengths = [rng.randint(1, len(KEYS)) for _ in range(100)]
        return all(kv.match(ns, KEYS[:n]).blobs == n for n in lengths)

    assert all(pool.map(ask, range(8)))


def test_a_thread_that_stops_waiting_lets_another_read(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    reader = pool.submit(kv.match, ns, KEYS, timeout_s=0.3)
    poll_until(lambda: len(daemon.unanswered) == 1)
    others = [pool.submit(kv.match, ns, KEYS[:n], timeout_s=20) for n in (1, 2, 3)]
    poll_until(lambda: len(daemon.unanswered) == 4)
    assert reader.result(5).reason == "deadline"
    daemon.answer_late()
    assert [other.result(5).blobs for other in others] == [1, 2, 3]


def test_a_thread_that_does_not_read_keeps_its_deadline(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    reader = pool.submit(kv.match, ns, KEYS, timeout_s=20)
    poll_until(lambda: len(daemon.unanswered) == 1)
    started_s = time.monotonic()
    assert kv.match(ns, KEYS, timeout_s=0.1).reason == "deadline"
    assert 0.09 < time.monotonic() - started_s < 2
    daemon.answer_late()
    assert reader.result(5).blobs == len(KEYS)


def test_followers_that_gave_up_are_not_waited_for(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    reader = pool.submit(kv.match, ns, KEYS, timeout_s=1.0)
    poll_until(lambda: len(daemon.unanswered) == 1)
    impatient = [pool.submit(kv.match, ns, KEYS, timeout_s=0.1) for _ in range(3)]
    assert {call.result(5).reason for call in impatient} == {"deadline"}
    patient = pool.submit(kv.match, ns, KEYS[:2], timeout_s=20)
    poll_until(lambda: len(daemon.unanswered) == 5)
    assert reader.result(5).reason == "deadline"
    daemon.answer_late()
    assert patient.result(5).blobs == 2


def test_a_late_reply_is_no_answer_to_the_next_request(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.silence(Match)
    assert kv.match(ns, KEYS[:3], timeout_s=0.05).reason == "deadline"
    daemon.answer_late()
    assert kv.match(ns, KEYS[:1]).blobs == 1


def test_a_late_lease_is_released_though_the_client_is_idle(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.silence(Get)
    assert kv.get(ns, KEYS, timeout_s=0.05).reason == "deadline"
    assert daemon.released() == []
    daemon.answer_late()
    assert poll_until(daemon.released) == [1]


def test_a_late_reservation_is_aborted_though_the_client_is_idle(
    daemon: ScriptedDaemon, kv: Client
) -> None:
    ns = kv.namespace(NAMESPACE)
    daemon.silence(Reserve)
    with kv.put(ns, KEYS, timeout_s=0.05) as writer:
        writer[0][:] = b"y" * 100
    assert writer.reasons == ["deadline"] * len(KEYS)
    daemon.answer_late()
    assert poll_until(lambda: daemon.seen(Abort)) == [Abort(1)]
    assert not daemon.blobs


def test_closing_ends_the_wait_for_a_late_lease(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.silence(Get)
    assert kv.get(ns, KEYS, timeout_s=0.05).reason == "deadline"
    kv.close()  # the leak check would find a thread that waits on


def test_a_reply_in_small_pieces_arrives(daemon: ScriptedDaemon, kv: Client) -> None:
    def in_pieces(request: Request) -> None:
        assert isinstance(request, Ping)
        reply = daemon.frame(_id_of_next(kv), Pong(request.payload))

        def send() -> None:
            for start in range(0, len(reply), 5):
                daemon.peers[0].send(reply[start : start + 5])

        threading.Timer(0.0, send).start()

    daemon.script[Ping] = in_pieces
    assert kv.ping()


def test_a_cut_frame_waits_for_its_rest_without_harm(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    reply = daemon.frame(_id_of_next(kv) + 1, Matched(3, 3, 0.0))
    daemon.script[Match] = lambda request: reply[:30]
    assert kv.match(ns, KEYS, timeout_s=0.05).reason == "deadline"
    daemon.script[Match] = lambda request: (
        reply[30:] + daemon.frame(_id_of_next(kv), Matched(5, 5, 0.0))
    )
    assert kv.match(ns, KEYS).blobs == 5


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        pack(1, 7, b"no message"),
        pack(1, 7, b"\x92\x02"),
        b"BSF1" + b"\xff" * 20,
        pack(1, 999, b"\x92\x02\xc4\x00"),
    ],
    ids=["another protocol", "garbage", "cut body", "huge length", "another boot"],
)
def test_a_breach_of_the_protocol_costs_the_connection_only(
    answer: bytes, daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.script[Match] = lambda request: answer
    assert kv.match(ns, KEYS).reason == "unavailable"
    del daemon.script[Match]
    assert kv.match(ns, KEYS).blobs == len(KEYS)
    assert len(daemon.seen(Hello)) == 3  # once more within the failed call, then for the next


def test_all_calls_of_a_lost_connection_end_at_once(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    calls = [pool.submit(kv.match, ns, KEYS, timeout_s=60) for _ in range(5)]
    poll_until(lambda: len(daemon.unanswered) == 5)
    daemon.hang_up()
    poll_until(lambda: len(daemon.unanswered) == 10)  # each was asked once more
    assert len(daemon.seen(Hello)) == 2
    daemon.hang_up()
    assert {call.result(5).reason for call in calls} == {"unavailable"}


def test_closing_ends_calls_of_other_threads(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    calls = [pool.submit(kv.match, ns, KEYS, timeout_s=60) for _ in range(3)]
    poll_until(lambda: len(daemon.unanswered) == 3)
    kv.close()
    assert {call.result(5).reason for call in calls} == {"unavailable"}


def test_an_idle_connection_that_was_lost_is_replaced_within_the_call(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.hang_up()
    assert kv.match(ns, KEYS).blobs == len(KEYS)


def test_a_daemon_that_accepts_but_does_not_greet_is_unavailable_by_the_deadline(
    daemon: ScriptedDaemon, kv: Client, pool: ThreadPoolExecutor
) -> None:
    daemon.greet = lambda: None
    daemon.hang_up()
    started_s = time.monotonic()
    calls = [pool.submit(kv.ping, timeout_s=0.2) for _ in range(4)]
    assert [call.result(5) for call in calls] == [False] * 4
    assert time.monotonic() - started_s < 2
    with pytest.raises(Unavailable, match="did not greet in time"):
        Client(daemon.address, timeout_s=0.1)


def test_a_full_queue_of_new_connections_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(Unavailable, match="did not greet in time"):
            Client(f"unix:{path}", timeout_s=0.1)


def test_a_daemon_that_reads_nothing_costs_deadlines_and_no_more(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    go = threading.Event()

    def stall(request: Request) -> Matched:
        assert go.wait(10)
        return match_n(request)

    daemon.script[Match] = stall
    many = NAMESPACE.keys(range(4 * 5000))  # 160 kB each: more than the socket takes
    for _ in range(4):
        assert kv.match(ns, many, timeout_s=0.05).reason == "deadline"
    assert kv.ping(timeout_s=0.05) is False
    go.set()
    assert kv.match(ns, KEYS[:3]).blobs == 3
    assert [len(r.keys) for r in daemon.seen(Match) if isinstance(r, Match)] == [160000] * 4 + [96]


def test_a_daemon_that_never_reads_again_is_given_up(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "UNSENT_BYTES_MAX", 300_000)
    go = threading.Event()

    def stall(request: Request) -> Matched:
        assert go.wait(10)
        return match_n(request)

    daemon.script[Match] = stall
    many = NAMESPACE.keys(range(4 * 5000))
    reasons = [kv.match(ns, many, timeout_s=0.05).reason for _ in range(5)]
    assert reasons[:3] == ["deadline"] * 3
    go.set()
    assert kv.match(ns, KEYS[:3]).blobs == 3
    assert len(daemon.seen(Hello)) == 2


class Interrupt(Exception):
    """Raised by a signal handler, as KeyboardInterrupt is."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    def raise_it(*args: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    gc.disable()  # callbacks of the collector, which others register, cannot pass the interrupt on
    yield lambda after_s: signal.setitimer(signal.ITIMER_REAL, after_s)  # type: ignore[misc]
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.enable()
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_leaves_the_client_usable(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, alarm: Callable[[float], None]
) -> None:
    daemon.silence(Get)
    alarm(0.05)
    with pytest.raises(Interrupt):
        kv.get(ns, KEYS, timeout_s=10)
    daemon.answer_late()
    assert len(kv.get(ns, KEYS[:2])) == 2
    assert len(daemon.seen(Hello)) == 1, "nothing was lost, so the connection is kept"
    assert 1 in poll_until(daemon.released), "the lease that came too late is given back"


# Nor can a finalizer that the interrupt happens to hit.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_never_mix_replies(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, alarm: Callable[[float], None]
) -> None:
    daemon.script[Match] = match_n
    rng = random.Random(11)
    interrupted = 0
    for _ in range(300):
        try:
            alarm(rng.uniform(1e-6, 200e-6))
            for n in range(1, 30):
                assert kv.match(ns, KEYS[: n % 10 + 1]).blobs == n % 10 + 1
        except Interrupt:
            interrupted += 1
        finally:
            alarm(0)
        assert kv.match(ns, KEYS[:7]).blobs == 7
    assert interrupted > 100


def test_a_signal_handler_may_close_the_client_it_interrupts(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    daemon.silence(Match)
    before = signal.signal(signal.SIGALRM, lambda *args: kv.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert kv.match(ns, KEYS, timeout_s=10).reason == "unavailable"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_request_ids_wrap_round_before_they_outgrow_the_frame(
    daemon: ScriptedDaemon, kv: Client
) -> None:
    connection: Any = connection_of(kv)
    connection._numbers = iter([2**32 - 3, 2**32 - 2, 2**32 - 1, 2**32])
    assert [kv.ping() for _ in range(4)] == [True] * 4


def test_releases_reach_a_daemon_that_was_not_reading_when_they_were_owed(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    leases = [kv.get(ns, KEYS[:1]) for _ in range(3)]
    go = threading.Event()

    def stall(request: Request) -> Pong:
        assert go.wait(10)
        return Pong()

    daemon.script[Ping] = stall
    assert kv.ping(timeout_s=0.02) is False
    many = NAMESPACE.keys(range(4 * 20000))
    assert kv.match(ns, many, timeout_s=0.05).reason == "deadline"  # fills the socket
    for lease in leases:
        lease.release()
    assert daemon.released() == []
    go.set()
    assert kv.match(ns, KEYS).blobs == len(KEYS)
    assert sorted(poll_until(daemon.released)) == [1, 2, 3]
    assert len(daemon.seen(Release)) == 1


def test_a_release_that_went_out_in_part_is_sent_again_over_the_next_connection(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = kv.get(ns, KEYS[:1])
    connection = connection_of(kv)
    monkeypatch.setattr(connection, "_send", lambda data: 3)
    lease.release()
    assert connection._unsent
    connection.fail("as the test wants")
    assert kv.ping()
    assert poll_until(daemon.released) == [1]


def test_a_daemon_that_was_found_again_is_told_what_is_held(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    numbers = itertools.count(5)
    size = daemon.arena_bytes
    daemon.greet = lambda: Welcome(1, daemon.boot_id, size, 8 << 20, size, next(numbers))
    with Client(daemon.address) as own:
        held = [own.get(ns, KEYS[:1]) for _ in range(2)]
        for _ in range(2):
            daemon.hang_up()
            assert own.ping()
        poll_until(lambda: len(daemon.seen(Holding)) == 2)
        assert daemon.seen(Holding) == [Holding(lost, [1, 2], [], []) for lost in ([5], [5, 6])]
        del held


def test_errors_of_one_thread_are_not_another_threads(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, pool: ThreadPoolExecutor
) -> None:
    daemon.silence(Match)
    connection: Any = connection_of(kv)
    calls: list[Future[Any]] = [
        pool.submit(connection.ask, Match(ns.id, KEYS.packed, 32), time.monotonic() + 60)
        for _ in range(3)
    ]
    poll_until(lambda: len(daemon.unanswered) == 3)
    daemon.hang_up()
    errors = [call.exception(5) for call in calls]
    assert all(isinstance(error, BlobStoreError) for error in errors)
    assert len(set(map(id, errors))) == 3


def test_a_client_that_is_dropped_closes_its_socket(daemon: ScriptedDaemon) -> None:
    gc.disable()  # no cycle may stand in the way
    try:
        before = len(os.listdir("/proc/self/fd"))
        kv = Client(daemon.address)
        assert kv.ping()
        assert len(os.listdir("/proc/self/fd")) > before
        del kv
        poll_until(lambda: len(os.listdir("/proc/self/fd")) == before)
    finally:
        gc.enable()


def _id_of_next(kv: Client) -> int:
    """The id of the request that was sent last, or is sent next if none is under way."""
    connection: Any = connection_of(kv)
    following: int = connection._numbers.__reduce__()[1][0]
    return max(connection._pending, default=following)


def test_poll_takes_the_longest_wait() -> None:
    from blobstore.clients import connection

    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    assert poll.poll(connection._FOREVER_S * 1e3)
    os.close(read_end)
    os.close(write_end)
