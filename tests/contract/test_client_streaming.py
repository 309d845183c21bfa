"""The clients' contract: reading layer by layer, while bytes come from SSD or from a writer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blobstore.clients import BoundNamespace, Client, Keys, KVLayout, LayerGroup, Namespace
from blobstore.errors import InvalidRequest
from blobstore.units import MIB
from tests.support.blobs import TOKENS, opaque, payload_of, payloads_of
from tests.support.contract import make_cold
from tests.support.daemon import Daemon
from tests.support.polling import poll_until, wait_s
from tests.support.puppet import Puppet

LAYERS = 6
LAYOUT = KVLayout((LayerGroup.attention(layers=LAYERS, heads=2, head_size=12 << 10),))
"""Parts of 384 KiB, so that pieces and parts end at different places."""
NBYTES = LAYOUT.nbytes(TOKENS)
N = 4


@pytest.fixture
def namespace(model: str) -> Namespace:
    return Namespace(model, LAYOUT, tokens_per_blob=TOKENS)


@pytest.fixture
def ns(kv: Any, namespace: Namespace) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(namespace)
    return bound


@pytest.fixture
def keys(namespace: Namespace) -> Keys:
    return namespace.keys(range(TOKENS * N))


def parts_of(key: bytes) -> list[bytes]:
    payload = payload_of(key, NBYTES)
    return [payload[p.offset : p.offset + p.nbytes] for p in LAYOUT.parts(TOKENS)]


def test_a_payload_is_several_pieces_of_several_parts() -> None:
    assert len(LAYOUT.parts(TOKENS)) == LAYERS
    assert NBYTES > 2 * MIB
    assert MIB % LAYOUT.parts(TOKENS)[0].nbytes


class TestColdContexts:
    @pytest.fixture(autouse=True)
    def cold(self, kv: Any, ns: BoundNamespace, keys: Keys) -> None:
        assert kv.put_from(ns, keys, payloads_of(keys, NBYTES)) == ["stored"] * N
        make_cold(kv, ns, keys)

    def test_layers_come_in_order_across_the_blobs(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with kv.get(ns, keys, stream=True) as lease:
            assert (len(lease), lease.reason, lease.n_parts) == (N, "", LAYERS)
            for layer in range(LAYERS):
                for i, key in enumerate(keys):
                    assert lease.wait(i, layer)
                    assert lease.parts(i)[layer] == parts_of(key)[layer]
            assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)

    def test_bytes_are_refused_until_they_were_waited_for(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with kv.get(ns, keys, stream=True) as lease:
            for read in (lambda: lease[1], lambda: lease.parts(1)[2], lambda: list(lease)):
                with pytest.raises(InvalidRequest, match="wait for it"):
                    read()
            assert lease.wait(1, 2)
            assert lease.parts(1)[2] == parts_of(keys[1])[2]
            for read in (lambda: lease[1], lambda: lease.parts(1)[3], lambda: lease.parts(0)[2]):
                with pytest.raises(InvalidRequest, match="wait for it"):
                    read()
            assert lease.wait(1)
            assert lease[1] == payload_of(keys[1], NBYTES)

    def test_a_lease_that_ends_early_harms_no_load(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        kv.get(ns, keys, stream=True).release()
        with other.get(ns, keys) as lease:
            assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)

    def test_what_is_in_dram_need_not_be_waited_for_long(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with kv.get(ns, keys):
            pass
        with kv.get(ns, keys, stream=True) as lease:
            assert all(lease.wait(i, timeout_s=0) for i in range(N))
            assert lease.served == {"dram": N}
            assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)

    def test_what_is_out_of_range_is_no_part(self, kv: Any, ns: BoundNamespace, keys: Keys) -> None:
        with kv.get(ns, keys, stream=True) as lease:
            for index, part in ((N, 0), (0, LAYERS), (-N - 1, 0)):
                with pytest.raises(IndexError):
                    lease.wait(index, part)
            assert lease.wait(-1, -1)
            assert lease.parts(-1)[-1] == parts_of(keys[-1])[-1]
            lease.release()
            with pytest.raises(InvalidRequest, match="released"):
                lease.wait(0, 0)


@pytest.mark.in_place
class TestFollowingAWriter:
    """A blob in writing is given to those who ask for it (`wait`), part by part as it is sealed."""

    def write(self, writer: Any, index: int, key: bytes, parts: Sequence[int]) -> None:
        for part in parts:
            writer.parts(index)[part][:] = parts_of(key)[part]

    def test_each_part_can_be_read_once_it_is_sealed(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        with other.put(ns, keys) as writer:
            self.write(writer, 0, keys[0], [0, 1])
            with kv.get(ns, keys, stream=True, wait=True) as lease:
                assert (len(lease), lease.reason, lease.served) == (N, "", {"writer": N})
                assert lease.wait(0, 0, timeout_s=0.05) is False
                assert lease.reason == "deadline"
                assert writer.seal_parts(0, [0])
                assert lease.wait(0, 0)
                assert lease.parts(0)[0] == parts_of(keys[0])[0]
                assert lease.wait(0, 1, timeout_s=0.05) is False
                with pytest.raises(InvalidRequest, match="wait for it"):
                    lease.parts(0)[1]
                self.write(writer, 0, keys[0], range(2, LAYERS))
                for i in range(1, N):
                    self.write(writer, i, keys[i], range(LAYERS))
                writer.seal()
                assert writer.results == ["stored"] * N
                assert all(lease.wait(i) for i in range(N))
                assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)

    def test_nobody_else_sees_it(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        writer = other.put(ns, keys)
        self.write(writer, 0, keys[0], range(LAYERS))
        assert writer.seal_parts(0, range(LAYERS))
        assert kv.match(ns, keys).blobs == 0
        assert kv.exists(ns, keys) == [False] * N
        assert (len(kv.get(ns, keys)), kv.get(ns, keys).reason) == (0, "absent")
        writer.abort()
        assert kv.exists(ns, keys) == [False] * N

    def test_a_writer_that_gives_up_is_the_reason(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        writer = other.put(ns, keys)
        self.write(writer, 0, keys[0], [0])
        writer.seal_parts(0, [0])
        with kv.get(ns, keys, stream=True, wait=True) as lease:
            assert lease.wait(0, 0)
            writer.abort()
            assert lease.wait(0, 1) is False
            assert lease.reason == "aborted"
            assert lease.wait(2) is False
            assert lease.parts(0)[0] == parts_of(keys[0])[0]

    def test_a_writer_that_dies_is_the_reason(
        self, kv: Any, kind: str, shared: Daemon, other: Client
    ) -> None:
        nbytes = MIB + (kind == "threads")
        namespace = opaque(nbytes)
        with Puppet(shared.address) as puppet:
            assert puppet.do("reserve", nbytes, 7, 2) == ["", ""]
            ns = kv.namespace(namespace)
            keys = namespace.keys([7, *range(1, TOKENS * 2)])
            with kv.get(ns, keys, stream=True, wait=True) as lease:
                assert len(lease) == 2
                puppet.kill()
                assert lease.wait(0, timeout_s=10.0) is False
                assert lease.reason == "writer_gone"
        assert kv.exists(ns, keys) == [False, False]

    def test_a_get_waits_until_it_is_stored(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        writer = other.put(ns, keys)
        for i, key in enumerate(keys):
            self.write(writer, i, key, range(LAYERS))

        def seal_later() -> None:
            wait_s(0.2)
            writer.seal()

        with ThreadPoolExecutor(1) as pool:
            sealing = pool.submit(seal_later)
            with kv.get(ns, keys, wait=True, timeout_s=20.0) as lease:
                assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)
                assert lease.reason == ""
            sealing.result()
        assert writer.results == ["stored"] * N

    def test_a_get_does_not_wait_beyond_its_time(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        assert other.put_from(ns, keys[:2], payloads_of(keys[:2], NBYTES)) == ["stored"] * 2
        writer = other.put(ns, keys[2:], parent=keys[1])
        started_s = time.monotonic()
        with kv.get(ns, keys, wait=True, timeout_s=0.2) as lease:
            assert (len(lease), lease.reason) == (2, "deadline")
            assert [bytes(view) for view in lease] == payloads_of(keys[:2], NBYTES)
        assert 0.2 <= time.monotonic() - started_s < 2.0
        writer.abort()

    def test_what_nobody_writes_is_not_waited_for(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        started_s = time.monotonic()
        with kv.get(ns, keys, wait=True, timeout_s=20.0) as lease:
            assert (len(lease), lease.reason) == (0, "absent")
        assert time.monotonic() - started_s < 5.0

    def test_a_get_turns_to_the_next_writer_when_one_gives_up(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        first, second = other.put(ns, keys[:1]), other.put(ns, keys[:1])
        first[0][:] = b"1" * NBYTES
        second[0][:] = b"2" * NBYTES

        def one_after_the_other() -> None:
            wait_s(0.1)
            first.abort()
            wait_s(0.1)
            second.seal()

        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(one_after_the_other)
            with kv.get(ns, keys[:1], wait=True, timeout_s=20.0) as lease:
                assert len(lease) == 1
                assert lease[0] == b"2" * NBYTES
            ending.result()

    def test_a_reader_keeps_the_parts_that_lost_against_another_writer_and_gets_no_more(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        """What it was given stays readable, but the blob is the other writer's."""
        first, second = other.put(ns, keys[:1]), other.put(ns, keys[:1])
        for number, writer in enumerate((first, second)):
            writer[0][:] = bytes([number + 1]) * NBYTES
        with kv.get(ns, keys[:1], stream=True, wait=True) as lease:
            second.seal()
            assert second.results == ["stored"]
            assert first.seal_parts(0, [0])
            assert lease.wait(0, 0)
            assert set(lease.parts(0)[0]) == {1}
            first.seal()
            assert first.results == ["divergent"]
            assert not lease.wait(0)
            assert lease.wait(0, 0)
            assert set(lease.parts(0)[0]) == {1}
        with kv.get(ns, keys[:1]) as lease:
            assert set(lease[0]) == {2}

    def test_the_room_of_a_writer_that_gave_up_comes_back_when_its_readers_leave(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        writer = other.put(ns, keys)
        with kv.get(ns, keys, stream=True, wait=True):
            writer.abort()
            poll_until(lambda: other.stats()["lent_bytes"] == 0, 5.0)
            # Blobs of others may still be on their way to SSD, pinned.
            poll_until(lambda: other.stats()["pinned_bytes"] == N * NBYTES, 5.0)
        poll_until(lambda: other.stats()["pinned_bytes"] == 0, 5.0)
