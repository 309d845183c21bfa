"""What clients say of tokens, and what they do when erasing fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, KVLayout, Namespace, Terms, operations, writing
from blobstore.clients.writing import PutTerms, packed_tokens
from blobstore.errors import DeadlineExceeded, InvalidRequest, StorageFailed
from blobstore.protocol import Declare, Done, Failed, Forget, Reserve
from tests.support.both_clients import KINDS, connect
from tests.support.scripted_daemon import ScriptedDaemon

TOKENS = 16
NBYTES = 5000
NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES), tokens_per_blob=TOKENS)
N = 6
IDS = range(N * TOKENS)
KEYS = NAMESPACE.keys(IDS)
CONTENTS = [bytes([number]) * NBYTES for number in range(N)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        yield daemon


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, daemon: ScriptedDaemon) -> Iterator[Any]:
    with connect(request.param, daemon.address, timeout_s=5.0) as kv:
        yield kv


@pytest.fixture
def ns(kv: Any) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(NAMESPACE)
    return bound


def packed(start: int, stop: int) -> bytes:
    return np.arange(start, stop, dtype="<u4").tobytes()


def reserves(daemon: ScriptedDaemon) -> list[Reserve]:
    return [request for request in daemon.seen(Reserve) if isinstance(request, Reserve)]


class TestTokens:
    def test_each_window_says_its_own_and_the_first_the_text(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "TOKENS_MAX", 4 * TOKENS)
        kv.put_from(ns, KEYS, CONTENTS, token_ids=IDS, text="said")
        assert [(r.tokens, r.text) for r in reserves(daemon)] == [
            (packed(0, 4 * TOKENS), "said"), (packed(4 * TOKENS, N * TOKENS), ""),
        ]  # fmt: skip
        assert [r.parent for r in reserves(daemon)] == [b"", KEYS[3]]

    def test_a_window_has_no_more_keys_than_one_request_may(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "KEYS_MAX", 4)  # of few tokens each
        kv.put_from(ns, KEYS, CONTENTS, token_ids=IDS)
        assert [len(r.keys) // r.key_bytes for r in reserves(daemon)] == [4, N - 4]

    def test_a_put_of_more_than_goes_with_one_request_is_refused(
        self, kv: Any, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "TOKENS_MAX", 4 * TOKENS)
        with pytest.raises(InvalidRequest, match="96 token ids in a put that takes 64"):
            kv.put(ns, KEYS, token_ids=IDS)

    def test_without_them_nothing_is_said(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        kv.put_from(ns, KEYS, CONTENTS)
        assert {(r.tokens, r.text) for r in reserves(daemon)} == {(b"", "")}

    def test_ids_of_the_last_run_may_follow_but_not_of_a_blob(self) -> None:
        ns = BoundNamespace(NAMESPACE)
        for n in range(N * TOKENS, (N + 1) * TOKENS):
            assert packed_tokens(ns, KEYS, range(n)) == packed(0, N * TOKENS)
        for n in (N * TOKENS - 1, (N + 1) * TOKENS):
            with pytest.raises(InvalidRequest):
                packed_tokens(ns, KEYS, range(n))

    def test_of_a_tail_there_are_exactly_as_many(self) -> None:
        ns = BoundNamespace(NAMESPACE)
        keys = NAMESPACE.keys(range(TOKENS + 5), tail=True)
        assert packed_tokens(ns, keys, range(TOKENS + 5)) == packed(0, TOKENS + 5)
        for n in (TOKENS + 4, TOKENS + 6):
            with pytest.raises(InvalidRequest):
                packed_tokens(ns, keys, range(n))

    def test_a_run_of_a_context_has_its_own(self) -> None:
        terms = PutTerms(b"p", "standard", None, None, packed(0, N * TOKENS), "said")
        ns = BoundNamespace(NAMESPACE)
        first, last = terms.of_run(ns, KEYS, range(2)), terms.of_run(ns, KEYS, range(4, 6))
        assert (first.parent, first.tokens, first.text) == (b"p", packed(0, 2 * TOKENS), "said")
        assert (last.parent, last.tokens) == (KEYS[3], packed(4 * TOKENS, 6 * TOKENS))
        assert last.text == ""


class TestTerms:
    def test_they_are_told_with_the_namespace(self, daemon: ScriptedDaemon, kv: Any) -> None:
        kv.namespace(NAMESPACE, terms=Terms(text="off", recall="both"))
        (told,) = daemon.seen(Declare)
        assert told == Declare(NAMESPACE.encode(), {"text": "off", "recall": "both"})

    def test_and_to_each_daemon_that_does_not_know_it(
        self, daemon: ScriptedDaemon, kv: Any
    ) -> None:
        ns = kv.namespace(NAMESPACE, terms=Terms(text="off"))
        daemon.restart()
        kv.match(ns, KEYS)
        assert daemon.seen(Declare)[-1] == Declare(NAMESPACE.encode(), {"text": "off"})

    def test_they_are_no_part_of_what_a_namespace_is(self) -> None:
        assert BoundNamespace(NAMESPACE, None, Terms(text="off")) == BoundNamespace(NAMESPACE)


class TestForgetting:
    def test_calls_of_many_keys_are_cut(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(operations, "KEYS_MAX", 4)
        daemon.script[Forget] = lambda request: Done(2)
        assert kv.forget(ns, KEYS) == 4
        sizes = [len(r.keys) // 32 for r in daemon.seen(Forget) if isinstance(r, Forget)]
        assert sizes == [4, 2]
        assert kv.forget(ns, []) == 0

    def test_a_fault_is_raised_as_something_may_be_left(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.script[Forget] = lambda request: Failed("storage_failed", "the disk refuses")
        with pytest.raises(StorageFailed, match="the disk refuses"):
            kv.forget(ns, KEYS)
        with pytest.raises(StorageFailed):
            kv.forget(ns, KEYS)

    def test_so_is_a_daemon_that_does_not_answer(
        self, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
    ) -> None:
        daemon.silence(Forget)
        with pytest.raises(DeadlineExceeded):
            kv.forget(ns, KEYS, timeout_s=0.05)
