"""The clients' contract: writing in place, and what must not come of it."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.clients import (
    BoundNamespace,
    Client,
    KVLayout,
    LayerGroup,
    Namespace,
    Shard,
    WriterGroup,
)
from blobstore.protocol import KEYS_MAX, Failed, Match, Ping, Pong, Reserve, Stat
from blobstore.transports.framing import MAX_BODY_BYTES
from blobstore.units import KIB
from tests.support.blobs import chain, opaque, payloads_of, put
from tests.support.daemon import Daemon
from tests.support.raw_client import RawClient

NBYTES = 100 * KIB
N = 4


@pytest.fixture
def namespace(model: str) -> Namespace:
    return opaque(NBYTES, model)


@pytest.fixture
def ns(kv: Any, namespace: Namespace) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(namespace)
    return bound


class TestUntouchedBlobs:
    def test_what_lay_in_their_memory_is_never_published(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace
    ) -> None:
        others = opaque(NBYTES, f"tenant of {namespace.model}")
        put(kv, others, chain(others, 1, N))
        kv.drop(kv.namespace(others), chain(others, 1, N))
        keys = chain(namespace, 1, N)
        with kv.put(ns, keys) as writer:
            pass
        assert writer.results == ["refused"] * N
        assert writer.reasons == ["unwritten"] * N
        assert kv.exists(ns, keys) == [False] * N

    def test_what_continues_one_is_an_orphan(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace
    ) -> None:
        keys = chain(namespace, 2, N)
        contents = payloads_of(keys, NBYTES)
        with kv.put(ns, keys) as writer:
            for index in (0, 2, 3):
                writer[index][:] = contents[index]
        assert writer.results == ["stored", "refused", "refused", "refused"]
        assert writer.reasons == ["", "unwritten", "orphan", "orphan"]
        assert kv.match(ns, keys).blobs == 1
        assert kv.put_from(ns, keys, contents) == ["exists", "stored", "stored", "stored"]


class TestGroups:
    @pytest.fixture
    def sharded(self, model: str) -> Namespace:
        layout = KVLayout(
            (LayerGroup.attention(layers=2, heads=2, head_size=8, dtype="bf16"),), head_groups=2
        )
        return Namespace(model=model, layout=layout, tokens_per_blob=16)

    def test_a_rank_that_wrote_nothing_gives_up_the_blob_for_all(
        self, kv: Any, sharded: Namespace, other: Client
    ) -> None:
        key, group = sharded.keys(range(16)), WriterGroup("engine", 1)
        first, second = (kv.namespace(sharded, Shard(rank, 2)) for rank in range(2))
        with kv.put(first, key, group=group) as idle, kv.put(second, key, group=group) as busy:
            for part in busy.parts(0):
                part[:] = bytes(part.nbytes)
        assert (busy.results, idle.results) == (["partial"], ["refused"])
        assert idle.reasons == ["unwritten"]
        assert not any(other.exists(first, key))

    def test_a_rank_that_writes_after_one_that_did_not_is_refused(
        self, kv: Any, sharded: Namespace
    ) -> None:
        key, group = sharded.keys(range(16)), WriterGroup("engine", 2)
        first, second = (kv.namespace(sharded, Shard(rank, 2)) for rank in range(2))
        with kv.put(first, key, group=group) as busy:
            for part in busy.parts(0):
                part[:] = bytes(part.nbytes)
            with kv.put(second, key, group=group):
                pass
        assert (busy.results, busy.reasons) == (["refused"], ["unwritten"])

    def test_a_rank_that_names_no_parts_is_refused(
        self, kv: Any, sharded: Namespace, shared: Daemon
    ) -> None:
        """It would seal what the others have not written."""
        ns = kv.namespace(sharded)
        key = sharded.keys(range(16))
        with RawClient(shared.socket) as raw:
            reply = raw.ask(Reserve(ns.id, key.packed, 32, b"", 0, "standard", 1.0, "engine", 3))
        assert isinstance(reply, Failed)
        assert (reply.code, "names the parts" in reply.message) == ("invalid_request", True)


class TestLargeCalls:
    def test_a_reply_beyond_the_frame_limit_is_an_error_that_harms_nothing(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, shared: Daemon
    ) -> None:
        keys = chain(namespace, 3, 2)
        put(kv, namespace, keys)
        with RawClient(shared.socket) as raw:
            reply = raw.ask(Stat(ns.id, keys[1] * 40_000, 32))
            assert isinstance(reply, Failed)
            assert reply.code == "frame_too_large"
            assert str(MAX_BODY_BYTES) in reply.message
            assert isinstance(raw.ask(Ping()), Pong)
        assert len(kv.stat(ns, list(keys) * 20_000)) == 40_000

    def test_the_keys_of_a_call_are_bounded(self, ns: BoundNamespace, shared: Daemon) -> None:
        with RawClient(shared.socket) as raw:
            reply = raw.ask(Match(ns.id, bytes(32) * (KEYS_MAX + 1), 32))
        assert isinstance(reply, Failed)
        assert (reply.code, str(KEYS_MAX) in reply.message) == ("invalid_request", True)
