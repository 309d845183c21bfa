"""`blobstore explain`: what a person is told of one blob."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.cli import main
from blobstore.cli.telling import ORDERS, lines
from blobstore.clients import Client
from blobstore.tiering.plan import POLICY_NAMES
from blobstore.units import MIB
from tests.support import blobs
from tests.support.served_store import ServedStore, served_store

Output = pytest.CaptureFixture[str]
KEY = "ab" * 32

FACTS: dict[str, Any] = {
    "key": KEY,
    "parent": "",
    "depth": 3,
    "tokens": 256,
    "nbytes": 4 * MIB,
    "digest": "",
    "retention": "standard",
    "tiers": ["dram", "ssd"],
    "pins": 0,
    "dirty": False,
    "idle_s": 90.0,
    "known": True,
    "hole": False,
    "children": 0,
    "session": {"session": "agent-7", "turn": 4, "idle_s": 90.0, "gap_s": 30.0},
    "story": [
        {"ago_s": 700.0, "what": "put", "why": ""},
        {"ago_s": 600.0, "what": "dram>ssd", "why": "worth"},
        {"ago_s": 300.0, "what": "dram>none", "why": "kept_on_ssd"},
        {"ago_s": 90.0, "what": "ssd>dram", "why": "get"},
    ],
    "kept": {"dram": [], "ssd": []},
    "standing": {"waits": False, "coming": False, "refused_ago_s": None},
    "decision": {
        "policy": "ours",
        "policy_why": "",
        "in_force": {"dram": "ours", "ssd": "ours"},
        "known": True,
        "class": "3 of 12, the last being used again soonest",
        "uses": 2,
        "age_s": 90.0,
        "gap_s": 30.0,
        "children": 0,
        "p_reuse": 0.62,
        "expected_reuse_s": 240.0,
        "worth": 0.031,
        "floor": {"dram": 0.002, "ssd": 0.04},
        "admission": {"verdict": "admit", "reason": "worth", "threshold": 0.1},
        "siblings": 2,
    },
    "next": {"dram": ["cd" * 32, KEY], "ssd": []},
}


def said(**changes: Any) -> str:
    """What is said of a blob of which some facts are others."""
    told = list(lines(FACTS | changes))
    assert all("\n" not in text for _, text in told)
    return "\n".join(f"{label}: {text}" if label else text for label, text in told)


def decided(**changes: Any) -> str:
    return said(decision=FACTS["decision"] | changes)


class TestWords:
    def test_where_it_is_and_since_when(self) -> None:
        text = said()
        assert "where: in DRAM for 1 min 30 s\non SSD for 10 min 0 s\nused 1 min 30 s ago" in text
        assert "in DRAM since before what is remembered" in said(story=[])

    def test_how_large_it_is_and_what_hangs_on_it(self) -> None:
        expected = "blob: 256 tokens, 4 MiB, standard; number 3 of its chain, the end of it"
        assert expected in said()
        assert "one blob continues it" in said(children=1)
        assert "1,200 blobs continue it" in said(children=1200)

    def test_what_happened_and_why(self) -> None:
        assert "5 min 0 s ago it left DRAM: room was needed, and SSD keeps a copy" in said()

    def test_what_is_expected_of_it_and_what_others_are_worth(self) -> None:
        text = said()
        assert "62% to be used again, half of that within 4 min 0 s" in text
        assert "kind: 3 of 12, the last being used again soonest" in text
        assert "2 uses, the last 30 s after the one before" in text
        assert text.count("1 min 30 s ago\n") == 1  # the use; it is in the story as a load
        assert "that is more than the next to leave DRAM, which is worth 0.002" in text
        assert "that is no more than the next to leave SSD, which is worth 0.04" in text

    def test_what_the_classifier_does_not_know_is_said(self) -> None:
        assert "expected: nothing: the classifier has not met it" in said(
            decision={"known": False, "in_force": {}, "policy_why": ""}
        )
        once = decided(uses=1, gap_s=None, p_reuse=0.0, expected_reuse_s=None)
        assert "\n1 use\n" in once
        assert "0% to be used again\n" in once
        assert "under 1% to be used again" in decided(p_reuse=0.004)
        assert "over 99% to be used again" in decided(p_reuse=0.9961)

    def test_a_floor_that_is_not_known_is_not_told(self) -> None:
        assert "next to leave DRAM, which" not in decided(floor={"dram": None})

    def test_the_policy_in_force_and_why_it_is_not_the_wanted_one(self) -> None:
        assert "policy: ours is in force: what is worth least leaves first" in said()
        assert "wanted" not in said()
        assert said().count("in force") == 1
        both = {"dram": "lru2", "ssd": "ours"}
        text = decided(in_force=both, policy_why="it has saved more lately")
        assert "in SSD, ours is in force" in text
        assert "in DRAM, lru2 is in force: what was used twice longest ago leaves first" in text
        assert "and not the one that is wanted: it has saved more lately" in text

    def test_every_policy_has_words(self) -> None:
        assert ORDERS.keys() >= set(POLICY_NAMES)

    def test_what_a_policy_says_beyond_that_is_passed_on(self) -> None:
        assert "beside: siblings: 2" in said()
        text = decided(conversation={"idle_s": 61.0, "turn": 3})
        assert "conversation: idle_s 1 min 1 s, turn 3" in text

    def test_the_session_and_its_pace(self) -> None:
        expected = "session: agent-7, turn 4, silent for 1 min 30 s, a request every 30 s or so"
        assert expected in said()
        assert "session" not in said(session={})

    def test_whatever_a_client_calls_its_session_is_one_harmless_line(self) -> None:
        assert "\x1b" not in said(session={"session": "a\x1b[2Jb\nc"})

    @pytest.mark.parametrize(
        ("kept", "words"),
        [
            (["pinned"], "may not leave DRAM now: readers, writers or transfers hold it"),
            (["continued", "dirty"], "blobs that continue it are there; it is to be written"),
        ],
    )
    def test_what_keeps_it_where_it_is(self, kept: list[str], words: str) -> None:
        assert words in said(kept={"dram": kept, "ssd": []})

    def test_a_pin_of_a_client_is_told_with_its_time(self) -> None:
        kept = {"dram": ["client_pin", "pinned"], "ssd": []}
        text = said(kept=kept, client_pin_s=6900.0)
        assert "now: pinned by a client for another 1 h 55 min; readers, writers" in text

    def test_a_context_that_was_replaced(self) -> None:
        replaced = "its context goes on as another one: unless it is used it leaves first"
        assert f"{replaced} in 40 s" in said(standing={"first_in_s": 40.0})
        assert said(standing={"first_in_s": 0.0}).split(replaced)[1].startswith("\n")
        assert replaced not in said()

    def test_its_turn_to_leave(self) -> None:
        assert "leaves DRAM after 1 other when room is needed" in said()
        assert "may leave SSD when room is needed, after others" in said()
        first = said(next={"dram": [KEY], "ssd": []})
        assert "leaves DRAM before all others" in first

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({}, "it is written to SSD before, by what is known now"),
            ({"retention": "volatile"}, "volatile blobs never go to SSD"),
            ({"next": {"dram": []}}, "there is no SSD tier"),
            ({"decision": {}}, "is decided then"),
            ({"dirty": True}, "it is being written to SSD"),
            ({"standing": {"coming": True}}, "it is being written to SSD"),
            ({"standing": {"first_in_s": 0.0}}, "then: its context goes on as another one"),
            ({"standing": {"refused_ago_s": 70.0}}, "it was not let onto SSD 1 min 10 s ago"),
            (
                {"decision": {"admission": {"verdict": "refuse", "reason": "budget"}}},
                "its bytes are dropped then, by what is known now: the write budget was spent",
            ),
            (
                {
                    "decision": {
                        "admission": {
                            "verdict": "refuse",
                            "reason": "unlikely",
                            "p_reuse": 0.031,
                            "threshold": 0.125,
                        }
                    }
                },
                "it is not likely enough to be used again (3.1% to be used within the time that it "
                "would stay on SSD, and 12.5% is wanted)",
            ),
        ],
    )
    def test_what_becomes_of_a_blob_that_is_in_dram_alone(
        self, changes: dict[str, Any], words: str
    ) -> None:
        text = said(tiers=["dram"], kept={"dram": [], "ssd": []}, **changes)
        assert words in text

    def test_a_blob_that_is_gone_has_a_story_alone(self) -> None:
        story = [{"ago_s": 5.0, "what": "dram>none", "why": "refused"}]
        text = said(known=False, story=story)
        assert text.startswith("where: in no tier")
        assert "5 s ago it left DRAM: room was needed, and SSD did not keep it" in text
        assert "next" not in text

    def test_a_hole_is_explained(self) -> None:
        assert "its bytes were lost" in said(hole=True, tiers=[])


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedStore]:
    with served_store(tmp_path / "b.sock") as found:
        monkeypatch.setenv("BLOBSTORE__LOCAL__SOCKET", os.fspath(found.path))
        yield found


@pytest.fixture
def put(served: ServedStore) -> tuple[str, list[str]]:
    """Two chained blobs: the namespace, and their keys."""
    namespace = blobs.opaque(4096)
    keys = blobs.chain(namespace, 1, 2)
    with Client(served.address) as kv:
        assert blobs.put(kv, namespace, keys) == ["stored"] * 2
    return namespace.id.hex(), [key.hex() for key in keys]


def test_a_blob_is_named_by_the_start_of_its_key(
    capsys: Output, put: tuple[str, list[str]]
) -> None:
    ns, keys = put
    assert main(["explain", ns[:8], keys[1][:9]]) == 0
    out = capsys.readouterr().out
    assert keys[1] in out
    assert "in DRAM" in out
    assert "next to leave DRAM" in out
    assert main(["explain", ns, keys[0], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["key"] == keys[0]
    assert facts["children"] == 1
    assert facts["kept"]["dram"] == ["continued"]


def test_a_key_alone_is_looked_for_everywhere(
    capsys: Output, served: ServedStore, put: tuple[str, list[str]]
) -> None:
    ns, keys = put
    assert main(["explain", keys[1][:10]]) == 0
    assert f"{keys[1]}  in namespace {ns[:12]}" in capsys.readouterr().out
    other = blobs.opaque(8192)
    with Client(served.address) as kv:
        same = [bytes.fromhex(keys[0])]
        kv.put_from(kv.namespace(other), same, [bytes(8192)])
    assert main(["explain", keys[0]]) == 2
    said = capsys.readouterr().err
    assert "several namespaces" in said
    assert ns[:12] in said
    assert other.id.hex()[:12] in said


def test_a_namespace_without_a_key_is_known_for_one(
    capsys: Output, put: tuple[str, list[str]]
) -> None:
    for text in (put[0], put[0][:8]):
        assert main(["explain", text]) == 2
        assert "is a namespace: add a key" in capsys.readouterr().err


def test_the_start_of_several_keys_names_none(capsys: Output, served: ServedStore) -> None:
    namespace = blobs.opaque(4096)
    with Client(served.address) as kv:
        ns = kv.namespace(namespace)
        for end in b"\x01\x02":
            kv.put_from(ns, [b"\xab" * 7 + bytes([end])], [bytes(4096)])
    assert main(["explain", "ab" * 7]) == 2
    assert "ab" * 7 + "01" in capsys.readouterr().err
    assert main(["explain", "ab" * 7 + "02"]) == 0


def test_a_model_names_the_namespace(capsys: Output, put: tuple[str, list[str]]) -> None:
    _, keys = put
    model = blobs.opaque(4096).model
    assert main(["explain", "--model", model, keys[0][:12]]) == 0
    assert main(["explain", "--model", model, keys[0]]) == 0
    assert keys[0] in capsys.readouterr().out


def test_an_unknown_blob_exits_1(capsys: Output, put: tuple[str, list[str]]) -> None:
    assert main(["explain", put[0], "00" * 32]) == 1
    assert "unknown" in capsys.readouterr().out
    assert main(["explain", put[0], "00" * 32, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {}


@pytest.mark.parametrize(
    "words",
    [
        ["ab" * 32, "ab"],
        ["ab" * 32, "xyz" * 4],
        ["ab" * 32, "ab" * 65],
        ["ab" * 32, KEY, KEY],
        ["--model", "m", KEY, KEY],
        ["--revision", "r", KEY],
        [],
        ["short"],
    ],
)
def test_one_key_of_8_digits_or_more_is_wanted(
    capsys: Output, served: ServedStore, words: list[str]
) -> None:
    assert main(["explain", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
