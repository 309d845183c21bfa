"""The clients' contract: writing in place, and what must not come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
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
from blobstore.clients.link import Ticket
from blobstore.protocol import (
    KEYS_MAX,
    Done,
    Failed,
    Get,
    Holding,
    Leased,
    Match,
    Ping,
    Pong,
    Release,
    Reserve,
    Reserved,
    Stat,
)
from blobstore.transports.framing import MAX_BODY_BYTES
from blobstore.units import KIB
from tests.support.blobs import chain, opaque, payloads_of, put
from tests.support.connections import connection_of
from tests.support.contract import holds_nothing
from tests.support.daemon import Daemon
from tests.support.polling import poll_until
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


class TestSealing:
    def test_it_may_take_longer_than_the_put(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace
    ) -> None:
        """Memory that does not come at once is of no use to some, who then wait for the seal."""
        keys = chain(namespace, 3, N)
        writer = kv.put(ns, keys, timeout_s=0.0)
        for index, payload in enumerate(payloads_of(keys, NBYTES)):
            writer[index][:] = payload
        writer.seal(timeout_s=20.0)
        assert writer.results == ["stored"] * N


@pytest.mark.in_place
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


class TestBrokenConnections:
    def test_what_was_granted_and_is_not_held_comes_back(
        self, ns: BoundNamespace, namespace: Namespace, other: Client, shared: Daemon
    ) -> None:
        held, fresh = chain(namespace, 4, 2), chain(namespace, 5, 2)
        put(other, namespace, held)
        with RawClient(shared.socket) as first:
            leases = [first.ask(Get(ns.id, held.packed, 32, 5.0)) for _ in range(2)]
            loans = [first.ask(Reserve(ns.id, key, 32, b"", 0, "standard", 5.0)) for key in fresh]
            lost = first.welcome.connection_id
        kept, loan = leases[0], loans[0]
        assert isinstance(kept, Leased)
        assert isinstance(loan, Reserved)
        offset = int(np.frombuffer(loan.extents, "<u8")[0])
        with RawClient(shared.socket) as second:
            assert isinstance(second.ask(Holding([lost], [kept.lease_id], [], [offset])), Done)
            stats = other.stats()
            assert (stats["leases"], stats["reservations"]) == (1, 0)
            assert stats["lent_bytes"] == NBYTES, "what is still viewed"
            assert second.ask(Release([kept.lease_id], [offset])) == Done(2)
            poll_until(lambda: holds_nothing(other))

    def test_a_client_that_finds_the_daemon_again_says_what_it_holds(
        self, kind: str, namespace: Namespace, other: Client, shared: Daemon
    ) -> None:
        keys = chain(namespace, 6, 2)
        put(other, namespace, keys)
        with Client(shared.address, timeout_s=20.0) as kv:
            ns = kv.namespace(namespace)
            lease = kv.get(ns, keys)
            writer = kv.put(ns, chain(namespace, 7, 1))
            array = np.frombuffer(writer[0], np.uint8)
            connection = connection_of(kv)
            connection.post(Ticket(Get(ns.id, keys.packed, 32, 5.0)))
            connection.post(Ticket(Reserve(ns.id, keys[0][::-1], 32, b"", 0, "standard", 5.0)))
            poll_until(lambda: other.stats()["leases"] == 2, what="the lease was granted")
            connection.fail("as the test wants")
            assert kv.ping()
            poll_until(lambda: other.stats()["leases"] == 1)
            assert other.stats()["lent_bytes"] == NBYTES
            assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)
            writer.seal()
            assert writer.results == ["refused"]
            assert kv.ping()
            assert other.stats()["lent_bytes"] == NBYTES, "it is viewed"
            del array
            lease.release()
            poll_until(lambda: holds_nothing(other))
