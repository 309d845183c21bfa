from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from blobstore import sessions as module
from blobstore.index import Index, Record, Retention
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.sessions import FILE_NAME, GAP_WEIGHT, Sessions
from blobstore.tiering.sealed_file import write_sealed

NAMESPACE = Namespace("m", KVLayout.opaque(100), tokens_per_blob=16)
WALL_OFFSET_S = 1e9


@pytest.fixture
def index() -> Index:
    return Index()


def chain(
    index: Index, n: int, *, name: str = "", retention: Retention = Retention.STANDARD
) -> list[Record]:
    made: list[Record] = []
    for number in range(n):
        key = hashlib.sha256(f"{name}/{number}".encode()).digest()
        record = Record(index.declare(NAMESPACE), key, made[-1] if made else None, 100, 16)
        record.retention = retention
        index.add(record)
        made.append(record)
    return made


def saved(found: Callable[[], None] | None) -> None:
    assert found is not None
    found()


class TestUses:
    def test_turns_are_counted_and_gaps_smoothed(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 3)
        turns = [
            known.used("s", blobs[: n + 1], at_s, None, again=False)
            for n, at_s in enumerate((100.0, 110.0, 130.0))
        ]
        assert turns == [0, 1, 2]
        assert known.facts("s", 135.0) == {
            "session": "s", "turn": 2, "idle_s": 5.0, "gap_s": 10 + GAP_WEIGHT * 10,
        }  # fmt: skip

    def test_the_first_use_has_no_gap(self, index: Index) -> None:
        known = Sessions()
        known.used("s", chain(index, 1), 100.0, None, again=False)
        assert known.facts("s", 100.0)["gap_s"] is None

    def test_a_continuation_is_no_further_turn(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 2)
        known.used("s", blobs[:1], 100.0, None, again=False)
        assert known.used("s", blobs, 120.0, None, again=True) == 0
        assert known.facts("s", 120.0)["gap_s"] is None
        assert known.facts_of(blobs[1], 120.0)["session"] == "s"

    def test_a_caller_who_counts_turns_is_believed(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 1)
        assert known.used("s", blobs, 100.0, 41, again=False) == 41
        assert known.used("s", blobs, 101.0, None, again=False) == 42
        assert known.used("s", blobs, 102.0, 50, again=False) == 50

    def test_a_caller_who_begins_anew_does_not_set_the_turn_back(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 1)
        turns = [
            known.used("s", blobs, at_s, turn, again=False)
            for at_s, turn in ((1.0, 7), (2.0, 0), (3.0, 0), (4.0, 1), (5.0, 30))
        ]
        assert turns == [7, 8, 9, 10, 30]

    def test_those_used_last_are_kept(self, index: Index) -> None:
        known = Sessions(most=2)
        for at_s, name in enumerate("abac"):
            known.used(name, chain(Index(), 1, name=name), float(at_s), None, again=False)
        assert len(known) == 2
        assert known.facts("b", 9.0) == {}
        assert known.facts("a", 9.0)["idle_s"] == 7.0
        assert len(known._of_leaf) == 2

    def test_clocks_that_go_back_make_no_gap_below_nothing(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 1)
        known.used("s", blobs, 100.0, None, again=False)
        known.used("s", blobs, 50.0, None, again=False)
        assert known.facts("s", 40.0) == {"session": "s", "turn": 1, "idle_s": 0.0, "gap_s": 0.0}


class TestFactsOfABlob:
    def test_it_serves_the_sessions_whose_context_goes_on_from_it(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 5)
        branch = Record(blobs[0].ns, b"b" * 32, blobs[1], 100, 16)
        index.add(branch)
        known.used("long", blobs, 100.0, None, again=False)
        known.used("branch", [*blobs[:2], branch], 110.0, 7, again=False)
        assert known.facts_of(blobs[1], 120.0) == {
            "session": "branch", "turn": 7, "idle_s": 10.0, "gap_s": None, "others": 1,
        }  # fmt: skip
        assert known.facts_of(blobs[2], 120.0)["session"] == "long"
        assert known.facts_of(chain(index, 1, name="other")[0], 120.0) == {}

    def test_the_search_is_bounded(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, module.BLOBS_SEARCHED_MAX + 1)
        known.used("s", blobs, 100.0, None, again=False)
        assert known.facts_of(blobs[0], 100.0) == {}
        assert known.facts_of(blobs[1], 100.0)["session"] == "s"


