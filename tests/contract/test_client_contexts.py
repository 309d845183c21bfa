"""Whole contexts: one that replaces another, and one that will be needed soon."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from blobstore.clients import BoundNamespace, Hint, Keys
from blobstore.errors import InvalidRequest
from tests.support.blobs import TOKENS, chain, opaque, payload_of
from tests.support.both_clients import disconnect
from tests.support.polling import poll_until

NBYTES = 10_000
N = 6
N_SHARED = 2


@pytest.fixture
def ns(kv: Any, model: str) -> BoundNamespace:
    found: BoundNamespace = kv.namespace(opaque(NBYTES, model))
    return found


@pytest.fixture
def old(ns: BoundNamespace) -> Keys:
    return chain(ns.namespace, 1, N)


@pytest.fixture
def new(ns: BoundNamespace) -> Keys:
    """As `old` at its head."""
    ids = [1, *range(1, TOKENS * N_SHARED), *range(1000, 1000 + TOKENS * N)]
    return ns.namespace.keys(ids)


@pytest.fixture
def name(model: str) -> str:
    """Of a session."""
    return hashlib.sha256(model.encode()).hexdigest()


def put(kv: Any, ns: BoundNamespace, keys: Keys, **terms: Any) -> None:
    results = kv.put_from(ns, keys, [payload_of(key, NBYTES) for key in keys], **terms)
    assert set(results) <= {"stored", "exists"}


def first_in_s(kv: Any, ns: BoundNamespace, keys: Keys) -> list[float | None]:
    """In how long each blob leaves before others; None where it does not."""
    return [about["standing"].get("first_in_s") for about in kv.explain(ns, keys)]


class TestSupersede:
    def test_only_what_the_old_context_has_alone_leaves_first(
        self, kv: Any, ns: BoundNamespace, old: Keys, new: Keys
    ) -> None:
        assert old[:N_SHARED] == new[:N_SHARED]
        put(kv, ns, old)
        put(kv, ns, new)
        assert kv.supersede(ns, old[-1], new[-1]) == N - N_SHARED
        told = first_in_s(kv, ns, old)
        assert told[:N_SHARED] == [None] * N_SHARED
        assert all(left is not None and 0 < left <= 60 for left in told[N_SHARED:])
        assert first_in_s(kv, ns, new) == [None] * len(new)
        with kv.get(ns, old) as lease:
            assert len(lease) == N
        assert first_in_s(kv, ns, old) == [None] * N

    def test_it_is_taken_back_by_the_other_way_round(
        self, kv: Any, ns: BoundNamespace, old: Keys, new: Keys
    ) -> None:
        put(kv, ns, old)
        put(kv, ns, new)
        kv.supersede(ns, old[-1], new[-1])
        assert kv.supersede(ns, new[-1], old[-1]) == len(new) - N_SHARED
        assert first_in_s(kv, ns, old) == [None] * N

    def test_of_what_is_not_held_there_is_nothing_to_say(
        self, kv: Any, ns: BoundNamespace, old: Keys, new: Keys
    ) -> None:
        assert kv.supersede(ns, old[-1], new[-1]) == 0
        put(kv, ns, old)
        assert kv.supersede(ns, old[-1], new[-1]) == 0
        assert kv.supersede(ns, old[-1], old[-1]) == 0

    @pytest.mark.parametrize("leaf", [b"", b"short", b"x" * 65, "text", None])
    def test_what_is_no_key_is_the_callers_mistake(
        self, leaf: Any, kv: Any, ns: BoundNamespace, old: Keys
    ) -> None:
        with pytest.raises(InvalidRequest):
            kv.supersede(ns, old[-1], leaf)
        with pytest.raises(InvalidRequest):
            kv.supersede(ns, leaf, old[-1])

    def test_a_fault_is_a_miss(self, kv: Any, ns: BoundNamespace, old: Keys, new: Keys) -> None:
        disconnect(kv)
        assert kv.supersede(ns, old[-1], new[-1]) == 0
        assert kv.prefetch(session="s") == 0


class TestPrefetch:
    def cold(self, kv: Any, ns: BoundNamespace, keys: Keys) -> None:
        """On SSD alone."""

        def left() -> bool:
            kv.drop(ns, keys, "dram")
            return all(facts["tiers"] == ["ssd"] for facts in kv.stat(ns, keys))

        poll_until(left, 20.0, "all are on SSD alone")

    def test_the_context_of_a_session_comes_back_before_its_turn(
        self, kv: Any, ns: BoundNamespace, old: Keys, name: str
    ) -> None:
        session = kv.session(name)
        session.put_from(ns, old, [payload_of(key, NBYTES) for key in old])
        self.cold(kv, ns, old)
        assert session.prefetch() == N
        poll_until(lambda: kv.match(ns, old).warm == N, 10.0, "it is in DRAM")
        self.cold(kv, ns, old)
        assert kv.prefetch(session=name) == N
        poll_until(lambda: kv.match(ns, old).warm == N, 10.0, "it is in DRAM")
        assert kv.prefetch(session=name) == 0

    def test_a_compacted_session_comes_back_as_it_is_now(
        self, kv: Any, ns: BoundNamespace, old: Keys, new: Keys, name: str
    ) -> None:
        put(kv, ns, old, hint=Hint(name))
        put(kv, ns, new)
        kv.supersede(ns, old[-1], new[-1])
        self.cold(kv, ns, new[N_SHARED:])
        assert kv.prefetch(session=name) == len(new) - N_SHARED

    def test_of_a_session_that_is_not_known_nothing_comes(self, kv: Any, name: str) -> None:
        assert kv.prefetch(session=name) == 0

    def test_it_is_a_chain_or_a_session(self, kv: Any, ns: BoundNamespace, old: Keys) -> None:
        for arguments in ({}, {"ns": ns}, {"keys": old}, {"ns": ns, "keys": old, "session": "s"}):
            with pytest.raises(InvalidRequest, match="a namespace and keys, or a session"):
                kv.prefetch(**arguments)
        with pytest.raises(InvalidRequest):
            kv.prefetch(session="x" * 257)
        with pytest.raises(InvalidRequest, match="not to 'hbm'"):
            kv.prefetch(session="s", tier="hbm")
