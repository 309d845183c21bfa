"""The clients' contract: connecting, identity, what is held, and what becomes of it."""

from __future__ import annotations

import json
import socket
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import (
    BoundNamespace,
    Client,
    Keys,
    KVLayout,
    LayerGroup,
    Lease,
    Namespace,
)
from blobstore.errors import InvalidRequest, SizeMismatch, Unavailable
from blobstore.units import KIB, MIB
from tests.support.blobs import TOKENS, chain, opaque, payload_of, payloads_of, put
from tests.support.both_clients import connect, disconnect
from tests.support.contract import flood, make_cold
from tests.support.daemon import Daemon
from tests.support.polling import poll_until

NBYTES = 100 * KIB
"""Above what the catalogue keeps beside its rows."""
N = 8


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


def assert_bytes(lease: Lease, keys: Sequence[bytes], nbytes: int = NBYTES) -> None:
    assert [bytes(view) for view in lease] == payloads_of(keys, nbytes)


class TestConnecting:
    def test_a_client_connects_now_or_raises(self, kind: str, shared: Daemon) -> None:
        with connect(kind, shared.address) as kv:
            assert kv.ping()
        nobody = shared.socket.with_name("nobody")
        with pytest.raises(Unavailable, match=str(nobody)):
            connect(kind, f"unix:{nobody}", timeout_s=1.0)

    def test_a_socket_that_nobody_serves_any_more_is_unavailable(
        self, kind: str, tmp_path: Path
    ) -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "s"))
        with pytest.raises(Unavailable):
            connect(kind, f"unix:{tmp_path / 's'}", timeout_s=1.0)

    def test_all_clients_meet_the_same_run_of_the_daemon(self, kv: Any, other: Client) -> None:
        assert kv.ping() is True
        assert kv.boot_id == other.boot_id == other.stats()["boot_id"] != 0

    def test_a_closed_client_misses_and_its_views_stay_right(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys, other: Client
    ) -> None:
        put(kv, namespace, keys)
        with kv.get(ns, keys) as lease:
            view = lease[3]
            disconnect(kv)
        assert kv.ping() is False
        assert (kv.match(ns, keys).blobs, kv.match(ns, keys).reason) == (0, "unavailable")
        assert kv.put_from(ns, keys[:1], [bytes(NBYTES)]) == ["refused"]
        assert kv.exists(ns, keys) == [False] * N
        assert (len(kv.get(ns, keys)), kv.get(ns, keys).reason) == (0, "unavailable")
        flood(other)
        assert view == payload_of(keys[3], NBYTES)
        disconnect(kv)


