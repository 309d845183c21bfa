"""Hints and sessions: what a client tells of its calls, whichever way they go."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from blobstore.clients import BoundNamespace, Hint, Keys
from blobstore.errors import InvalidRequest
from tests.support.blobs import chain, opaque, payload_of

NBYTES = 10_000
N = 6


@pytest.fixture
def ns(kv: Any, model: str) -> BoundNamespace:
    found: BoundNamespace = kv.namespace(opaque(NBYTES, model))
    return found


@pytest.fixture
def keys(ns: BoundNamespace) -> Keys:
    return chain(ns.namespace, 1, N)


@pytest.fixture
def contents(keys: Keys) -> list[bytes]:
    return [payload_of(key, NBYTES) for key in keys]


@pytest.fixture
def name(model: str) -> str:
    """Of a session, as odd as names may be."""
    return f"ä b/%\n{hashlib.sha256(model.encode()).hexdigest()}"


def known(kv: Any, ns: BoundNamespace, key: bytes) -> dict[str, Any]:
    """What the daemon knows of the session that a blob serves."""
    (told,) = kv.explain(ns, [key])
    session: dict[str, Any] = told["session"]
    return session


class TestHints:
    def test_every_call_that_takes_one_tells_of_its_session(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], name: str
    ) -> None:
        hint = Hint(name, 3, "subagent", "tool_use")
        assert kv.put_from(ns, keys[:2], contents[:2], hint=hint) == ["stored"] * 2
        assert known(kv, ns, keys[1])["session"] == name
        with kv.put(ns, keys[2:], parent=keys[1], hint=Hint(name, 4)) as writer:
            for index in range(len(writer)):
                writer[index][:] = contents[2 + index]
        assert known(kv, ns, keys[0])["session"] == name
        assert known(kv, ns, keys[-1])["turn"] == 4
        with kv.get(ns, keys, hint=Hint(name, 5)) as lease:
            assert len(lease) == N
        assert known(kv, ns, keys[-1])["turn"] == 5
        into = [bytearray(NBYTES) for _ in keys]
        assert kv.get_into(ns, keys, into, hint=Hint(name, 6)) == N
        assert into == contents
        assert known(kv, ns, keys[-1])["turn"] == 6
        assert kv.match(ns, keys, hint=Hint(name, 7)).blobs == N
        assert known(kv, ns, keys[-1])["turn"] == 6  # a match is no use

    def test_without_one_no_session_is_known(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys, contents, hint=Hint(turn=9, kind="main"))
        with kv.get(ns, keys):
            pass
        assert known(kv, ns, keys[0]) == {}

    def test_hints_change_nothing_that_a_call_returns(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys[:3], contents[:3])
        hints = [None, Hint(), Hint(turn=0), Hint("s", 2**63 - 1, "k" * 256, "f" * 256)]
        assert len({kv.match(ns, keys, hint=hint).blobs for hint in hints}) == 1
        for hint in hints:
            with kv.get(ns, keys, hint=hint) as lease:
                assert [bytes(view) for view in lease] == contents[:3]
                assert lease.reason == "absent"


class TestSessions:
    def test_turns_end_with_what_is_put(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], name: str
    ) -> None:
        session = kv.session(name, kind="main")
        for turn in range(3):
            at = 2 * turn
            assert session.match(ns, keys).blobs == at
            with session.get(ns, keys[: at + 2]) as lease:
                assert len(lease) == at
            assert session.turn == turn
            parent = keys[at - 1] if at else None
            for index in (at, at + 1):
                hint = Hint(finish="end_turn")
                assert session.put_from(
                    ns, keys[index : index + 1], contents[index : index + 1],
                    parent=parent, hint=hint,
                ) == ["stored"]  # fmt: skip
                parent = keys[index]
            assert session.turn == turn
            assert known(kv, ns, keys[at + 1])["turn"] == turn
        facts = known(kv, ns, keys[0])
        assert (facts["session"], facts["turn"], facts["others"]) == (name, 2, 0)
        assert facts["gap_s"] >= 0

    def test_it_puts_in_place_and_reads_into_buffers(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], name: str
    ) -> None:
        session = kv.session(name, turn=40)
        with session.put(ns, keys) as writer:
            for index, content in enumerate(contents):
                writer[index][:] = content
        assert writer.results == ["stored"] * N
        into = [bytearray(NBYTES) for _ in keys]
        assert session.get_into(ns, keys, into) == N
        assert into == contents
        assert session.turn == 41
        assert known(kv, ns, keys[0])["turn"] == 41

    def test_a_turn_may_end_without_a_put(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], name: str
    ) -> None:
        kv.put_from(ns, keys, contents)
        session = kv.session(name)
        for turn in range(2):
            with session.get(ns, keys):
                pass
            assert session.turn == turn
            assert session.finish_turn(ns, keys, "tool_use") is None
            assert session.turn == turn
        session.match(ns, keys)
        assert session.turn == 2
        with pytest.raises(InvalidRequest):
            session.finish_turn(ns, keys, "x" * 257)

    def test_a_turn_that_puts_nothing_is_told_by_its_caller(self, kv: Any) -> None:
        session = kv.session("s", turn=7)
        session.next_turn()
        session.next_turn()
        assert (session.session, session.turn) == ("s", 9)

    def test_what_a_call_says_goes_before(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes], name: str
    ) -> None:
        session = kv.session(name)
        session.put_from(ns, keys, contents, hint=Hint(turn=12))
        assert known(kv, ns, keys[0])["turn"] == 12
        with pytest.raises(InvalidRequest, match="the hint says 'other'"):
            session.match(ns, keys, hint=Hint(session="other"))

    @pytest.mark.parametrize("options", [{"session": ""}, {"session": "x" * 257}, {"turn": -1}])
    def test_a_name_or_turn_out_of_bounds_is_the_callers_mistake(
        self, kv: Any, options: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequest):
            kv.session(**{"session": "s", **options})


class TestExplain:
    def test_it_tells_of_every_blob_in_order(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys[:3], contents[:3])
        told = kv.explain(ns, keys)
        assert [about.get("key") for about in told] == [*(k.hex() for k in keys[:3]), *[None] * 3]
        assert all("dram" in about["tiers"] for about in told[:3])
        assert told[3:] == [{}] * 3

    def test_a_long_chain_takes_several_requests(
        self, kv: Any, ns: BoundNamespace, keys: Keys, contents: list[bytes]
    ) -> None:
        kv.put_from(ns, keys, contents)
        many = [*keys, *chain(ns.namespace, 2, 300)]
        assert [bool(about) for about in kv.explain(ns, many)] == [True] * N + [False] * 300

    def test_of_nothing_there_is_nothing_to_tell(self, kv: Any, ns: BoundNamespace) -> None:
        assert kv.explain(ns, []) == []
