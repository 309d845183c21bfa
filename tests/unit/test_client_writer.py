"""Writers: always writable, sealed at the end of their block, never seen before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import (
    BoundNamespace,
    Hint,
    KVLayout,
    LayerGroup,
    Namespace,
    Shard,
    WriterGroup,
)
from blobstore.digest import payload_digest, piece_digests
from blobstore.errors import (
    BlobStoreError,
    DeadlineExceeded,
    Full,
    InvalidRequest,
    Retryable,
    StorageFailed,
    Unavailable,
)
from blobstore.protocol import (
    NO_EXTENT,
    Abort,
    Done,
    Failed,
    Release,
    Request,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    SealParts,
)
from tests.support.both_clients import KINDS, connect
from tests.support.polling import poll_until
from tests.support.scripted_daemon import ScriptedDaemon

LAYOUT = KVLayout(
    (LayerGroup.attention(layers=2, heads=4, head_size=8, dtype="bf16"),), head_groups=4
)
NAMESPACE = Namespace(model="m", layout=LAYOUT, tokens_per_blob=16)
NBYTES = NAMESPACE.nbytes
KEYS = NAMESPACE.keys(range(16 * 3))


def payload(number: int, nbytes: int = NBYTES) -> bytes:
    data: bytes = np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    return data


def digest(data: bytes) -> bytes:
    return payload_digest(len(data), piece_digests(memoryview(data)))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        yield daemon


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, daemon: ScriptedDaemon) -> Iterator[Any]:
    with connect(request.param, daemon.address) as kv:
        yield kv


@pytest.fixture
def ns(kv: Any) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(NAMESPACE)
    return bound


def last(daemon: ScriptedDaemon, kind: type[Request]) -> Any:
    return poll_until(lambda: daemon.seen(kind))[-1]


def test_blobs_are_written_in_place_and_stored_at_the_end(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    with kv.put(ns, KEYS) as writer:
        assert len(writer) == 3
        assert writer.reasons == writer.results == ["", "", ""]
        for number in range(3):
            assert writer[number].nbytes == NBYTES
            writer[number][:] = payload(number)
        assert not daemon.blobs
        (reservation,) = daemon.reservations.values()
        assert daemon.read(*reservation.extents[1]) == payload(1)
    assert writer.results == ["stored"] * 3
    assert writer.reasons == ["", "", ""]
    assert [daemon.payload(NAMESPACE, key) for key in KEYS] == [payload(i) for i in range(3)]
    assert last(daemon, Seal).alive == []


def test_all_that_was_said_of_the_blobs_is_passed_on(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    keys = ns.keys(range(16 * 3 + 5), tail=True)
    hint = Hint(session="s", turn=3)
    with kv.put(
        ns, keys[1:], token_ids=range(16, 53), text="said", parent=keys[0], retention="volatile",
        hint=hint, timeout_s=2.0,
    ) as writer:  # fmt: skip
        assert writer[2].nbytes == LAYOUT.nbytes(5) < writer[1].nbytes
    reserve = last(daemon, Reserve)
    assert reserve.keys == keys[1:].packed
    assert (reserve.parent, reserve.tail_tokens) == (keys[0], 5)
    assert (reserve.retention, reserve.hint) == ("volatile", {"session": "s", "turn": 3})
    assert 1.0 < reserve.timeout_s < 2.0
    assert (reserve.group, reserve.epoch, reserve.parts) == ("", 0, [])
    assert reserve.tokens == np.arange(16, 53, dtype="<u4").tobytes()
    assert reserve.text == "said"


def test_a_negative_index_counts_from_the_end(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    with kv.put(ns, KEYS) as writer:
        writer[-1][:] = payload(9)
        assert bytes(writer[2]) == payload(9)
        for index in (3, -4):
            with pytest.raises(IndexError):
                writer[index]
    assert daemon.payload(NAMESPACE, KEYS[2]) == payload(9)


def test_keys_that_exist_get_memory_of_their_own_and_are_compared(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    for number in range(3):
        daemon.store(NAMESPACE, KEYS[number], payload(number))
    with kv.put(ns, KEYS) as writer:
        assert writer.reasons == writer.results == ["exists"] * 3
        writer[0][:] = payload(0)
        writer[1][:] = payload(99)
    assert writer.results == ["exists", "divergent", "exists"]
    assert last(daemon, Seal).digests == [digest(payload(0)), digest(payload(99)), b""]
    assert daemon.payload(NAMESPACE, KEYS[1]) == payload(1)


def test_keys_that_exist_are_not_compared_if_they_were_not_written(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    daemon.store(NAMESPACE, KEYS[0], payload(0))
    with kv.put(ns, KEYS[:2]) as writer:
        writer[1][:] = payload(1)
    assert writer.results == ["exists", "stored"]
    assert last(daemon, Seal).digests == []


def test_refused_blobs_are_writable_all_the_same(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    nothing = NO_EXTENT.to_bytes(8, "little") + bytes(8)
    daemon.script[Reserve] = lambda request: Reserved(5, nothing * 3, ["no_room"] * 3, 60.0)
    daemon.script[Seal] = lambda request: Sealed(["refused"] * 3, ["no_room"] * 3)
    with kv.put(ns, KEYS) as writer:
        assert writer.results == ["refused"] * 3
        for view in writer[0], writer[2]:
            view[:] = payload(1)
    assert writer.results == ["refused"] * 3
    assert writer.reasons == ["no_room"] * 3


def test_a_dead_daemon_leaves_the_writer_writable(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    daemon.stop()
    with kv.put(ns, KEYS) as writer:
        writer[0][:] = payload(0)
        assert bytes(writer[0]) == payload(0)
        assert not any(writer[1]), "untouched memory is zero"
    assert writer.results == ["refused"] * 3
    assert writer.reasons == ["unavailable"] * 3
    daemon.start()


def test_an_exception_in_the_block_stores_nothing(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    with pytest.raises(ZeroDivisionError), kv.put(ns, KEYS) as writer:
        writer[0][0] = 1 // 0
    assert writer.results == ["refused"] * 3
    assert writer.reasons == ["aborted"] * 3
    assert last(daemon, Abort) == Abort(1)
    assert not daemon.blobs
    assert daemon.seen(Seal) == []


def test_an_aborted_writer_ends_its_block_quietly(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    with kv.put(ns, KEYS) as writer:
        writer.abort()
        writer.abort()
        with pytest.raises(InvalidRequest, match="was aborted"):
            writer[0]
    assert writer.results == ["refused"] * 3
    assert kv.ping()
    assert len(daemon.seen(Abort)) == 1
    assert daemon.seen(Seal) == []


def test_a_writer_may_be_sealed_before_its_block_ends(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    with kv.put(ns, KEYS[:1]) as writer:
        writer[0][:] = payload(0)
        writer.seal()
        assert writer.results == ["stored"]
        writer.abort()
    assert writer.results == ["stored"]
    assert len(daemon.seen(Seal)) == 1
    assert daemon.seen(Abort) == []


def test_a_writer_that_is_dropped_stores_nothing(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    writer = kv.put(ns, KEYS)
    writer[0][:] = payload(0)
    del writer
    gc.collect()
    assert last(daemon, Abort) == Abort(1, [0])  # views are alive for a moment longer
    assert kv.ping()
    assert daemon.handed_back() == [4096]
    assert not daemon.blobs


def test_views_end_with_the_writer(daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace) -> None:
    with kv.put(ns, KEYS) as writer:
        view = writer[0]
        view[:] = payload(0)
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    with pytest.raises(InvalidRequest, match="was sealed"):
        writer[0]
    with pytest.raises(InvalidRequest, match="was sealed"):
        writer.parts(0)
    assert last(daemon, Seal).alive == []


def test_arrays_that_outlive_the_writer_are_told_and_handed_back(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    with kv.put(ns, KEYS) as writer:
        arrays = [np.frombuffer(writer[number], np.uint8) for number in (0, 2)]
        slice_of_1 = writer[1][5:]
        writer[1][:] = payload(1)
    assert sorted(last(daemon, Seal).alive) == [0, 1, 2]
    assert writer.results == ["stored"] * 3
    assert kv.ping()
    assert daemon.handed_back() == []
    del slice_of_1
    assert poll_until(daemon.handed_back) == [4096 * 2]
    arrays.clear()
    assert sorted(poll_until(lambda: daemon.handed_back()[1:])) == [4096, 4096 * 3]


def test_arrays_that_outlive_an_aborted_writer_are_handed_back_too(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    writer = kv.put(ns, KEYS)
    array = np.frombuffer(writer[1], np.uint8)
    writer.abort()
    assert last(daemon, Abort) == Abort(1, [1])
    assert kv.ping()
    assert daemon.handed_back() == []
    del array
    assert poll_until(daemon.handed_back) == [4096 * 2]


def test_an_open_writer_keeps_a_closed_client_connected_until_it_is_dropped(
    daemon: ScriptedDaemon, ns: BoundNamespace
) -> None:
    kv = connect("threads", daemon.address)
    writer = kv.put(ns, KEYS)
    array = np.frombuffer(writer[0], np.uint8)
    kv.close()
    with writer:
        writer[1][:] = writer[2][:] = payload(1)
    assert writer.results == ["stored"] * 3
    assert last(daemon, Seal).alive == [0]
    peers = list(daemon.peers)
    del array
    assert poll_until(daemon.handed_back) == [4096]
    poll_until(lambda: len(daemon.peers) == len(peers) - 1, what="the connection is closed")


class TestUntouchedBlobs:
    """Their extents hold the bytes of whoever had them before."""

    def test_they_are_named_and_refused(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.store(NAMESPACE, KEYS[0], payload(0))
        with kv.put(ns, KEYS) as writer:
            writer[2][:] = payload(2)
        assert last(daemon, Seal).unwritten == [1]
        assert writer.results == ["exists", "refused", "stored"]
        assert writer.reasons == ["", "unwritten", ""]

    def test_a_durable_put_raises(self, kv: Any, ns: BoundNamespace) -> None:
        with (
            pytest.raises(InvalidRequest, match=r"blob 0 .*unwritten"),
            kv.put(ns, KEYS, retention="durable"),
        ):
            pass

    def test_blobs_without_bytes_need_no_touch(self, daemon: ScriptedDaemon, kv: Any) -> None:
        empty = Namespace(model="e", layout=KVLayout.opaque(0), tokens_per_blob=16)
        with kv.put(kv.namespace(empty), KEYS) as writer:
            assert writer[0].nbytes == 0
        assert last(daemon, Seal).unwritten == []
        assert writer.results == ["stored"] * 3

    def test_views_of_parts_and_copies_are_touches(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        with kv.put(ns, KEYS[:1]) as writer:
            for part in writer.parts(0):
                part[:] = bytes(part.nbytes)
        assert last(daemon, Seal).unwritten == []
        assert kv.put_from(ns, KEYS[1:], [payload(1), payload(2)]) == ["stored"] * 2
        assert last(daemon, Seal).unwritten == []

    def test_after_the_client_was_closed_there_is_only_memory_of_its_own(
        self, daemon: ScriptedDaemon, ns: BoundNamespace
    ) -> None:
        kv = connect("threads", daemon.address)
        with kv.put(ns, KEYS) as writer:
            kv.close()
            writer[0][:] = payload(0)
            assert bytes(writer[0]) == payload(0)
            assert writer.seal_parts(0, [0]) is False
        assert last(daemon, Seal).unwritten == [0, 1, 2]
        assert writer.results == ["refused"] * 3
        assert writer.reasons == ["unavailable", "unwritten", "unwritten"]
        assert not daemon.blobs
        poll_until(lambda: len(daemon.peers) == 1, what="the connection is closed")

    def test_after_a_restart_there_is_only_memory_of_its_own(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        with kv.put(ns, KEYS) as writer:
            daemon.restart()
            assert kv.ping()
            writer[0][:] = payload(0)
            assert writer.reasons == ["unavailable", "", ""]
        assert writer.results == ["refused"] * 3
        assert writer.reasons == ["unavailable"] * 3
        assert daemon.seen(Seal) == []


class TestFaultsWhileSealing:
    def test_an_unanswered_seal_is_refused_and_its_extents_are_named(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.silence(Seal)
        with kv.put(ns, KEYS, timeout_s=0.05) as writer:
            array = np.frombuffer(writer[1], np.uint8)
        assert writer.results == ["refused"] * 3
        assert writer.reasons == ["deadline"] * 3
        assert last(daemon, Abort) == Abort(1, [1]), "which extents are still in reach"
        assert daemon.handed_back() == []
        del array
        assert poll_until(daemon.handed_back) == [4096 * 2]

    def test_a_connection_lost_while_sealing_is_made_up_for(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        def hang_up(request: Request) -> None:
            daemon.hang_up()

        daemon.script[Seal] = hang_up
        with kv.put(ns, KEYS) as writer:
            array = np.frombuffer(writer[1], np.uint8)
        assert writer.results == ["refused"] * 3
        assert writer.reasons == ["unavailable"] * 3
        del array
        assert daemon.seen(Abort, Release) == []
        assert kv.ping()
        assert daemon.seen(Abort, Release) == [Abort(1, [1]), Release([], [4096 * 2])]

    def test_a_connection_lost_while_writing_is_made_up_for(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        with kv.put(ns, KEYS) as writer:
            writer[0][:] = payload(0)
            daemon.hang_up()
            poll_until(lambda: not daemon.peers)
            assert kv.ping()
        assert writer.reasons == ["unavailable"] * 3
        assert kv.ping()
        assert daemon.seen(Abort) == [Abort(1, [])]
        assert daemon.seen(Seal) == []

    def test_a_daemon_that_restarted_while_writing_is_owed_nothing(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        with kv.put(ns, KEYS) as writer:
            array = np.frombuffer(writer[0], np.uint8)
            daemon.restart()
            assert kv.ping()
            writer[1][:] = payload(1)
        assert writer.reasons == ["unavailable"] * 3
        array[:] = 7  # still ours, and of nobody else
        del array
        assert kv.ping()
        assert daemon.seen(Abort, Release) == []

    def test_what_existed_stays_so_if_the_seal_fails(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.store(NAMESPACE, KEYS[0], payload(0))
        daemon.script[Seal] = lambda request: Failed("storage_failed", "disk on fire")
        with kv.put(ns, KEYS) as writer:
            pass
        assert writer.results == ["exists", "refused", "refused"]
        assert writer.reasons == ["exists", "storage_failed", "storage_failed"]


class TestDurable:
    @pytest.mark.parametrize(
        ("reason", "error"),
        [
            ("no_room", Full),
            ("lent_bytes", Full),
            ("io_error", StorageFailed),
            ("storage_failed", StorageFailed),
            ("expired", DeadlineExceeded),
            ("gone", Retryable),
        ],
    )
    def test_a_refused_blob_raises_what_it_was_refused_for(
        self,
        reason: str,
        error: type[BlobStoreError],
        daemon: ScriptedDaemon,
        kv: Any,
        ns: BoundNamespace,
    ) -> None:
        daemon.script[Seal] = lambda request: Sealed(
            ["stored", "refused", "refused"], ["", reason, "orphan"]
        )
        with (
            pytest.raises(error, match=f"blob 1 .*{reason}"),
            kv.put(ns, KEYS, retention="durable") as writer,
        ):
            pass
        assert writer.results == ["stored", "refused", "refused"]

    def test_a_dead_daemon_raises_at_the_end_of_the_block(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.stop()
        writer = kv.put(ns, KEYS, retention="durable")
        writer[0][:] = payload(0)
        with pytest.raises(Unavailable):
            writer.seal()
        assert writer.reasons == ["unavailable"] * 3
        daemon.start()

    def test_what_is_held_already_does_not_raise(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.store(NAMESPACE, KEYS[0], payload(0))
        with kv.put(ns, KEYS[:1], retention="durable") as writer:
            writer[0][:] = payload(1)
        assert writer.results == ["divergent"]


class TestGroups:
    def test_ranks_fill_their_own_parts(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        extent = (4096).to_bytes(8, "little") + NBYTES.to_bytes(8, "little")
        daemon.script[Reserve] = lambda request: Reserved(5, extent, [""], 60.0)
        daemon.script[Seal] = lambda request: Sealed(["partial"], [""])
        for rank in range(2):
            bound = kv.namespace(NAMESPACE, Shard(tp_rank=rank, tp_size=2))
            numbers = LAYOUT.shard_writes(bound.shard)
            with kv.put(bound, KEYS[:1], group=WriterGroup("engine", 3)) as writer:
                parts = writer.parts(0)
                assert len(parts) == len(numbers) == 4
                for number, part in zip(numbers, parts, strict=True):
                    part[:] = bytes([number]) * part.nbytes
                assert writer.seal_parts(0, [1, 3])
            assert writer.results == ["partial"]
            reserve = last(daemon, Reserve)
            assert (reserve.group, reserve.epoch) == ("engine", 3)
            assert reserve.parts == list(numbers)
            assert last(daemon, SealParts) == SealParts(5, 0, [numbers[1], numbers[3]])
        written = daemon.read(4096, NBYTES)
        for part in LAYOUT.parts(16):
            found = written[part.offset : part.offset + part.nbytes]
            assert found == bytes([part.index]) * part.nbytes

    def test_a_part_of_the_bytes_needs_a_group(self, kv: Any) -> None:
        bound = kv.namespace(NAMESPACE, Shard(tp_rank=0, tp_size=2))
        with pytest.raises(InvalidRequest, match=r"4 of 8 parts.*WriterGroup"):
            kv.put(bound, KEYS)

    def test_a_rank_whose_bytes_others_write_has_nothing_to_do(
        self, daemon: ScriptedDaemon, kv: Any
    ) -> None:
        latent = Namespace(
            model="l",
            layout=KVLayout((LayerGroup.latent(layers=1, width=8, dtype="bf16"),)),
            tokens_per_blob=16,
        )
        bound = kv.namespace(latent, Shard(tp_rank=1, tp_size=2))
        with kv.put(bound, latent.keys(range(16)), group=WriterGroup("engine")) as writer:
            assert writer.parts(0) == ()
            writer[0][:] = bytes(writer[0].nbytes)
        assert writer.results == ["partial"]
        assert writer.reasons == ["no_parts"]
        assert daemon.seen(Reserve) == []

    def test_bytes_of_one_rank_are_not_compared_with_the_whole(
        self, daemon: ScriptedDaemon, kv: Any
    ) -> None:
        daemon.store(NAMESPACE, KEYS[0], payload(0))
        bound = kv.namespace(NAMESPACE, Shard(tp_rank=0, tp_size=2))
        with kv.put(bound, KEYS[:1], group=WriterGroup("engine")) as writer:
            writer.parts(0)[0][:] = bytes(writer.parts(0)[0].nbytes)
        assert writer.results == ["exists"]
        assert last(daemon, Seal).digests == []

    def test_seal_parts_tells_whether_readers_may_have_them(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.store(NAMESPACE, KEYS[0], payload(0))
        with kv.put(ns, KEYS) as writer:
            assert writer.seal_parts(0, [0]) is False, "it is held already"
            with pytest.raises(InvalidRequest, match="nothing was written to blob 2"):
                writer.seal_parts(-1, [0])
            for view in writer[1], writer[2]:
                view[:] = payload(1)
            assert writer.seal_parts(-1, [0, 7]) is True
            assert last(daemon, SealParts) == SealParts(1, 2, [0, 7])
            with pytest.raises(IndexError):
                writer.seal_parts(1, [8])
            daemon.script[SealParts] = lambda request: Failed("busy", "")
            assert writer.seal_parts(1, [0]) is False
            daemon.script[SealParts] = lambda request: Done(1)
        with pytest.raises(InvalidRequest, match="was sealed"):
            writer.seal_parts(1, [0])