class TestIdentity:
    def test_a_namespace_is_declared_as_often_as_one_likes(
        self, kv: Any, other: Client, namespace: Namespace
    ) -> None:
        ids = {kv.namespace(namespace).id for _ in range(3)}
        known = other.stats()["namespaces"]
        ids |= {kv.namespace(namespace).id, other.namespace(namespace).id}
        assert ids == {namespace.id}
        assert other.stats()["namespaces"] == known

    def test_a_namespace_of_one_client_serves_another(
        self, kv: Any, other: Client, ns: BoundNamespace, keys: Keys
    ) -> None:
        assert other.put_from(ns, keys, payloads_of(keys, NBYTES)) == ["stored"] * N
        assert kv.match(other.namespace(ns.namespace), keys).blobs == N

    def test_keys_are_equal_however_the_ids_are_held(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace
    ) -> None:
        ids = [*range(3, 3 + N * TOKENS), 7]  # one too few for another blob
        wide = np.asarray(ids, np.int64).repeat(2)
        held = {
            "list": ids,
            "tuple": tuple(ids),
            "int32": np.asarray(ids, np.int32),
            "int64": np.asarray(ids),
            "uint16, big end first": np.asarray(ids, ">u2"),
            "every other of an array": wide[::2],
            "array": array("Q", ids),
            "memoryview": memoryview(array("i", ids)),
        }
        chains = {name: ns.keys(value) for name, value in held.items()}
        expected = list(ns.keys(ids))
        assert [len(key) for key in expected] == [32] * N
        assert {name: list(keys) for name, keys in chains.items()} == dict.fromkeys(held, expected)
        put(kv, namespace, chains["list"])
        assert {name: kv.match(ns, keys).blobs for name, keys in chains.items()} == dict.fromkeys(
            held, N
        )

    @pytest.mark.parametrize("key_bytes", [8, 20, 64])
    def test_an_engine_may_bring_its_own_keys(self, kv: Any, model: str, key_bytes: int) -> None:
        namespace = Namespace(model, KVLayout.opaque(NBYTES), hash_scheme="engine-xxh3")
        ns = kv.namespace(namespace)
        rng = np.random.default_rng(key_bytes)
        keys = [rng.bytes(key_bytes) for _ in range(N)]
        assert kv.put_from(ns, keys, payloads_of(keys, NBYTES)) == ["stored"] * N
        assert kv.match(ns, keys).blobs == N
        assert kv.match(ns, [*keys[:4], bytes(key_bytes)]).blobs == 4
        with kv.get(ns, keys) as lease:
            assert_bytes(lease, keys)
        make_cold(kv, ns, keys)
        with kv.get(ns, keys) as lease:
            assert_bytes(lease, keys)
        with pytest.raises(InvalidRequest, match="engine-xxh3"):
            ns.keys(range(100))

    @pytest.mark.parametrize(
        ("keys", "why"),
        [
            ([b"7 bytes"], "7 bytes"),
            ([bytes(65)], "65 bytes"),
            ([bytes(8), bytes(9)], "9 bytes, the others 8"),
            (["text"], "str"),
            (b"8 bytes.", "bytes"),
        ],
    )
    def test_other_keys_are_the_callers_mistake(
        self, kv: Any, ns: BoundNamespace, keys: Any, why: str
    ) -> None:
        for verb in (kv.match, kv.get, kv.put, kv.exists, kv.drop, kv.prefetch, kv.stat):
            with pytest.raises(InvalidRequest, match=why):
                verb(ns, keys)

    def test_keys_of_different_lengths_share_a_namespace(self, kv: Any, model: str) -> None:
        ns = kv.namespace(Namespace(model, KVLayout.opaque(8), hash_scheme="engine"))
        short, long = [b"12345678"], [b"12345678" + bytes(24)]
        assert kv.put_from(ns, short, [b"8 bytes."]) == ["stored"]
        assert kv.exists(ns, long) == [False]
        assert kv.put_from(ns, long, [b"8 others"]) == ["stored"]
        assert bytes(kv.get(ns, short)[0]) == b"8 bytes."
        assert bytes(kv.get(ns, long)[0]) == b"8 others"


ATTENTION = LayerGroup.attention(layers=2, heads=2, head_size=4)
SLIDING = LayerGroup.sliding(layers=2, heads=2, head_size=4, window=64)
STATE = LayerGroup.state(layers=2, heads=2, state_bytes=64)
LAYOUT = KVLayout((ATTENTION, SLIDING, STATE))

OTHER_GROUPS: dict[str, list[LayerGroup]] = {
    "kind": [SLIDING, LayerGroup.latent(layers=2, width=16)],
    "layers": [replace(ATTENTION, layers=1), replace(ATTENTION, layers=4)],
    "heads": [replace(ATTENTION, heads=1), replace(ATTENTION, heads=4)],
    "head_size": [replace(ATTENTION, head_size=8)],
    "dtype": [replace(ATTENTION, dtype="fp16"), replace(ATTENTION, dtype="fp8")],
    "window": [replace(SLIDING, window=128)],
    "state_bytes": [replace(STATE, state_bytes=128)],
}
OTHER_LAYOUTS: dict[str, list[KVLayout]] = {
    "groups": [
        *(KVLayout((group, *LAYOUT.groups[1:])) for of in OTHER_GROUPS.values() for group in of),
        KVLayout((SLIDING, ATTENTION, STATE)),
        KVLayout((ATTENTION, SLIDING)),
        KVLayout.opaque(LAYOUT.nbytes(TOKENS)),
    ],
    "layers_per_part": [replace(LAYOUT, layers_per_part=2)],
    "head_groups": [replace(LAYOUT, head_groups=2)],
    "order": [replace(LAYOUT, order="layer,token,kv,head")],
}
OTHERS: dict[str, Sequence[Any]] = {
    "model": ["n", "M", "m ", "m\0"],
    "layout": [layout for of in OTHER_LAYOUTS.values() for layout in of],
    "revision": ["r2", "", "R"],
    "weights_digest": ["w2", ""],
    "dtype": ["fp16", "fp8"],
    "tokens_per_blob": [TOKENS * 2, 1],
    "adapter": ["lora:2", "", "lora:1 "],
    "salt": ["t2", ""],
    "hash_scheme": ["engine"],
}