class TestEnds:
    def test_a_context_ends_with_its_last_blob(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 3)
        known.used("s", blobs, 100.0, None, again=False)
        assert [known.ends_at(blob) for blob in blobs] == [False, False, True]
        found = known.find("s")
        assert found is not None
        assert (found.key, found.held) == (blobs[2].key, b"")
        assert known.find("other") is None

    def test_it_is_known_how_much_of_it_is_on_ssd(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 3)
        blobs[0].ssd = blobs[1].ssd = True
        known.used("s", blobs, 100.0, None, again=False)
        found = known.find("s")
        assert found is not None
        assert (found.key, found.held) == (blobs[2].key, blobs[1].key)

    def test_it_ends_earlier_once_its_end_has_gone(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 3)
        known.used("s", blobs, 100.0, None, again=False)
        index.on_discarded = known.lost
        for left in (2, 1):
            index.discard(blobs[left])
            found = known.find("s")
            assert found is not None
            assert (found.key, found.held) == (blobs[2].key, blobs[left - 1].key)
            assert known.ends_at(blobs[left - 1])
            assert not known.ends_at(blobs[left])
        index.discard(blobs[0])
        assert known.used("s", chain(index, 3), 110.0, None, again=False) == 1
        assert len(known._of_leaf) == 1

    def test_where_two_end_the_one_that_was_there_keeps_its_place(self, index: Index) -> None:
        known = Sessions()
        blobs = chain(index, 2)
        known.used("long", blobs, 100.0, None, again=False)
        known.used("short", blobs[:1], 110.0, None, again=False)
        index.on_discarded = known.lost
        index.discard(blobs[1])
        assert known.facts_of(blobs[0], 120.0)["session"] == "short"
        assert known.used("long", blobs[:1], 130.0, None, again=False) == 1

    def test_it_goes_on_elsewhere(self, index: Index, tmp_path: Path) -> None:
        known = Sessions()
        old, new = chain(index, 3, name="old"), chain(index, 2, name="new")
        new[1].retention = Retention.VOLATILE
        new[0].ssd = True
        known.used("s", old, 100.0, 7, again=False)
        known.moved(old[2], new[1])
        known.moved(old[1], new[0])  # nobody's
        assert (known.ends_at(old[2]), known.ends_at(new[1])) == (False, True)
        saved(known.unsaved(tmp_path, 0.0))
        again = Sessions()
        again.load(tmp_path, 110.0, 0.0)
        found = again.find("s")
        assert found is not None
        assert (found.key, found.held, found.turn) == (new[0].key, new[0].key, 7)


