"""get_into and put_from: whole buffers, window by window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import (
    BoundNamespace,
    KVLayout,
    LayerGroup,
    Namespace,
    Shard,
    WriterGroup,
)
from blobstore.clients.windows import WINDOW_BYTES, windows
from blobstore.errors import InvalidRequest, SizeMismatch, StorageFailed, Unavailable
from blobstore.protocol import (
    NO_EXTENT,
    Abort,
    Failed,
    Get,
    Leased,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    Seal,
    Sealed,
)
from tests.support.both_clients import KINDS, connect
from tests.support.polling import poll_until
from tests.support.scripted_daemon import Script, ScriptedDaemon

NBYTES = 10_000
NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES), tokens_per_blob=16)
KEYS = NAMESPACE.keys(range(16 * 10))
NO_EXTENT_PACKED = NO_EXTENT.to_bytes(8, "little") + bytes(8)
PER_WINDOW = 3
"""Blobs in a window, by the cap of the scripted daemon."""


def payload(number: int, nbytes: int = NBYTES) -> bytes:
    data: bytes = np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    return data


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        daemon.lent_bytes_max = 4 * PER_WINDOW * NBYTES
        yield daemon


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, daemon: ScriptedDaemon) -> Iterator[Any]:
    with connect(request.param, daemon.address) as kv:
        yield kv


@pytest.fixture
def ns(kv: Any) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(NAMESPACE)
    return bound


def store(daemon: ScriptedDaemon, n: int) -> None:
    for number, key in enumerate(KEYS[:n]):
        daemon.store(NAMESPACE, key, payload(number))


def n_keys(requests: list[Request]) -> list[int]:
    return [len(r.keys) // 32 for r in requests if isinstance(r, Get | Reserve)]


def unless_last(daemon: ScriptedDaemon, request: Request) -> Reply | None:
    """The answer to the third Seal; none to those before."""
    return daemon.default(request) if len(daemon.seen(Seal)) == 3 else None


def all_ended(kv: Any, daemon: ScriptedDaemon) -> bool:
    """Whether nothing stays leased or reserved."""
    assert kv.ping()
    return not daemon.leases and not daemon.reservations


class TestWindows:
    def test_blobs_share_a_window_up_to_its_size(self) -> None:
        assert windows([10] * 5, 80) == [range(2), range(2, 4), range(4, 5)]
        assert windows([10, 15, 5, 20, 1], 80) == [range(1), range(1, 3), range(3, 4), range(4, 5)]
        assert windows([0] * 7, 80) == [range(7)]
        assert windows([], 80) == []

    def test_a_blob_above_the_size_has_a_window_of_its_own(self) -> None:
        assert windows([1, 100, 1, 1], 8) == [range(1), range(1, 2), range(2, 4)]
        assert windows([1, 1], 0) == [range(1), range(1, 2)]

    def test_a_window_is_bounded_however_much_is_lent(self) -> None:
        assert windows([WINDOW_BYTES // 2] * 3, 1 << 50) == [range(2), range(2, 3)]


class TestGetInto:
    def test_leading_blobs_are_copied_and_released(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 10)
        buffers = [bytearray(NBYTES) for _ in KEYS]
        assert kv.get_into(ns, KEYS, buffers) == 10
        assert [bytes(buffer) for buffer in buffers] == [payload(i) for i in range(10)]
        assert n_keys(daemon.seen(Get)) == [3, 3, 3, 1]
        assert all_ended(kv, daemon)

    def test_one_buffer_takes_all_blobs_in_a_row(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 10)
        table = np.zeros((10, NBYTES), np.uint8)
        assert kv.get_into(ns, KEYS, table) == 10
        assert table.tobytes() == b"".join(payload(i) for i in range(10))
        assert kv.get_into(ns, KEYS[:2], memoryview(bytearray(2 * NBYTES))) == 2

    @pytest.mark.parametrize("held", [0, 1, 3, 4, 9])
    def test_it_says_how_many_are_there_and_fills_no_more(
        self, held: int, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, held)
        table = np.full((10, NBYTES), 0xAA, np.uint8)
        assert kv.get_into(ns, KEYS, table) == held
        assert [row.tobytes() for row in table[:held]] == [payload(i) for i in range(held)]
        assert (table[held:] == 0xAA).all()
        assert all_ended(kv, daemon)

    def test_the_next_window_is_asked_for_before_this_one_is_released(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 9)
        kv.get_into(ns, KEYS[:9], np.zeros((9, NBYTES), np.uint8))
        assert kv.ping()
        order = [type(r).__name__[0] for r in daemon.seen(Get, Release)]
        assert "".join(order) == "GGRGRR"

    @pytest.mark.parametrize("code", ["storage_failed", "busy"])
    def test_a_fault_half_way_counts_what_was_copied(
        self, code: str, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 10)
        answers: Iterator[Script] = iter(
            [daemon.default, daemon.default, lambda request: Failed(code, "")]
        )
        daemon.script[Get] = lambda request: next(answers)(request)
        table = np.zeros((10, NBYTES), np.uint8)
        assert kv.get_into(ns, KEYS, table) == 6
        assert [row.tobytes() for row in table[:6]] == [payload(i) for i in range(6)]
        assert all_ended(kv, daemon)

    def test_a_deadline_half_way_counts_what_was_copied(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 10)
        answers: Iterator[Script] = iter([daemon.default, lambda request: None])
        daemon.script[Get] = lambda request: next(answers)(request)
        assert kv.get_into(ns, KEYS, np.zeros((10, NBYTES), np.uint8), timeout_s=0.1) == 3
        daemon.answer_late()
        assert kv.ping()
        poll_until(lambda: not daemon.leases, what="the late lease is released")

    def test_a_connection_lost_half_way_counts_what_was_copied(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 10)

        def hang_up(request: Request) -> None:
            daemon.hang_up()

        answers: Iterator[Script] = iter([daemon.default, hang_up])
        daemon.script[Get] = lambda request: next(answers)(request)
        assert kv.get_into(ns, KEYS, np.zeros((10, NBYTES), np.uint8)) == 3
        assert all_ended(kv, daemon)

    def test_a_tail_takes_a_smaller_buffer(self, daemon: ScriptedDaemon, kv: Any) -> None:
        layout = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=8, dtype="bf16"),))
        tailed = Namespace(model="t", layout=layout, tokens_per_blob=16)
        keys = tailed.keys(range(16 + 5), tail=True)
        sizes = [layout.nbytes(16), layout.nbytes(5)]
        for key, nbytes in zip(keys, sizes, strict=True):
            daemon.store(tailed, key, payload(nbytes, nbytes))
        buffers = [bytearray(nbytes) for nbytes in sizes]
        assert kv.get_into(kv.namespace(tailed), keys, buffers) == 2
        assert [bytes(b) for b in buffers] == [payload(nbytes, nbytes) for nbytes in sizes]

    def test_a_shard_copies_its_own_parts(self, daemon: ScriptedDaemon, kv: Any) -> None:
        layout = KVLayout(
            (LayerGroup.attention(layers=3, heads=4, head_size=8, dtype="bf16"),), head_groups=4
        )
        sharded = Namespace(model="s", layout=layout, tokens_per_blob=16)
        keys = sharded.keys(range(32))
        for number, key in enumerate(keys):
            daemon.store(sharded, key, payload(number, sharded.nbytes))
        for shard in (Shard(1, 2), Shard(3, 4), Shard(pp_rank=2, pp_size=3), Shard(0, 2, 1, 3)):
            ns = kv.namespace(sharded, shard)
            parts = [layout.parts(16)[n] for n in layout.shard_parts(shard)]
            buffers = [bytearray(sum(part.nbytes for part in parts)) for _ in keys]
            assert kv.get_into(ns, keys, buffers) == 2
            for number, buffer in enumerate(buffers):
                whole = payload(number, sharded.nbytes)
                assert bytes(buffer) == b"".join(
                    whole[part.offset : part.offset + part.nbytes] for part in parts
                )

    def test_wrong_sizes_are_refused_with_both_numbers(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        with pytest.raises(SizeMismatch, match=r"buffers\[1\] has 5 bytes.*declares 10000"):
            kv.get_into(ns, KEYS[:2], [bytearray(NBYTES), bytearray(5)])
        with pytest.raises(SizeMismatch, match="2 keys take 2 buffers, found 1"):
            kv.get_into(ns, KEYS[:2], [bytearray(NBYTES)])
        with pytest.raises(SizeMismatch, match=r"has 19999 bytes.*declares 20000"):
            kv.get_into(ns, KEYS[:2], bytearray(19999))
        with pytest.raises(InvalidRequest, match="read-only"):
            kv.get_into(ns, KEYS[:1], [bytes(NBYTES)])
        assert daemon.seen(Get) == []

    def test_a_window_that_found_no_room_beside_the_one_before_is_asked_for_again(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 6)

        def get(request: Request) -> Reply:
            whole = daemon.default(request)
            assert isinstance(whole, Leased)
            if len(daemon.seen(Get)) == 2:
                return Leased(whole.lease_id, whole.extents[:16], "no_room", {"dram": 1})
            return whole

        daemon.script[Get] = get
        assert kv.get_into(ns, KEYS[:6], np.zeros((6, NBYTES), np.uint8)) == 6
        assert n_keys(daemon.seen(Get)) == [3, 3, 3]
        assert all_ended(kv, daemon)


class TestPutFrom:
    def test_all_blobs_are_stored_window_by_window(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        buffers = [payload(i) for i in range(10)]
        assert kv.put_from(ns, KEYS, buffers, retention="volatile") == ["stored"] * 10
        assert [daemon.payload(NAMESPACE, key) for key in KEYS] == buffers
        reserves = [r for r in daemon.seen(Reserve) if isinstance(r, Reserve)]
        assert n_keys(list(reserves)) == [3, 3, 3, 1]
        assert [r.parent for r in reserves] == [b"", KEYS[2], KEYS[5], KEYS[8]]
        assert {r.retention for r in reserves} == {"volatile"}
        assert all_ended(kv, daemon)

    def test_the_next_window_is_reserved_while_this_one_is_sealed(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        def reserve(request: Request) -> Reply:
            daemon.catch_up()  # only now is the seal of the window before answered
            return daemon.default(request)

        daemon.script[Reserve] = reserve
        daemon.script[Seal] = lambda request: unless_last(daemon, request)
        assert kv.put_from(ns, KEYS[:9], np.zeros((9, NBYTES), np.uint8)) == ["stored"] * 9
        order = [type(r).__name__ for r in daemon.seen(Reserve, Seal)]
        assert order == ["Reserve", "Seal"] * 3

    def test_a_daemon_that_wants_to_see_the_parent_first_gets_its_way(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        def reserve(request: Request) -> Reply:
            assert isinstance(request, Reserve)
            n = len(request.keys) // 32
            orphan = request.parent and (NAMESPACE.id, request.parent) not in daemon.blobs
            daemon.catch_up()
            if orphan:
                return Reserved(99, NO_EXTENT_PACKED * n, ["orphan"] * n, 60.0)
            return daemon.default(request)

        daemon.script[Reserve] = reserve
        daemon.script[Seal] = lambda request: unless_last(daemon, request)
        assert kv.put_from(ns, KEYS[:9], np.zeros((9, NBYTES), np.uint8)) == ["stored"] * 9
        order = [type(r).__name__ for r in daemon.seen(Reserve, Seal)]
        assert order == [
            "Reserve",
            "Seal",
            "Reserve",
            "Reserve",
            "Seal",
            "Reserve",
            "Reserve",
            "Seal",
        ]

    def test_from_the_first_refused_window_on_all_is_refused(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        def seal(request: Request) -> Any:
            if len(daemon.seen(Seal)) == 2:
                return Sealed(["stored", "refused", "refused"], ["", "io_error", "orphan"])
            return daemon.default(request)

        daemon.script[Seal] = seal
        results = kv.put_from(ns, KEYS, np.zeros((10, NBYTES), np.uint8))
        assert results == ["stored"] * 4 + ["refused"] * 6
        assert len(daemon.seen(Seal)) == 2
        assert kv.ping()
        assert len(daemon.seen(Abort)) == 1, "the window that was copied meanwhile"

    def test_durable_blobs_that_are_refused_raise(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.script[Seal] = lambda request: Sealed(
            ["stored", "refused", "refused"], ["", "storage_failed", "orphan"]
        )
        with pytest.raises(StorageFailed, match=r"blob 1 .*storage_failed"):
            kv.put_from(ns, KEYS, np.zeros((10, NBYTES), np.uint8), retention="durable")
        daemon.stop()
        with pytest.raises(Unavailable):
            kv.put_from(ns, KEYS, np.zeros((10, NBYTES), np.uint8), retention="durable")
        daemon.start()

    def test_blobs_that_exist_are_compared_where_they_are(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        store(daemon, 4)
        buffers = [payload(i) for i in range(5)]
        buffers[2] = payload(99)
        results = kv.put_from(ns, KEYS[:5], buffers)
        assert results == ["exists", "exists", "divergent", "exists", "stored"]

    def test_ranks_put_their_own_parts(self, daemon: ScriptedDaemon, kv: Any) -> None:
        layout = KVLayout(
            (LayerGroup.attention(layers=3, heads=4, head_size=8, dtype="bf16"),), head_groups=2
        )
        sharded = Namespace(model="s", layout=layout, tokens_per_blob=16)
        key = sharded.keys(range(16))
        whole = payload(1, sharded.nbytes)
        extent = (4096).to_bytes(8, "little") + sharded.nbytes.to_bytes(8, "little")
        daemon.script[Reserve] = lambda request: Reserved(5, extent, [""], 60.0)
        daemon.script[Seal] = lambda request: Sealed(["partial"], [""])
        for rank in range(2):
            ns = kv.namespace(sharded, Shard(rank, 2))
            parts = [layout.parts(16)[n] for n in layout.shard_writes(ns.shard)]
            mine = b"".join(whole[part.offset : part.offset + part.nbytes] for part in parts)
            assert kv.put_from(ns, key, mine, group=WriterGroup("e")) == ["partial"]
        assert daemon.read(4096, sharded.nbytes) == whole

    def test_wrong_sizes_are_refused_before_anything_is_asked(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        with pytest.raises(SizeMismatch, match=r"buffers\[0\] has 9999 bytes.*declares 10000"):
            kv.put_from(ns, KEYS[:1], [bytes(9999)])
        assert daemon.seen(Reserve) == []


@pytest.mark.parametrize(("reason", "filled", "gets"), [("deadline", 1, 1), ("no_room", 10, 13)])
def test_a_lease_that_is_short_of_its_window_ends_the_copying_unless_it_is_for_room(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace, reason: str, filled: int, gets: int
) -> None:
    """What was copied may leave DRAM, and so makes room for the next.

    Three of the gets for lack of room were sent ahead, and so in vain.
    """
    store(daemon, 10)

    def short(request: Request) -> Any:
        whole = daemon.default(request)
        assert isinstance(whole, Leased)
        return Leased(whole.lease_id, whole.extents[:16], reason, {"dram": 1})

    daemon.script[Get] = short
    assert kv.get_into(ns, KEYS, np.zeros((10, NBYTES), np.uint8)) == filled
    assert len(daemon.seen(Get)) == gets
    assert all_ended(kv, daemon)
