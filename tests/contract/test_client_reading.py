"""The clients' contract: leases, what they give and how long, and copies of leading blobs."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, Client, Keys, Lease, Namespace
from blobstore.errors import InvalidRequest
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, opaque, payload_of, payloads_of, put
from tests.support.both_clients import HTTP_KINDS
from tests.support.contract import DRAM_BYTES, flood, make_cold
from tests.support.polling import poll_until

NBYTES = 100 * KIB
N = 8


@pytest.fixture
def namespace(model: str) -> Namespace:
    return opaque(NBYTES, model)


@pytest.fixture
def ns(kv: Any, namespace: Namespace) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(namespace)
    return bound


@pytest.fixture
def keys(kv: Any, namespace: Namespace) -> Keys:
    """Of a context that was put."""
    keys = chain(namespace, 1, N)
    assert put(kv, namespace, keys) == ["stored"] * N
    return keys


def assert_bytes(lease: Lease | list[memoryview], keys: Sequence[bytes]) -> None:
    assert [bytes(view) for view in lease] == payloads_of(keys, NBYTES)


def address_of(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def count_leases(kv: Any) -> int:
    count: int = kv.stats()["leases"]
    return count


class TestLease:
    def test_it_is_all_of_the_context_in_place(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with kv.get(ns, keys, timeout_s=0.5) as lease:
            assert (len(lease), lease.reason, lease.served) == (N, "", {"dram": N})
            assert_bytes(lease, keys)
            assert_bytes([lease[i] for i in range(N)], keys)
            assert_bytes(lease[2:5], keys[2:5])
            assert lease[-1] == lease[N - 1] == payload_of(keys[-1], NBYTES)
            for index in (N, -N - 1):
                with pytest.raises(IndexError):
                    lease[index]

    @pytest.mark.parametrize("held", [0, 1, N // 2, N - 1])
    def test_it_ends_at_the_first_gap_and_says_why(
        self, kv: Any, ns: BoundNamespace, keys: Keys, held: int
    ) -> None:
        kv.drop(ns, keys[held : held + 1])
        with kv.get(ns, keys) as lease:
            assert (len(lease), lease.reason) == (held, "absent")
            assert bool(lease) == (held > 0)
            assert_bytes(lease, keys[:held])

    def test_a_gap_is_not_skipped(self, kv: Any, ns: BoundNamespace, namespace: Namespace) -> None:
        """Blobs that somebody put without what they continue are out of reach from the root."""
        keys = chain(namespace, 2, 4)
        assert put(kv, namespace, keys[2:]) == ["stored"] * 2
        with kv.get(ns, keys) as lease:
            assert (len(lease), lease.reason) == (0, "absent")
        assert kv.match(ns, keys).blobs == 0
        assert put(kv, namespace, keys[:2]) == ["stored"] * 2
        with kv.get(ns, keys) as lease:
            assert_bytes(lease, keys)

    @pytest.mark.in_place
    def test_two_leases_show_the_same_memory(self, kv: Any, ns: BoundNamespace, keys: Keys) -> None:
        with kv.get(ns, keys) as one, kv.get(ns, keys[:3]) as two:
            for i in range(3):
                assert address_of(one[i]) == address_of(one[i]) == address_of(two[i])
            assert len({address_of(view) for view in one}) == N

    def test_nobody_can_write_to_what_is_leased(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        with kv.get(ns, keys) as lease:
            view = lease[0]
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 1
            array = np.frombuffer(view, np.uint8)
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True

    def test_it_loads_what_is_on_ssd(self, kv: Any, ns: BoundNamespace, keys: Keys) -> None:
        make_cold(kv, ns, keys)
        with kv.get(ns, keys) as lease:
            assert (lease.reason, lease.served) == ("", {"ssd": N})
            assert_bytes(lease, keys)
        with kv.get(ns, keys) as lease:
            assert lease.served == {"dram": N}

    @pytest.mark.in_place
    def test_one_that_must_not_wait_has_what_is_there(
        self, kv: Any, ns: BoundNamespace, keys: Keys
    ) -> None:
        make_cold(kv, ns, keys)
        with kv.get(ns, keys[:3]):
            pass
        started_s = time.monotonic()
        with kv.get(ns, keys, timeout_s=0) as lease:
            assert 3 <= len(lease) <= N
            assert (lease.reason == "deadline") == (len(lease) < N)
            assert_bytes(lease, keys[: len(lease)])
        assert time.monotonic() - started_s < 2.0
        poll_until(lambda: kv.match(ns, keys).tiers == ("dram",) * N, 5.0, "the load went on")


class TestItsEnd:
    @pytest.mark.in_place
    def test_a_view_outlives_the_block(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        with kv.get(ns, keys) as lease:
            view, array = lease[2], np.frombuffer(lease[5], np.uint8)
        kv.drop(ns, keys[:1])
        flood(other)
        assert view == payload_of(keys[2], NBYTES)
        assert array.tobytes() == payload_of(keys[5], NBYTES)
        assert count_leases(other) == 1
        del view
        assert count_leases(other) == 1
        del array
        poll_until(lambda: count_leases(other) == 0, 5.0, "the lease ends with its last view")
        with pytest.raises(InvalidRequest, match="released"):
            lease[0]

    @pytest.mark.in_place
    def test_an_idle_client_gives_back_what_it_let_go_of(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        view = kv.get(ns, keys)[0]
        assert count_leases(other) == 1
        del view
        poll_until(lambda: count_leases(other) == 0, 5.0, "the lease has ended")

    @pytest.mark.in_place
    def test_it_may_be_released_twice_and_others_stay(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        kept = kv.get(ns, keys)
        lease = kv.get(ns, keys)
        for _ in range(3):
            lease.release()
        with lease, pytest.raises(InvalidRequest, match="released"):
            lease[0]
        poll_until(lambda: count_leases(other) == 1, 5.0, "one is left")
        kv.drop(ns, keys[:1])
        flood(other)
        assert_bytes(kept, keys)
        kept.release()

    def test_an_exception_in_the_block_ends_it(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        with pytest.raises(ZeroDivisionError), kv.get(ns, keys) as lease:
            _ = lease[0][0] // 0
        poll_until(lambda: count_leases(other) == 0, 5.0, "the lease has ended")

    def test_a_thousand_that_nobody_used_leave_no_pin(
        self, kv: Any, kind: str, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        # Over HTTP each is a copy of all bytes, and none is held by the time that it is here.
        for number in range(100 if kind in HTTP_KINDS else 1000):
            lease = kv.get(ns, keys)
            if number % 3 == 0:
                cycle = [lease]
                cycle.append(cycle)
            elif number % 3 == 1:
                lease.release()
        del lease, cycle
        gc.collect()
        poll_until(lambda: other.stats()["pinned_bytes"] == 0, 5.0, "nothing is pinned")
        assert count_leases(other) == 0
        flood(other)

    @pytest.mark.in_place
    def test_what_is_leased_stays_under_a_flood_and_what_was_matched_need_not(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, other: Client
    ) -> None:
        leased, matched = chain(namespace, 2, N), chain(namespace, 3, N)
        for context in (leased, matched):
            put(kv, namespace, context, "volatile")
        assert kv.match(ns, matched).blobs == N
        with kv.get(ns, leased) as lease:
            flood(other)
            assert_bytes(lease, leased)
            with kv.get(ns, leased) as again:
                assert len(again) == N
        with kv.get(ns, matched) as late:
            assert (len(late), late.reason) == (0, "absent")

    @pytest.mark.in_place
    def test_a_full_arena_of_leases_refuses_puts_and_serves_on(self, kv: Any, model: str) -> None:
        large = opaque(MIB, model)
        ns, leases, reasons = kv.namespace(large), list[Lease](), [""]
        contexts = (chain(large, seed, 1) for seed in range(DRAM_BYTES // MIB))
        for keys in contexts:
            with kv.put(ns, keys, retention="volatile", timeout_s=0.1) as writer:
                writer[0][:] = payload_of(keys[0], MIB)
            if writer.results == ["refused"]:
                reasons = writer.reasons
                break
            leases.append(kv.get(ns, keys))
        assert reasons == ["full"]
        assert len(leases) >= DRAM_BYTES // 2 // MIB
        for seed, lease in enumerate(leases):
            (key,) = chain(large, seed, 1)
            assert lease[0] == kv.get(ns, [key])[0] == payload_of(key, MIB)
        leases.pop(3).release()
        assert put(kv, large, chain(large, 1000, 1), "volatile") == ["stored"]
        assert kv.match(ns, chain(large, 3, 1)).blobs == 0
        for lease in leases:
            lease.release()


class TestBeyondTheArena:
    @pytest.fixture
    def large(self, model: str) -> Namespace:
        return opaque(MIB, model)

    @pytest.fixture
    def context(self, kv: Any, large: Namespace) -> Keys:
        """Half as large again as the arena."""
        keys = chain(large, 1, DRAM_BYTES * 3 // 2 // MIB)
        assert put(kv, large, keys) == ["stored"] * len(keys)
        return keys

    def test_all_of_a_context_is_copied_through_it(
        self, kv: Any, large: Namespace, context: Keys
    ) -> None:
        ns = kv.namespace(large)
        assert kv.match(ns, context).blobs == len(context)
        buffers = [bytearray(MIB) for _ in context]
        assert kv.get_into(ns, context, buffers) == len(context)
        assert all(
            buffer == payload_of(key, MIB) for buffer, key in zip(buffers, context, strict=True)
        )

    @pytest.mark.parametrize("nbytes", [MIB + 7, 3 * MIB, 5 * MIB])
    def test_it_is_copied_whole_wherever_room_ends_in_a_window(
        self, kv: Any, model: str, nbytes: int
    ) -> None:
        odd = opaque(nbytes, model)
        keys = chain(odd, 1, DRAM_BYTES * 3 // 2 // nbytes)
        assert put(kv, odd, keys) == ["stored"] * len(keys)
        make_cold(kv, kv.namespace(odd), keys)
        buffers = [bytearray(nbytes) for _ in keys]
        assert kv.get_into(kv.namespace(odd), keys, buffers) == len(keys)
        assert buffers == payloads_of(keys, nbytes)

    @pytest.mark.in_place
    def test_a_lease_gives_as_much_as_there_is_room_for(
        self, kv: Any, large: Namespace, context: Keys
    ) -> None:
        ns = kv.namespace(large)
        make_cold(kv, ns, context)
        with kv.get(ns, context) as lease:
            assert DRAM_BYTES // 2 // MIB <= len(lease) <= DRAM_BYTES // MIB
            assert lease.reason == "no_room"
            assert all(
                view == payload_of(key, MIB) for key, view in zip(context, lease, strict=False)
            )

    @pytest.fixture
    def only_its_end(self, kv: Any, large: Namespace, context: Keys) -> None:
        """Most of the arena has the end of the context, and nothing of its head."""
        ns, end = kv.namespace(large), context[-DRAM_BYTES * 7 // 8 // MIB :]
        make_cold(kv, ns, context)
        with kv.get(ns, end) as lease:
            assert len(lease) == len(end)
        assert kv.match(ns, context).tiers[0] == "ssd"

    @pytest.mark.in_place
    @pytest.mark.usefixtures("only_its_end")
    @pytest.mark.parametrize("stream", [False, True])
    def test_its_end_in_dram_does_not_keep_its_head_out(
        self, kv: Any, large: Namespace, context: Keys, stream: bool
    ) -> None:
        ns = kv.namespace(large)
        with kv.get(ns, context, stream=stream) as lease:
            assert len(lease) >= DRAM_BYTES // 2 // MIB
            assert lease.reason == "no_room"
            for i, key in enumerate(context[: len(lease)]):
                assert lease.wait(i)
                assert lease[i] == payload_of(key, MIB)

    @pytest.mark.usefixtures("only_its_end")
    def test_prefetch_begins_with_the_head(self, kv: Any, large: Namespace, context: Keys) -> None:
        ns, half = kv.namespace(large), DRAM_BYTES // 2 // MIB
        assert kv.prefetch(ns, context) >= half
        poll_until(lambda: kv.match(ns, context[:half]).tiers == ("dram",) * half, 5.0)


class TestGetInto:
    @pytest.mark.parametrize("held", [0, 3, N])
    @pytest.mark.parametrize("cold", [False, True])
    def test_it_fills_the_leading_buffers_and_says_how_many(
        self, kv: Any, ns: BoundNamespace, keys: Keys, held: int, cold: bool
    ) -> None:
        kv.drop(ns, keys[held : held + 1])
        if cold:
            make_cold(kv, ns, keys[:held])
        buffers = [bytearray(b"\xaa" * NBYTES) for _ in keys]
        assert kv.get_into(ns, keys, buffers) == held
        assert [bytes(buffer) for buffer in buffers[:held]] == payloads_of(keys[:held], NBYTES)
        whole = np.full((N, NBYTES), 0xAA, np.uint8)
        assert kv.get_into(ns, keys, whole) == held
        assert [row.tobytes() for row in whole[:held]] == payloads_of(keys[:held], NBYTES)

    def test_it_holds_nothing_afterwards(
        self, kv: Any, ns: BoundNamespace, keys: Keys, other: Client
    ) -> None:
        kv.get_into(ns, keys, bytearray(N * NBYTES))
        poll_until(lambda: count_leases(other) == 0, 5.0, "its leases have ended")


@pytest.fixture
def tiny(kv: Any, model: str) -> BoundNamespace:
    """Of blobs without bytes."""
    bound: BoundNamespace = kv.namespace(opaque(0, model))
    return bound


class TestEmptyBlobs:
    def test_they_are_hits(self, kv: Any, tiny: BoundNamespace) -> None:
        keys = chain(tiny.namespace, 1, 3)
        with kv.put(tiny, keys) as writer:
            assert [writer[i].nbytes for i in range(3)] == [0, 0, 0]
        assert writer.results == ["stored"] * 3
        assert kv.put_from(tiny, keys, [b""] * 3) == ["exists"] * 3
        assert (kv.match(tiny, keys).blobs, kv.exists(tiny, keys)) == (3, [True] * 3)
        with kv.get(tiny, keys) as lease:
            assert (len(lease), lease.reason) == (3, "")
            assert [bytes(view) for view in lease] == [b""] * 3
        assert kv.get_into(tiny, keys, [bytearray()] * 3) == 3
        assert kv.get_into(tiny, keys, bytearray()) == 3
        assert [facts["nbytes"] for facts in kv.stat(tiny, keys)] == [0] * 3

    def test_unknown_ones_are_misses(self, kv: Any, tiny: BoundNamespace) -> None:
        keys = chain(tiny.namespace, 2, 3)
        with kv.get(tiny, keys) as lease:
            assert (len(lease), lease.reason) == (0, "absent")
        assert kv.get_into(tiny, keys, [bytearray()] * 3) == 0
        assert kv.exists(tiny, keys) == [False] * 3

    def test_they_survive_on_ssd(self, kv: Any, tiny: BoundNamespace) -> None:
        keys = chain(tiny.namespace, 3, 3)
        kv.put_from(tiny, keys, [b""] * 3, retention="durable")
        make_cold(kv, tiny, keys)
        assert kv.match(tiny, keys).tiers == ("ssd",) * 3
        with kv.get(tiny, keys) as lease:
            assert (len(lease), lease.served) == (3, {"ssd": 3})
        assert kv.drop(tiny, keys[:1]) == 3