class TestRestarts:
    def test_sessions_are_known_again(self, index: Index, tmp_path: Path) -> None:
        known = Sessions()
        blobs = chain(index, 2)
        for at_s in (100.0, 130.0):
            known.used("s", blobs, at_s, None, again=False)
        saved(known.unsaved(tmp_path, WALL_OFFSET_S))
        again = Sessions()
        # The clock of the store starts anew; an hour has passed on the wall.
        again.load(tmp_path, 5.0, WALL_OFFSET_S + 130 + 3600 - 5)
        assert again.facts("s", 5.0) == {
            "session": "s", "turn": 1, "idle_s": pytest.approx(3600), "gap_s": 30.0,
        }  # fmt: skip
        assert again.facts_of(blobs[0], 5.0)["session"] == "s"
        assert again.used("s", blobs, 6.0, None, again=False) == 2
        assert again.stats() == {"known": 1, "why_cold": ""}

    def test_nothing_is_written_unless_something_changed(
        self, index: Index, tmp_path: Path
    ) -> None:
        known = Sessions()
        assert known.unsaved(tmp_path, 0.0) is None
        known.used("s", chain(index, 1), 1.0, None, again=False)
        assert known.unsaved(tmp_path, 0.0) is not None
        assert known.unsaved(tmp_path, 0.0) is None

    def test_what_only_volatile_blobs_would_tell_is_not_written(
        self, index: Index, tmp_path: Path
    ) -> None:
        known = Sessions()
        secret = chain(index, 2, name="secret", retention=Retention.VOLATILE)
        mixed = chain(index, 3, name="mixed")
        mixed[2].retention = Retention.VOLATILE
        known.used("only-volatile", secret, 1.0, None, again=False)
        known.used("mixed", mixed, 2.0, None, again=False)
        saved(known.unsaved(tmp_path, 0.0))
        body = (tmp_path / FILE_NAME).read_bytes()
        assert b"only-volatile" not in body
        assert secret[0].key not in body
        assert mixed[1].key in body
        assert mixed[2].key not in body

    def test_times_in_the_future_are_now(self, index: Index, tmp_path: Path) -> None:
        known = Sessions()
        known.used("s", chain(index, 1), 100.0, None, again=False)
        saved(known.unsaved(tmp_path, WALL_OFFSET_S))
        again = Sessions()
        again.load(tmp_path, 50.0, WALL_OFFSET_S - 1e6)
        assert again.facts("s", 50.0)["idle_s"] == 0.0

    def test_only_the_last_ones_are_taken_in(self, tmp_path: Path) -> None:
        known = Sessions()
        for at_s, name in enumerate("abc"):
            known.used(name, chain(Index(), 1, name=name), float(at_s), None, again=False)
        saved(known.unsaved(tmp_path, 0.0))
        again = Sessions(most=2)
        again.load(tmp_path, 10.0, 0.0)
        assert len(again) == 2
        assert again.facts("a", 10.0) == {}

    @pytest.mark.parametrize("n", [0, 1, 999, 1000, 1001, 2500])
    def test_any_number_is_written_and_read(self, n: int, tmp_path: Path) -> None:
        known = Sessions()
        (blob,) = chain(Index(), 1)
        for number in range(n):
            known.used(f"s{number}", [blob], float(number), None, again=False)
        known._changed = True
        saved(known.unsaved(tmp_path, 0.0))
        again = Sessions()
        again.load(tmp_path, 1e6, 0.0)
        assert list(again._known.items()) == list(known._known.items())

    def test_a_file_that_was_written_from_its_description_is_read(
        self, index: Index, tmp_path: Path
    ) -> None:
        """As docs/FORMAT-disk.md has it, by other means than the module's."""
        (blob,) = chain(index, 1)
        leaf = xxh3_64_intdigest(blob.key, seed=struct.unpack("<Q", NAMESPACE.id[:8])[0])
        entry = [NAMESPACE.id, blob.key, leaf, WALL_OFFSET_S + 40.0, 12.5, 7]
        run = msgspec.msgpack.encode([["s", entry]])
        body = struct.pack("<I", len(run)) + run
        head = struct.pack("<8sIQ", b"bs-sessn", 1, len(body))
        (tmp_path / "sessions").write_bytes(head + xxh3_128_digest(head + body) + body)
        known = Sessions()
        known.load(tmp_path, 50.0, WALL_OFFSET_S)
        assert known.facts_of(blob, 60.0) == {
            "session": "s", "turn": 7, "idle_s": pytest.approx(20.0), "gap_s": 12.5, "others": 0,
        }  # fmt: skip
        assert known.why_cold == ""


class TestDamage:
    @pytest.mark.parametrize("at", [0, 9, 20, 40, -1])
    def test_a_damaged_file_leaves_none_and_says_why(
        self, at: int, index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        known = Sessions()
        known.used("s", chain(index, 1), 100.0, None, again=False)
        saved(known.unsaved(tmp_path, 0.0))
        path = tmp_path / FILE_NAME
        body = bytearray(path.read_bytes())
        body[at] ^= 1
        path.write_bytes(body)
        again = Sessions()
        with caplog.at_level(logging.WARNING):
            again.load(tmp_path, 1.0, 0.0)
        assert len(again) == 0
        assert "the file is" in again.why_cold
        assert "sessions from before are not known" in caplog.text

    @pytest.mark.parametrize(
        "body", [b"\x01", b"\x05\0\0\0\x91\xc0", b"\xff\xff\xff\xff\x90", b"\x01\0\0\0\xc0"]
    )
    def test_a_body_that_is_none_of_ours_leaves_none(self, body: bytes, tmp_path: Path) -> None:
        write_sealed(tmp_path / FILE_NAME, module._KIND, module._VERSION, body)
        again = Sessions()
        again.load(tmp_path, 1.0, 0.0)
        assert len(again) == 0
        assert again.why_cold

    def test_another_version_leaves_none(self, tmp_path: Path) -> None:
        write_sealed(tmp_path / FILE_NAME, module._KIND, module._VERSION + 1, b"")
        again = Sessions()
        again.load(tmp_path, 1.0, 0.0)
        assert "version" in again.why_cold

    def test_a_first_start_is_nothing_to_warn_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        again = Sessions()
        with caplog.at_level(logging.WARNING):
            again.load(tmp_path, 1.0, 0.0)
        assert again.why_cold == "there is no file yet"
        assert not caplog.records

    def test_a_place_that_cannot_be_written_is_logged(
        self, index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        known = Sessions()
        known.used("s", chain(index, 1), 100.0, None, again=False)
        with caplog.at_level(logging.WARNING):
            saved(known.unsaved(tmp_path / "missing", 0.0))
        assert "sessions are not saved" in caplog.text
