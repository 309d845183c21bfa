"""The clients' contract: what becomes of puts, what they continue, and how long they keep."""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np
import pytest

from blobstore.clients import (
    BoundNamespace,
    Client,
    Hint,
    Keys,
    KVLayout,
    LayerGroup,
    Namespace,
)
from blobstore.errors import InvalidRequest, Retryable
from blobstore.units import KIB, MIB
from tests.support.blobs import TOKENS, chain, opaque, payload_of, payloads_of, put
from tests.support.contract import DRAM_BYTES, flood, make_cold
from tests.support.polling import poll_until

NBYTES = 100 * KIB
N = 6


@pytest.fixture
def namespace(model: str) -> Namespace:
    return opaque(NBYTES, model)


@pytest.fixture
def ns(kv: Any, namespace: Namespace) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(namespace)
    return bound


@pytest.fixture
def keys(namespace: Namespace) -> Keys:
    """Of a context that nobody has put."""
    return chain(namespace, 1, N)


@pytest.fixture
def contents(keys: Keys) -> list[bytes]:
    return payloads_of(keys, NBYTES)


def fill(writer: Any, contents: list[bytes]) -> None:
    for i, payload in enumerate(contents):
        writer[i][:] = payload


def right(kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]) -> bool:
    with kv.get(ns, keys) as lease:
        return [bytes(view) for view in lease] == contents


