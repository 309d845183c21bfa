"""Leases: what they give, and when they end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, Client, KVLayout, LayerGroup, Lease, Namespace, Shard
from blobstore.errors import InvalidRequest
from blobstore.protocol import Failed, Get, Ping, Release, Wait, Waited
from tests.support.connections import connection_of
from tests.support.polling import poll_until
from tests.support.scripted_daemon import ScriptedDaemon

LAYOUT = KVLayout(
    (LayerGroup.attention(layers=3, heads=4, head_size=8, dtype="bf16"),), head_groups=2
)
NAMESPACE = Namespace(model="m", layout=LAYOUT, tokens_per_blob=16)
NBYTES = NAMESPACE.nbytes
KEYS = NAMESPACE.keys(range(16 * 5))


def payload(number: int) -> bytes:
    rng = np.random.default_rng(number)
    data: bytes = rng.integers(0, 256, NBYTES, dtype=np.uint8).tobytes()
    return data


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        for number, key in enumerate(KEYS[:4]):
            daemon.store(NAMESPACE, key, payload(number))
        yield daemon


@pytest.fixture
def kv(daemon: ScriptedDaemon) -> Iterator[Client]:
    with Client(daemon.address) as kv:
        yield kv


@pytest.fixture
def ns(kv: Client) -> BoundNamespace:
    return kv.namespace(NAMESPACE)


def settled(kv: Client, daemon: ScriptedDaemon) -> list[int]:
    """Leases released by now: the first ping sends what is owed, the second arrives after it."""
    assert kv.ping()
    assert kv.ping()
    return daemon.released()


def test_a_lease_is_the_leading_blobs_in_place(kv: Client, ns: BoundNamespace) -> None:
    with kv.get(ns, KEYS) as lease:
        assert len(lease) == 4
        assert lease.reason == "absent"
        assert lease.served == {"dram": 4}
        assert [bytes(view) for view in lease] == [payload(i) for i in range(4)]
        assert bytes(lease[3]) == bytes(lease[-1]) == payload(3)
        assert [bytes(view) for view in lease[1:3]] == [payload(1), payload(2)]
        assert [bytes(view) for view in lease[np.int64(2) :]] == [payload(2), payload(3)]
        assert repr(lease) == "<Lease of 4 blobs, absent>"


def test_views_are_read_only_and_of_the_shared_memory(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with kv.get(ns, KEYS[:1]) as lease:
        view = lease[0]
        assert view.readonly
        assert view.nbytes == NBYTES
        with pytest.raises(TypeError):
            view[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            np.frombuffer(view, np.uint8)[0] = 1
        daemon.overwrite(daemon.blobs[NAMESPACE.id, KEYS[0]].offset, b"\x99")
        assert view[0] == 0x99


def test_what_is_not_leased_is_out_of_range(kv: Client, ns: BoundNamespace) -> None:
    with kv.get(ns, KEYS) as lease:
        for index in (4, -5):
            with pytest.raises(IndexError):
                lease[index]
            with pytest.raises(IndexError):
                lease.parts(index)
        with pytest.raises(TypeError):
            lease["0"]  # type: ignore[call-overload]


def test_a_miss_is_an_empty_lease_with_a_reason(kv: Client, ns: BoundNamespace) -> None:
    with kv.get(ns, KEYS[4:]) as lease:
        assert len(lease) == 0
        assert not lease
        assert lease.reason == "absent"
        assert list(lease) == []
        with pytest.raises(IndexError):
            lease[0]


def test_a_zero_length_blob_is_a_hit(daemon: ScriptedDaemon, kv: Client) -> None:
    empty = Namespace(model="empty", layout=KVLayout.opaque(0), tokens_per_blob=16)
    key = empty.keys(range(16))
    daemon.store(empty, key[0], b"")
    with kv.get(kv.namespace(empty), key) as lease:
        assert len(lease) == 1
        assert bytes(lease[0]) == b""
        assert lease.reason == ""


def test_parts_cover_a_blob_in_order(kv: Client, ns: BoundNamespace) -> None:
    with kv.get(ns, KEYS[:2]) as lease:
        parts = lease.parts(1)
        assert len(parts) == lease.n_parts == 6
        assert b"".join(parts) == payload(1)
        assert all(part.readonly for part in parts)
        assert bytes(lease.part(1, 4)) == bytes(parts[4])


def test_a_shard_sees_its_own_parts_only(kv: Client) -> None:
    seen = b""
    for rank in range(2):
        ns = kv.namespace(NAMESPACE, Shard(tp_rank=rank, tp_size=2))
        with kv.get(ns, KEYS[:1]) as lease:
            mine = lease.parts(0)
            whole = LAYOUT.parts(16)
            assert [bytes(part) for part in mine] == [
                payload(0)[whole[n].offset : whole[n].offset + whole[n].nbytes]
                for n in LAYOUT.shard_parts(ns.shard)
            ]
            seen += b"".join(mine)
    assert len(seen) == NBYTES


def test_a_lease_ends_with_its_block(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with kv.get(ns, KEYS) as lease:
        assert lease[0][0] == payload(0)[0]
        assert settled(kv, daemon) == []
    assert settled(kv, daemon) == [1]
    assert len(lease) == 4
    for use in (
        lambda: lease[0],
        lambda: list(lease),
        lambda: lease[:1],
        lambda: lease.parts(0),
        lambda: lease.part(0, 0),
        lambda: lease.wait(0),
    ):
        with pytest.raises(InvalidRequest, match="was released"):
            use()
    lease.release()
    assert settled(kv, daemon) == [1]


def test_a_lease_outlives_its_block_while_a_view_lives(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with kv.get(ns, KEYS) as lease:
        array = np.frombuffer(lease[2], np.uint8)[10:20]
        part = lease.parts(1)[3]
    assert settled(kv, daemon) == []
    assert array.tobytes() == payload(2)[10:20]
    del array
    assert settled(kv, daemon) == []
    assert part.nbytes == NBYTES // 6
    del part
    assert settled(kv, daemon) == [1]


def test_an_idle_client_releases_at_once(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with kv.get(ns, KEYS) as lease:
        view = lease[0]
    del view
    assert poll_until(daemon.released) == [1]


def test_an_exception_in_the_block_ends_the_lease(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    with pytest.raises(ZeroDivisionError), kv.get(ns, KEYS) as lease:
        lease[0][0] // 0
    assert settled(kv, daemon) == [1]


def test_a_lease_that_is_dropped_ends(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    kv.get(ns, KEYS)
    assert settled(kv, daemon) == [1]
    view = kv.get(ns, KEYS)[0]
    assert settled(kv, daemon) == [1]
    del view
    assert settled(kv, daemon) == [1, 2]


def test_a_lease_in_a_cycle_ends_when_that_is_collected(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    class Node:
        lease: Lease
        myself: Node

    gc.disable()  # it would begin at any allocation
    try:
        node = Node()
        node.lease, node.myself = kv.get(ns, KEYS), node
        gone = weakref.ref(node)
        del node
        assert gone() is not None
        assert settled(kv, daemon) == []
    finally:
        gc.enable()
    gc.collect()
    assert settled(kv, daemon) == [1]


def test_a_last_view_may_die_on_any_thread(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    views = [kv.get(ns, KEYS)[0] for _ in range(20)]
    threads = [threading.Thread(target=views.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(settled(kv, daemon)) == list(range(1, 21))


def test_a_last_view_may_die_in_the_middle_of_a_send(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = kv.get(ns, KEYS)
    connection = connection_of(kv)
    send = connection._send

    def send_and_collect(data: bytearray) -> int:
        lease.release()  # as the garbage collector may, wherever memory is allocated
        sent: int = send(data)
        return sent

    monkeypatch.setattr(connection, "_send", send_and_collect)
    assert kv.ping()
    monkeypatch.undo()
    assert poll_until(daemon.released) == [1]
    assert [type(r) for r in daemon.requests[-2:]] == [Ping, Release], "no frame cut another"


def test_a_finalizer_does_not_wait_for_a_thread_that_sends(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    leases = [kv.get(ns, KEYS) for _ in range(50)]
    connection = connection_of(kv)
    sending, go = threading.Event(), threading.Event()

    def send_slowly() -> None:
        with connection._sending:
            sending.set()
            assert go.wait(10)

    thread = threading.Thread(target=send_slowly)
    thread.start()
    assert sending.wait(5)
    for lease in leases:
        lease.release()
    assert len(connection._returns.owed) == 50
    go.set()
    thread.join()
    assert sorted(settled(kv, daemon)) == list(range(1, 51))
    assert len(daemon.seen(Release)) == 1


def test_bytes_stay_right_after_the_client_was_closed(
    daemon: ScriptedDaemon, ns: BoundNamespace
) -> None:
    kv = Client(daemon.address)
    lease = kv.get(ns, KEYS)
    view = lease[1]
    kv.close()
    assert bytes(view) == payload(1)
    assert bytes(lease[0]) == payload(0), "a lease that is open stays so"
    assert daemon.released() == []
    lease.release()
    assert kv.ping() is False
    assert daemon.released() == []
    peers = list(daemon.peers)
    del view
    assert poll_until(daemon.released) == [1]
    poll_until(lambda: len(daemon.peers) == len(peers) - 1, what="the connection is closed")


def test_bytes_stay_right_after_the_client_was_dropped(
    daemon: ScriptedDaemon, ns: BoundNamespace
) -> None:
    view = Client(daemon.address).get(ns, KEYS)[1]
    gc.collect()
    assert bytes(view) == payload(1)
    assert daemon.released() == []
    del view
    assert poll_until(daemon.released) == [1]


def test_a_lease_of_a_lost_connection_is_released_over_the_next(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    lease = kv.get(ns, KEYS)
    dying = kv.get(ns, KEYS[:1])
    daemon.hang_up()
    poll_until(lambda: not daemon.peers)
    dying.release()
    assert bytes(lease[0]) == payload(0)
    assert settled(kv, daemon) == [2]
    assert bytes(lease[1]) == payload(1)
    lease.release()
    assert settled(kv, daemon) == [2, 1]


def test_the_arena_is_mapped_once_for_all_connections_to_one_run(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    before = kv.get(ns, KEYS)
    daemon.hang_up()
    after = kv.get(ns, KEYS)
    assert kv.boot_id == 7
    assert np.frombuffer(before[0], np.uint8).ctypes.data == (
        np.frombuffer(after[0], np.uint8).ctypes.data
    )


def test_views_of_an_earlier_run_stay_right_and_owe_nothing(
    daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
) -> None:
    old = kv.get(ns, KEYS)
    daemon.restart()
    daemon.store(NAMESPACE, KEYS[0], b"\xee" * NBYTES)
    new = kv.get(ns, KEYS)
    assert bytes(new[0]) == b"\xee" * NBYTES
    assert [bytes(view) for view in old] == [payload(i) for i in range(4)]
    old.release()
    assert settled(kv, daemon) == []
    assert list(daemon.leases) == [1], "lease 1 of this run is not lease 1 of the last"
    new.release()
    assert settled(kv, daemon) == [1]


def test_a_lease_keeps_its_client_alive(daemon: ScriptedDaemon, ns: BoundNamespace) -> None:
    lease = Client(daemon.address).get(ns, KEYS, stream=True)
    gc.collect()
    assert lease.wait(0)


class TestStream:
    def test_bytes_are_refused_until_they_were_waited_for(
        self, kv: Client, ns: BoundNamespace
    ) -> None:
        with kv.get(ns, KEYS, stream=True) as lease:
            parts = lease.parts(1)
            for use in (
                lambda: lease[1],
                lambda: lease[-3],
                lambda: list(lease),
                lambda: lease[:2],
                lambda: parts[0],
                lambda: lease.part(1, -6),
                lambda: list(parts),
            ):
                with pytest.raises(InvalidRequest, match="wait for it first"):
                    use()
            assert lease.wait(1, 0)
            part = LAYOUT.parts(16)[0]
            assert bytes(parts[0]) == payload(1)[: part.nbytes]
            with pytest.raises(InvalidRequest, match="wait for it first"):
                lease[1]
            assert lease.wait(1)
            assert bytes(lease[1]) == bytes(lease[-3]) == b"".join(parts) == payload(1)
            assert [bytes(p) for p in parts[1:3]] == [bytes(parts[1]), bytes(parts[2])]

    def test_a_wait_names_the_bytes_of_the_part(
        self, daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
    ) -> None:
        with kv.get(ns, KEYS, stream=True, wait=True) as lease:
            assert lease.wait(-1, 2, timeout_s=1.5)
            assert lease.wait(3)
            assert lease.wait(3, 5)
        (get,) = daemon.seen(Get)
        assert isinstance(get, Get)
        assert (get.stream, get.wait_for_writers) == (True, True)
        part = LAYOUT.parts(16)[2]
        one, whole = [wait for wait in daemon.seen(Wait) if isinstance(wait, Wait)]
        assert (one.lease_id, one.index) == (1, 3)
        assert (one.start, one.end) == (part.offset, part.offset + part.nbytes)
        assert 1.0 < one.timeout_s < 1.5
        assert (whole.start, whole.end) == (0, NBYTES)

    def test_a_shard_waits_for_its_own_parts(self, daemon: ScriptedDaemon, kv: Client) -> None:
        ns = kv.namespace(NAMESPACE, Shard(tp_rank=1, tp_size=2))
        with kv.get(ns, KEYS, stream=True) as lease:
            assert lease.wait(0, 1)
            number = LAYOUT.shard_parts(ns.shard)[1]
            part = LAYOUT.parts(16)[number]
            assert bytes(lease.parts(0)[1]) == (payload(0)[part.offset : part.offset + part.nbytes])
        (wait,) = daemon.seen(Wait)
        assert isinstance(wait, Wait)
        assert wait.start == part.offset

    def test_a_wait_that_fails_says_why(
        self, daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
    ) -> None:
        with kv.get(ns, KEYS[:4], stream=True) as lease:
            daemon.script[Wait] = lambda request: Waited("storage_failed")
            assert lease.wait(0) is False
            assert lease.reason == "storage_failed"
            daemon.script[Wait] = lambda request: Failed("busy", "")
            assert lease.wait(0) is False
            assert lease.reason == "busy"
            daemon.silence(Wait)
            assert lease.wait(0, timeout_s=0.05) is False
            assert lease.reason == "deadline"
            with pytest.raises(InvalidRequest, match="wait for it first"):
                lease[0]
            daemon.hang_up()
            assert lease.wait(0) is False
            assert lease.reason == "unavailable"

    def test_a_lease_that_does_not_stream_need_not_wait(
        self, daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
    ) -> None:
        with kv.get(ns, KEYS) as lease:
            assert lease.wait(0)
            assert lease.wait(3, 5)
            with pytest.raises(IndexError):
                lease.wait(4)
            with pytest.raises(IndexError):
                lease.wait(0, 6)
        assert daemon.seen(Wait) == []

    def test_it_ends_as_others_do(
        self, daemon: ScriptedDaemon, kv: Client, ns: BoundNamespace
    ) -> None:
        gc.disable()
        try:
            kv.get(ns, KEYS, stream=True)
            assert settled(kv, daemon) == [1]
        finally:
            gc.enable()
        with kv.get(ns, KEYS, stream=True) as lease:
            parts = lease.parts(0)
            assert lease.wait(0)
        with pytest.raises(InvalidRequest, match="was released"):
            parts[0]
        assert settled(kv, daemon) == [1, 2]