class TestTwoNamespaces:
    @pytest.mark.parametrize(
        ("of", "others"),
        [(Namespace, OTHERS), (KVLayout, OTHER_LAYOUTS), (LayerGroup, OTHER_GROUPS)],
    )
    def test_the_next_test_varies_every_field(self, of: type[Any], others: dict[str, Any]) -> None:
        assert set(others) == {field.name for field in fields(of) if field.init}

    def test_that_differ_in_one_field_never_meet(self, kv: Any, model: str) -> None:
        """Under keys that are equal, as an engine's block hashes would be."""
        base = Namespace(
            model="m", layout=LAYOUT, revision="r", weights_digest="w", dtype="bf16",
            tokens_per_blob=TOKENS, adapter="lora:1", salt=f"{model} t",
        )  # fmt: skip
        changes: list[dict[str, Any]] = [
            {name: f"{model} {value}" if name == "salt" else value}
            for name, values in OTHERS.items()
            for value in values
        ]
        variants = [replace(base, **change) for change in changes]
        every = [base, *variants]
        assert len({namespace.id for namespace in every}) == len(every)
        keys = list(base.keys(range(TOKENS * 2)))
        bound = [kv.namespace(namespace) for namespace in every]
        for number, ns in enumerate(bound):
            assert kv.match(ns, keys).blobs == 0
            assert kv.exists(ns, keys) == [False, False]
            assert len(kv.get(ns, keys)) == 0
            contents = [bytes([number + 1]) * ns.layout.nbytes(ns.tokens_per_blob)] * 2
            assert kv.put_from(ns, keys, contents) == ["stored", "stored"]
        for number, ns in enumerate(bound):
            assert {*kv.get(ns, keys)[0], *kv.get(ns, keys)[1]} == {number + 1}
        assert kv.drop(bound[0], keys) == 2
        assert [kv.match(ns, keys).blobs for ns in bound] == [0] + [2] * len(variants)

    def test_that_differ_share_no_keys(self) -> None:
        ids = range(64)
        base = Namespace("m", KVLayout.opaque(8), tokens_per_blob=TOKENS)
        variants = [replace(base, salt="t"), replace(base, model="n"), replace(base, adapter="a")]
        chains = [set(namespace.keys(ids)) for namespace in (base, *variants)]
        assert len(set().union(*chains)) == sum(map(len, chains))