class TestResults:
    def test_new_blobs_are_stored_when_the_block_ends(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        with kv.put(ns, keys, token_ids=range(N * TOKENS)) as writer:
            assert len(writer) == N
            fill(writer, contents)
            assert other.match(ns, keys).blobs == 0
            assert other.exists(ns, keys) == [False] * N
            assert len(other.get(ns, keys)) == 0
        assert (writer.results, writer.reasons) == (["stored"] * N, [""] * N)
        assert right(other, ns, keys, contents)

    def test_the_same_bytes_again_exist_and_others_diverge(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        other.put_from(ns, keys[:4], contents[:4])
        with kv.put(ns, keys) as writer:
            fill(writer, contents)
            writer[1][-1] ^= 1
            writer[3][:] = bytes(NBYTES)
        assert writer.results == ["exists", "divergent"] * 2 + ["stored"] * 2
        assert right(kv, ns, keys, contents)
        flipped = [bytes([payload[0] ^ 1]) + payload[1:] for payload in contents]
        assert kv.put_from(ns, keys, flipped) == ["divergent"] * N
        assert kv.put_from(ns, keys, contents) == ["exists"] * N
        assert right(kv, ns, keys, contents)

    def test_what_exists_need_not_be_written_again(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys[:4], contents[:4])
        with kv.put(ns, keys) as writer:
            assert writer.results == ["exists"] * 4 + [""] * 2
            for i in (4, 5):
                writer[i][:] = contents[i]
        assert writer.results == ["exists"] * 4 + ["stored"] * 2
        assert right(kv, ns, keys, contents)

    @pytest.mark.parametrize("cold", [False, True])
    def test_blobs_on_ssd_exist_as_well(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], cold: bool
    ) -> None:
        kv.put_from(ns, keys, contents)
        if cold:
            make_cold(kv, ns, keys)
        assert kv.put_from(ns, keys, contents) == ["exists"] * N
        assert kv.put_from(ns, keys[:1], [bytes(NBYTES)]) == ["divergent"]
        assert right(kv, ns, keys, contents)

    def test_of_two_writers_the_first_to_seal_wins(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        with kv.put(ns, keys) as one, other.put(ns, keys) as two:
            fill(one, [b"1" * NBYTES] * N)
            fill(two, contents)
        assert two.results == ["stored"] * N
        assert one.results == ["divergent"] * N
        assert right(kv, ns, keys, contents)

    def test_more_than_the_daemon_lends_is_too_large(self, kv: Any, model: str) -> None:
        huge = opaque(DRAM_BYTES * 3 // 4, model)
        ns, key = kv.namespace(huge), chain(huge, 1, 1)
        with kv.put(ns, key) as writer:
            writer[0][0] = writer[0][-1] = 1
            assert writer[0].nbytes == DRAM_BYTES * 3 // 4
        assert (writer.results, writer.reasons) == (["refused"], ["too_large"])
        assert kv.put_from(ns, key, [bytes(DRAM_BYTES * 3 // 4)]) == ["refused"]
        with pytest.raises(Retryable, match=r"too_large.*lends"):
            kv.put_from(ns, key, [bytes(DRAM_BYTES * 3 // 4)], retention="durable")
        assert kv.exists(ns, key) == [False]

    @pytest.mark.in_place
    def test_a_client_cannot_borrow_more_than_its_share(
        self, kv: Any, model: str, other: Client
    ) -> None:
        share = opaque(DRAM_BYTES // 2, model)
        ns = kv.namespace(share)
        first = kv.put(ns, chain(share, 1, 1))
        first[0][0] = 1
        started_s = time.monotonic()
        with kv.put(ns, chain(share, 2, 1), timeout_s=0.2) as second:
            second[0][0] = 1
        assert (second.results, second.reasons) == (["refused"], ["lent_bytes"])
        assert 0.2 <= time.monotonic() - started_s < 5.0
        first.abort()
        with kv.put(ns, chain(share, 2, 1)) as third:
            third[0][0] = 1
        assert third.results == ["stored"]

    def test_a_key_named_twice_is_the_callers_mistake(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with pytest.raises(InvalidRequest, match="twice"):
            kv.put(ns, [keys[0], keys[1], keys[0]])
        with pytest.raises(InvalidRequest, match="twice"):
            kv.put(ns, keys, parent=keys[2])
        assert kv.stats()["lent_bytes"] == 0

    def test_a_retention_that_there_is_not_is_the_callers_mistake(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with pytest.raises(InvalidRequest, match=r"'forever'.*durable"):
            kv.put(ns, keys, retention="forever")

    def test_hints_and_token_ids_change_nothing(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        ids: list[Any] = [
            None, [1] * TOKENS, np.arange(TOKENS), array("I", [1] * TOKENS), (1,) * TOKENS,
        ]  # fmt: skip
        hint = Hint(session="s", turn=3, kind="subagent", finish="tool_use")
        for at, token_ids in enumerate(ids):
            parent = keys[at - 1] if at else None
            assert kv.put_from(
                ns, keys[at : at + 1], contents[at : at + 1],
                token_ids=token_ids, parent=parent, hint=hint,
            ) == ["stored"]  # fmt: skip
        with kv.put(ns, keys[5:], token_ids=range(TOKENS), parent=keys[4], hint=hint) as writer:
            writer[0][:] = contents[5]
        assert right(kv, ns, keys, contents)


class TestTheWriter:
    def test_it_can_always_be_written_to(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        """Whatever becomes of the blobs, an engine has one path."""
        kv.put_from(ns, keys[:2], contents[:2])
        orphans = chain(ns.namespace, 2, N)
        for put_what, parent in ((keys, None), (orphans[1:], orphans[0])):
            with kv.put(ns, put_what, parent=parent) as writer:
                for i in range(len(writer)):
                    view = writer[i]
                    assert (view.readonly, view.nbytes, view.contiguous) == (False, NBYTES, True)
                    view[:] = payload_of(put_what[i], NBYTES)
                    assert view == payload_of(put_what[i], NBYTES)
                    assert [part.nbytes for part in writer.parts(i)] == [NBYTES]
                for index in (len(writer), -len(writer) - 1):
                    with pytest.raises(IndexError):
                        writer[index]
        assert writer.results == ["refused"] * (N - 1)
        assert right(kv, ns, keys, contents)

    def test_an_exception_leaves_nothing(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        with pytest.raises(ZeroDivisionError), kv.put(ns, keys, retention="durable") as writer:
            fill(writer, [bytes(1 // 0)])
        assert writer.results == ["refused"] * N
        assert writer.reasons == ["aborted"] * N
        assert other.exists(ns, keys) == [False] * N
        stats = other.stats()
        assert (stats["reservations"], stats["lent_bytes"]) == (0, 0)
        assert kv.put_from(ns, keys, contents) == ["stored"] * N

    @pytest.mark.in_place
    def test_an_exception_after_all_was_written_leaves_nothing_either(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        writer = kv.put(ns, keys)
        fill(writer, contents)
        assert writer.seal_parts(0, [0])
        writer.__exit__(ValueError, ValueError(), None)
        assert other.exists(ns, keys) == [False] * N

    def test_it_may_be_aborted_or_sealed_early_and_only_once(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        with kv.put(ns, keys) as writer:
            fill(writer, contents)
            writer.abort()
            writer.abort()
        assert writer.results == ["refused"] * N
        with kv.put(ns, keys) as writer:
            fill(writer, contents)
            writer.seal()
            assert writer.results == ["stored"] * N
            writer.seal()
            writer.abort()
            with pytest.raises(InvalidRequest, match="sealed"):
                writer[0]
        assert writer.results == ["stored"] * N
        assert right(kv, ns, keys, contents)

    def test_a_view_can_write_no_more_when_it_has_ended(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        with kv.put(ns, keys) as writer:
            view = writer[0]
            fill(writer, contents)
        with pytest.raises(ValueError, match="released"):
            view[0] = 1
        assert right(kv, ns, keys, contents)

    @pytest.mark.in_place
    def test_an_array_that_outlives_it_writes_to_nobodys_blob(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        with kv.put(ns, keys) as writer:
            fill(writer, contents)
            array_of_first = np.frombuffer(writer[0], np.uint8)
        assert writer.results == ["stored"] * N
        array_of_first[:] = 0
        flood(other)
        array_of_first[:] = 1
        assert right(kv, ns, keys, contents)
        assert other.stats()["lent_bytes"] == NBYTES
        del array_of_first
        poll_until(lambda: other.stats()["lent_bytes"] == 0, 5.0, "the loan has ended")
        assert kv.verify(timeout_s=60.0)["corrupt"] == []

    def test_one_that_is_forgotten_stores_nothing_and_keeps_nothing(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        writer = kv.put(ns, keys)
        fill(writer, contents)
        del writer
        poll_until(lambda: other.stats()["lent_bytes"] == 0, 5.0, "the loan has ended")
        assert other.exists(ns, keys) == [False] * N


class TestChains:
    def test_a_later_put_continues_an_earlier_one(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        assert other.put_from(ns, keys[:2], contents[:2]) == ["stored"] * 2
        with kv.put(ns, keys[2:5], parent=keys[1]) as writer:
            fill(writer, contents[2:5])
        assert writer.results == ["stored"] * 3
        assert kv.put_from(ns, keys[5:], contents[5:], parent=keys[4]) == ["stored"]
        assert kv.match(ns, keys).blobs == N
        assert right(kv, ns, keys, contents)
        facts = kv.stat(ns, keys)
        assert [blob["depth"] for blob in facts] == list(range(1, N + 1))
        assert [blob["parent"] for blob in facts] == ["", *(key.hex() for key in keys[:-1])]

    def test_a_whole_context_may_be_put_again_with_its_new_end(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        for n in range(1, N + 1):
            assert kv.put_from(ns, keys[:n], contents[:n]) == ["exists"] * (n - 1) + ["stored"]
        assert right(kv, ns, keys, contents)

    def test_only_a_tail_is_put(self, kv: Any, model: str) -> None:
        layout = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=8),))
        ns = kv.namespace(Namespace(model, layout, tokens_per_blob=16))
        ids = list(range(16 * 2 + 5))
        keys = ns.keys(ids, tail=True)
        full, part = layout.nbytes(16), layout.nbytes(5)
        kv.put_from(ns, keys[:2], [b"f" * full] * 2)
        with kv.put(ns, keys[2:], parent=keys[1]) as writer:
            assert writer[0].nbytes == part
            writer[0][:] = b"t" * part
        assert writer.results == ["stored"]
        assert kv.match(ns, keys).tokens == len(ids)
        assert bytes(kv.get(ns, keys)[2]) == b"t" * part
        longer = ns.keys([*ids, *range(11)])
        assert kv.put_from(ns, longer[2:], [b"g" * full], parent=keys[1]) == ["stored"]
        assert (kv.match(ns, longer).blobs, kv.match(ns, keys).blobs) == (3, 3)

    def test_what_continues_nothing_is_an_orphan(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        with kv.put(ns, keys[2:], parent=keys[1]) as writer:
            fill(writer, contents[2:])
        assert writer.results == ["refused"] * 4
        assert writer.reasons == ["orphan"] * 4
        assert kv.put_from(ns, keys[2:], contents[2:], parent=keys[1]) == ["refused"] * 4
        assert kv.exists(ns, keys) == [False] * N
        with pytest.raises(Retryable, match=r"orphan.*put that as well"):
            kv.put_from(ns, keys[2:], contents[2:], parent=keys[1], retention="durable")
        assert kv.put_from(ns, keys, contents) == ["stored"] * N

    def test_a_parent_is_one_of_the_same_namespace(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], model: str
    ) -> None:
        kv.put_from(ns, keys[:2], contents[:2])
        elsewhere = kv.namespace(opaque(NBYTES, f"{model} of another"))
        assert kv.put_from(elsewhere, keys[2:3], contents[2:3], parent=keys[1]) == ["refused"]
        for parent in (b"", b"short", keys[1].hex(), bytearray(keys[1])):
            with pytest.raises(InvalidRequest, match="parent is a key of 32 bytes"):
                kv.put(ns, keys[2:], parent=parent)

    def test_a_parent_may_still_be_in_writing(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        head = other.put(ns, keys[:2])
        end = kv.put(ns, keys[2:], parent=keys[1])
        fill(head, contents[:2])
        fill(end, contents[2:])
        head.seal()
        end.seal()
        assert (head.results, end.results) == (["stored"] * 2, ["stored"] * 4)
        assert right(kv, ns, keys, contents)

    def test_a_parent_that_never_comes_makes_orphans(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        head = other.put(ns, keys[:2])
        end = kv.put(ns, keys[2:], parent=keys[1])
        fill(end, contents[2:])
        head.abort()
        end.seal()
        assert (end.results, end.reasons) == (["refused"] * 4, ["orphan"] * 4)

    def test_a_parent_that_is_dropped_meanwhile_makes_orphans(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        kv.put_from(ns, keys[:2], contents[:2])
        end = kv.put(ns, keys[2:], parent=keys[1])
        fill(end, contents[2:])
        assert other.drop(ns, keys[:1]) == 2
        end.seal()
        assert (end.results, end.reasons) == (["refused"] * 4, ["orphan"] * 4)
        assert kv.exists(ns, keys) == [False] * N

    @pytest.mark.in_place
    def test_a_parent_is_kept_while_it_is_continued(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        kv.put_from(ns, keys[:2], contents[:2], retention="volatile")
        with kv.put(ns, keys[2:], parent=keys[1], retention="volatile") as writer:
            flood(other)
            fill(writer, contents[2:])
        assert writer.results == ["stored"] * 4
        assert right(kv, ns, keys, contents)

    def test_a_context_beyond_the_arena_is_put_window_by_window(
        self, kv: Any, model: str, other: Client
    ) -> None:
        large = opaque(MIB, model)
        ns, keys = kv.namespace(large), chain(large, 1, DRAM_BYTES * 5 // 4 // MIB)
        whole = np.frombuffer(b"".join(payloads_of(keys, MIB)), np.uint8)
        assert kv.put_from(ns, keys, whole) == ["stored"] * len(keys)
        assert kv.put_from(ns, keys, whole) == ["exists"] * len(keys)
        got = np.zeros_like(whole)
        assert other.get_into(ns, keys, got) == len(keys)
        assert np.array_equal(got, whole)


class TestRetention:
    def test_volatile_blobs_never_reach_the_disk(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys, contents: list[bytes]
    ) -> None:
        saved = kv.stats()["counters"]["saved_blobs"]
        kv.put_from(ns, keys, contents, retention="volatile")
        later = chain(namespace, 2, 1)
        kv.put_from(ns, later, [bytes(NBYTES)], retention="durable")
        assert kv.stats()["counters"]["saved_blobs"] == saved + 1
        assert [blob["tiers"] for blob in kv.stat(ns, keys)] == [["dram"]] * N
        flood(kv)
        assert kv.exists(ns, keys) == [False] * N

    def test_standard_blobs_are_on_disk_a_moment_later(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], other: Client
    ) -> None:
        """Also if nobody does anything any more."""
        assert kv.put_from(ns, keys, contents) == ["stored"] * N
        poll_until(
            lambda: all(blob["tiers"] == ["dram", "ssd"] for blob in other.stat(ns, keys)), 5.0
        )
        flood(other)
        assert right(kv, ns, keys, contents)

    def test_durable_blobs_are_on_disk_when_the_block_ends(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        with kv.put(ns, keys, retention="durable") as writer:
            fill(writer, contents)
        assert writer.results == ["stored"] * N
        for blob in kv.stat(ns, keys):
            assert (blob["retention"], blob["tiers"]) == ("durable", ["dram", "ssd"])

    @pytest.mark.parametrize("before", ["volatile", "standard"])
    def test_a_later_put_may_ask_for_more(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], before: str
    ) -> None:
        kv.put_from(ns, keys, contents, retention=before)
        assert kv.put_from(ns, keys, contents, retention="durable") == ["exists"] * N
        assert kv.put_from(ns, keys, contents, retention="volatile") == ["exists"] * N
        for blob in kv.stat(ns, keys):
            assert (blob["retention"], blob["tiers"]) == ("durable", ["dram", "ssd"])

    @pytest.mark.in_place
    def test_a_durable_blob_cannot_continue_a_volatile_one(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys[:2], contents[:2], retention="volatile")
        with pytest.raises(InvalidRequest, match=r"blob 0 .*volatile"):
            kv.put_from(ns, keys[2:], contents[2:], parent=keys[1], retention="durable")
        assert kv.put_from(ns, keys, contents, retention="durable") == ["exists"] * N
        assert all("ssd" in blob["tiers"] for blob in kv.stat(ns, keys))

    def test_a_divergent_put_leaves_the_retention_to_what_is_held(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys, contents, retention="volatile")
        zeros = [bytes(NBYTES)] * N
        assert kv.put_from(ns, keys, zeros, retention="durable") == ["divergent"] * N
        assert [blob["retention"] for blob in kv.stat(ns, keys)] == ["volatile"] * N


def test_a_blob_of_one_byte_and_one_of_many_pieces_are_kept_alike(kv: Any, model: str) -> None:
    for nbytes in (1, 4095, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 5 * MIB - 1):
        namespace = opaque(nbytes, model)
        ns, keys = kv.namespace(namespace), chain(namespace, 1, 2)
        assert put(kv, namespace, keys, "durable") == ["stored"] * 2
        make_cold(kv, ns, keys)
        assert right(kv, ns, keys, payloads_of(keys, nbytes)), nbytes
