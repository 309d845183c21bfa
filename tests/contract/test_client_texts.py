"""What is told of the tokens of blobs, and how it is erased: with each kind of client."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, Client, Keys, Namespace, Terms
from blobstore.errors import InvalidRequest
from tests.support.blobs import TOKENS, opaque, payloads_of
from tests.support.polling import poll_until

N = 6
NBYTES = 5000


@pytest.fixture
def ids(model: str) -> Any:
    return np.random.default_rng(len(model)).integers(0, 50_000, N * TOKENS)


@pytest.fixture
def namespace(model: str) -> Namespace:
    return opaque(NBYTES, model)


@pytest.fixture
def ns(kv: Any, namespace: Namespace) -> BoundNamespace:
    found: BoundNamespace = kv.namespace(namespace)
    return found


@pytest.fixture
def keys(namespace: Namespace, ids: Any) -> Keys:
    return namespace.keys(ids)


@pytest.fixture
def contents(keys: Keys) -> list[bytes]:
    return payloads_of(keys, NBYTES)


def entries(other: Client) -> int:
    """Texts that are kept, once none is on its way."""
    texts: dict[str, int] = {}

    def at_rest() -> bool:
        texts.update(other.stats()["texts"])
        return texts["pending"] == 0

    poll_until(at_rest, 20.0, "no text is on its way")
    return texts["entries"]


class Kept:
    """How many texts came since this was made."""

    def __init__(self, other: Client) -> None:
        self._other = other
        self._before = entries(other)

    def __call__(self) -> int:
        return entries(self._other) - self._before


@pytest.fixture
def kept(other: Client) -> Kept:
    return Kept(other)


class TestToldWithAPut:
    def test_the_tokens_of_a_put_are_kept(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        with kv.put(ns, keys[:2], token_ids=ids[: 2 * TOKENS], text="said") as writer:
            for view, payload in zip((writer[0], writer[1]), contents, strict=False):
                view[:] = payload
        assert kept() == 2
        rest = ids[2 * TOKENS :].tolist()
        kv.put_from(ns, keys[2:], contents[2:], token_ids=rest, parent=keys[1])
        assert kept() == N

    def test_once_each(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        for _ in range(2):
            kv.put_from(ns, keys, contents, token_ids=ids)
            assert kept() == N

    def test_of_blobs_that_were_there_before(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        kv.put_from(ns, keys, contents)
        assert kept() == 0
        assert kv.put_from(ns, keys, contents, token_ids=ids) == ["exists"] * N
        assert kept() == N

    def test_but_not_of_volatile_ones(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        kv.put_from(ns, keys, contents, token_ids=ids, retention="volatile")
        assert kept() == 0

    def test_ids_of_a_run_that_is_no_blob_may_follow(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        kv.put_from(ns, keys[:3], contents[:3], token_ids=ids[: 4 * TOKENS - 1])
        assert kept() == 3

    def test_a_tail_has_a_text_too(
        self, kv: Any, ns: BoundNamespace, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        keys = ns.keys(ids[:-1], tail=True)
        kv.put_from(ns, keys, contents, token_ids=ids[:-1])
        assert kept() == N

    @pytest.mark.parametrize("n", [0, 1, N * TOKENS - 1, (N + 1) * TOKENS])
    def test_another_number_is_refused_with_both(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], n: int
    ) -> None:
        with pytest.raises(InvalidRequest, match=rf"{n} token ids .* {N * TOKENS} tokens"):
            kv.put_from(ns, keys, contents, token_ids=range(n))
        with pytest.raises(InvalidRequest, match=rf"{n} token ids .* {N * TOKENS} tokens"):
            kv.put(ns, keys, token_ids=range(n))

    def test_a_text_that_cannot_be_kept_is_refused(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        with pytest.raises(InvalidRequest, match="a text of 1048577 bytes"):
            kv.put_from(ns, keys, contents, text="x" * (1 << 20) + "y")
        for text in ("\ud800", b"bytes"):
            with pytest.raises(InvalidRequest, match="a text is a str"):
                kv.put_from(ns, keys, contents, text=text)

    def test_tokens_that_are_not_those_of_the_keys_are_not_kept(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], kept: Kept
    ) -> None:
        assert kv.put_from(ns, keys, contents, token_ids=range(N * TOKENS)) == ["stored"] * N
        assert kept() == 0

    def test_a_session_tells_them_too(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        kv.session("s").put_from(ns, keys, contents, token_ids=ids, text="said")
        assert kept() == N


class TestTerms:
    @pytest.mark.parametrize(("text", "n"), [("off", 0), ("tokens", N), ("text", N)])
    def test_a_namespace_says_what_is_kept(
        self, kv: Any, namespace: Namespace, ids: Any, text: str, n: int, kept: Kept
    ) -> None:
        ns = kv.namespace(replace(namespace, salt=text), terms=Terms(text=text))
        keys = ns.keys(ids)
        kv.put_from(ns, keys, payloads_of(keys, NBYTES), token_ids=ids)
        assert kept() == n

    def test_what_was_told_last_stands_for_all(
        self, kv: Any, namespace: Namespace, ids: Any, other: Client, kept: Kept
    ) -> None:
        kv.namespace(namespace, terms=Terms(text="off", recall="fetch"))
        ns = other.namespace(namespace)
        keys = ns.keys(ids)
        contents = payloads_of(keys, NBYTES)
        other.put_from(ns, keys, contents, token_ids=ids)
        assert kept() == 0
        kv.namespace(namespace, terms=Terms(text="tokens"))
        other.put_from(ns, keys, contents, token_ids=ids)
        assert kept() == N


class TestForgetting:
    def test_it_drops_and_erases_all_that_continues(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        kv.put_from(ns, keys, contents, token_ids=ids)
        assert kept() == N
        assert kv.forget(ns, keys[2:3]) == N - 2
        assert kv.match(ns, keys).blobs == 2
        assert kept() == 2
        assert kv.forget(ns, keys[2:]) == 0

    def test_texts_stay_when_blobs_are_dropped_and_can_be_erased_later(
        self, kv: Any, ns: BoundNamespace, keys: Keys, ids: Any, contents: list[bytes], kept: Kept
    ) -> None:
        kv.put_from(ns, keys, contents, token_ids=ids)
        assert kv.drop(ns, keys[:1]) == N
        assert kept() == N
        assert kv.forget(ns, keys[:1]) == N
        assert kept() == 0

    def test_blobs_without_texts_are_counted_too(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys, contents)
        assert kv.forget(ns, keys) == N
        assert kv.exists(ns, keys) == [False] * N


def test_nothing_that_is_told_of_a_blob_tells_its_tokens(
    kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], ids: Any, other: Client
) -> None:
    kv.put_from(ns, keys, contents, token_ids=ids, text="what nobody may read")
    told = repr((other.stat(ns, keys), other.explain(ns, keys), other.stats()))
    assert "nobody may read" not in told
    assert ids.astype("<u4").tobytes().hex()[:32] not in told
    assert repr(ids[:3].tolist())[1:-1] not in told


def test_sessions_take_what_puts_take() -> None:
    from blobstore.clients import AsyncClient, AsyncClientSession, ClientSession

    for client, session in ((Client, ClientSession), (AsyncClient, AsyncClientSession)):
        for name in ("put", "put_from"):
            wanted = inspect.signature(getattr(client, name)).parameters
            assert inspect.signature(getattr(session, name)).parameters.keys() >= (
                wanted.keys() - {"self"}
            )