class TestMatch:
    @pytest.mark.parametrize("held", [0, 1, N // 2, N - 1, N])
    def test_it_counts_the_leading_blobs_that_are_held(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys, held: int
    ) -> None:
        put(kv, namespace, keys[:held])
        hit = kv.match(ns, keys)
        assert (hit.blobs, hit.tokens, hit.reason) == (held, held * TOKENS, "")
        assert hit.tiers == ("dram",) * held
        assert hit.eta_s == 0.0
        assert kv.exists(ns, keys) == [True] * held + [False] * (N - held)

    def test_it_says_where_the_blobs_would_come_from(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys)
        make_cold(kv, ns, keys)
        cold = kv.match(ns, keys)
        assert cold.tiers == ("ssd",) * N
        with kv.get(ns, keys[:3]) as lease:
            assert lease.served == {"ssd": 3}
        half = kv.match(ns, keys)
        assert half.tiers == ("dram",) * 3 + ("ssd",) * (N - 3)
        assert 0 < half.eta_s < 10
        with kv.get(ns, keys) as lease:
            assert lease.served == {"dram": 3, "ssd": N - 3}
        assert kv.match(ns, keys).tiers == ("dram",) * N

    def test_a_cold_head_is_not_taken_for_warm_because_the_end_is(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys[:5])
        make_cold(kv, ns, keys[:5])
        contents = payloads_of(keys[5:], NBYTES)
        kv.put_from(ns, keys[5:], contents, parent=keys[4])
        assert kv.match(ns, keys).tiers == ("ssd",) * N
        assert [facts["tiers"][0] for facts in kv.stat(ns, keys)] == ["ssd"] * 5 + ["dram"] * 3

    def test_branches_share_their_head(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace
    ) -> None:
        ids = list(range(N * TOKENS))
        keys, branch = ns.keys(ids), ns.keys(ids[: 5 * TOKENS] + [9] * 3 * TOKENS)
        put(kv, namespace, keys)
        assert kv.match(ns, branch).blobs == 5
        assert put(kv, namespace, branch) == ["exists"] * 5 + ["stored"] * 3
        assert kv.match(ns, keys).blobs == kv.match(ns, branch).blobs == N

    def test_a_tail_counts_its_own_tokens(self, kv: Any, model: str) -> None:
        layout = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=8),))
        ns = kv.namespace(Namespace(model, layout, tokens_per_blob=16))
        ids = list(range(16 * 3 + 5))
        keys = ns.keys(ids, tail=True)
        assert len(keys) == 4
        sizes = [layout.nbytes(16)] * 3 + [layout.nbytes(5)]
        contents = [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert kv.put_from(ns, keys, contents) == ["stored"] * 4
        assert kv.match(ns, keys).tokens == len(ids)
        assert kv.match(ns, keys[:3]).tokens == 48
        with kv.get(ns, keys) as lease:
            assert [bytes(view) for view in lease] == contents
            assert b"".join(lease.parts(3)) == contents[3]
        longer = ns.keys([*ids, *range(900, 911)], tail=True)
        assert (len(longer), kv.match(ns, longer).tokens) == (4, 48)

    def test_a_tail_of_which_the_caller_does_not_know_is_refused_with_both_sizes(
        self, kv: Any, model: str
    ) -> None:
        """Else views would run into the memory of the next blob."""
        layout = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=8),))
        ns = kv.namespace(Namespace(model, layout, tokens_per_blob=16))
        keys = ns.keys(range(21), tail=True)
        full, tail = layout.nbytes(16), layout.nbytes(5)
        kv.put_from(ns, keys, [b"f" * full, b"t" * tail])
        unaware = list(keys)
        with kv.get(ns, unaware) as lease:
            assert [len(view) for view in lease] == [full, tail]
            with pytest.raises(SizeMismatch, match=f"{tail} bytes.*{full}"):
                lease.parts(1)
        with kv.get(ns, unaware, stream=True) as lease, pytest.raises(SizeMismatch):
            lease.wait(1, 0)
        with pytest.raises(SizeMismatch, match=f"{tail} bytes.*{full}"):
            kv.get_into(ns, unaware, [bytearray(full), bytearray(full)])

    def test_it_neither_keeps_nor_uses(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        """A promise of match is none: the lease says what there is."""
        put(kv, namespace, keys, "volatile")
        (before,) = kv.stat(ns, keys[-1:])
        for _ in range(1000):
            assert kv.match(ns, keys).blobs == N
        assert kv.exists(ns, keys) == [True] * N
        (after,) = kv.stat(ns, keys[-1:])
        assert after["idle_s"] > before["idle_s"]
        assert kv.stats()["pinned_bytes"] == 0
        flood(kv)
        with kv.get(ns, keys) as lease:
            assert (len(lease), lease.reason) == (0, "absent")

    def test_any_order_of_keys_gets_the_bytes_of_those_keys(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys)
        unknown = bytes(32)
        for order in ([7, 6, 5, 4], [3, 0, 7], [2, 2], [0, -1, 5], [0, -1, 2, 3, 4, 5, 6]):
            asked = [keys[i] if i >= 0 else unknown for i in order]
            with kv.get(ns, asked) as lease:
                assert_bytes(lease, asked[: len(lease)])
                assert len(lease) == ([*order, -1].index(-1))
            hit = kv.match(ns, asked)
            assert len(hit.tiers) == hit.blobs <= len(asked)

    def test_no_keys_are_nothing(self, kv: Any, ns: BoundNamespace) -> None:
        assert (kv.match(ns, []).blobs, kv.match(ns, []).tokens, len(kv.get(ns, []))) == (0, 0, 0)
        assert (kv.exists(ns, []), kv.stat(ns, []), kv.drop(ns, [])) == ([], [], 0)
        assert kv.put_from(ns, [], []) == []
        assert kv.get_into(ns, [], []) == 0
        with kv.put(ns, []) as writer:
            assert len(writer) == 0


class TestKeeping:
    def test_drop_takes_all_that_continues_the_blob(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace
    ) -> None:
        ids = list(range(N * TOKENS))
        keys, branch = ns.keys(ids), ns.keys(ids[: 5 * TOKENS] + [9] * 3 * TOKENS)
        put(kv, namespace, keys)
        put(kv, namespace, branch)
        assert kv.drop(ns, keys[6:7]) == 2
        assert (kv.match(ns, keys).blobs, kv.match(ns, branch).blobs) == (6, N)
        assert kv.drop(ns, keys[2:4]) == 7
        assert (kv.match(ns, keys).blobs, kv.match(ns, branch).blobs) == (2, 2)
        assert kv.drop(ns, keys[2:]) == 0
        assert kv.drop(ns, keys) == 2
        assert kv.match(ns, keys).blobs == 0
        assert put(kv, namespace, keys) == ["stored"] * N

    @pytest.mark.parametrize("cold", [False, True])
    def test_what_was_dropped_does_not_come_back(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys, cold: bool
    ) -> None:
        put(kv, namespace, keys)
        if cold:
            make_cold(kv, ns, keys)
        assert kv.drop(ns, keys[:1]) == N
        assert kv.exists(ns, keys) == [False] * N
        assert len(kv.get(ns, keys)) == 0
        assert kv.stat(ns, keys) == [{}] * N

    def test_a_lease_outlives_a_drop(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys)
        with kv.get(ns, keys) as lease:
            assert kv.drop(ns, keys[:1]) == N
            assert kv.match(ns, keys).blobs == 0
            assert kv.put_from(ns, keys, [b"o" * NBYTES] * N) == ["stored"] * N
            flood(kv)
            assert_bytes(lease, keys)
        with kv.get(ns, keys) as lease:
            assert [set(view) for view in lease] == [set(b"o")] * N

    def test_a_copy_in_dram_is_dropped_only_if_there_is_another(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys, "volatile")
        assert kv.drop(ns, keys, "dram") == 0
        assert kv.match(ns, keys).tiers == ("dram",) * N
        with pytest.raises(InvalidRequest, match="'tape'"):
            kv.drop(ns, keys, "tape")

    def test_a_pin_keeps_blobs_for_its_time(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        unpinned = chain(namespace, 2, N)
        for context in (keys, unpinned):
            put(kv, namespace, context, "volatile")
        assert kv.pin(ns, keys, ttl_s=600) == N
        flood(kv)
        assert kv.match(ns, unpinned).blobs == 0
        assert kv.match(ns, keys).tiers == ("dram",) * N
        assert kv.pin(ns, keys, ttl_s=0) == N
        assert kv.pin(ns, unpinned, ttl_s=600) == 0
        flood(kv)
        assert kv.match(ns, keys).blobs == 0

    def test_a_pin_ends_by_itself(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys, "volatile")
        assert kv.pin(ns, keys, ttl_s=0.1) == N
        poll_until(lambda: kv.stats()["pinned_bytes"] == 0, 5.0, "the pin has ended")
        flood(kv)
        assert kv.match(ns, keys).blobs == 0

    def test_a_pin_does_not_keep_from_a_drop(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys)
        kv.pin(ns, keys, ttl_s=600)
        assert kv.drop(ns, keys[:1]) == N
        assert kv.exists(ns, keys) == [False] * N

    def test_what_was_prefetched_is_served_from_dram(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys)
        make_cold(kv, ns, keys)
        begun: list[int] = []

        def all_are_on_their_way() -> bool:
            # Room that others' blobs leave once they are on SSD is not waited for by a prefetch.
            begun.append(kv.prefetch(ns, keys))
            return sum(begun) >= N

        poll_until(all_are_on_their_way, 5.0)
        assert sum(begun) == N, "each begins once"
        poll_until(lambda: kv.match(ns, keys).tiers == ("dram",) * N, 5.0, "they are in DRAM")
        with kv.get(ns, keys) as lease:
            assert lease.served == {"dram": N}
            assert_bytes(lease, keys)
        assert kv.prefetch(ns, keys) == 0
        assert kv.prefetch(ns, chain(namespace, 2, 1)) == 0
        with pytest.raises(InvalidRequest, match="'hbm'"):
            kv.prefetch(ns, keys, "hbm")


class TestReports:
    @pytest.mark.in_place
    def test_stat_tells_what_a_blob_is(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys[:2], "volatile")
        first, second, third = kv.stat(ns, keys[:3])
        assert third == {}
        assert (first["key"], first["parent"], first["depth"]) == (keys[0].hex(), "", 1)
        assert (second["parent"], second["depth"]) == (keys[0].hex(), 2)
        assert (first["nbytes"], first["tokens"]) == (NBYTES, TOKENS)
        assert (first["retention"], first["tiers"]) == ("volatile", ["dram"])
        with kv.get(ns, keys[:2]):
            assert kv.stat(ns, keys[1:2])[0]["pins"] == 1
        assert kv.stat(ns, keys[1:2])[0]["pins"] == 0

    @pytest.mark.in_place
    def test_stats_count_what_was_done(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        def counted() -> dict[str, int]:
            counters = kv.stats()["counters"]
            return {
                "matches": counters["matches"],
                "gets": counters["gets"],
                "dram": counters["hit_blobs"].get("dram", 0),
                "dram bytes": counters["hit_bytes"].get("dram", 0),
                "absent": counters["missed_blobs"].get("absent", 0),
                "stored": counters["put_blobs"].get("stored", 0),
                "exists": counters["put_blobs"].get("exists", 0),
            }

        before = counted()
        put(kv, namespace, keys[:6])
        put(kv, namespace, keys[4:6])
        kv.match(ns, keys)
        kv.get(ns, keys).release()
        after = counted()
        assert {name: after[name] - before[name] for name in after} == {
            "matches": 1, "gets": 1, "dram": 6, "dram bytes": 6 * NBYTES, "absent": 2,
            "stored": 6, "exists": 2,
        }  # fmt: skip

    def test_stats_are_plain_values(self, kv: Any) -> None:
        stats = kv.stats()
        assert json.loads(json.dumps(stats)) == stats
        assert set(stats["tiers"]) == {"dram", "ssd"}
        for tier in stats["tiers"].values():
            assert 0 <= tier["used_bytes"] <= tier["capacity_bytes"]
        assert stats["tiers"]["dram"]["capacity_bytes"] == 32 * MIB

    def test_verify_reads_every_copy(
        self, kv: Any, ns: BoundNamespace, namespace: Namespace, keys: Keys
    ) -> None:
        put(kv, namespace, keys)
        make_cold(kv, ns, keys)
        report = kv.verify(timeout_s=60.0)
        assert (report["complete"], report["corrupt"], report["unreadable"]) == (True, [], [])
        assert report["copies"] >= report["blobs"] >= N
        assert report["bytes"] >= N * NBYTES
        assert kv.verify(timeout_s=0)["complete"] is False
