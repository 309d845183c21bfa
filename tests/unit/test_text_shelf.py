from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blobstore.errors import StorageFailed
from blobstore.text_entry import Noted, TextEntry, encode
from blobstore.text_keys import KeyFile, MemoryKeys
from blobstore.text_shelf import DIRECTORY, KEYS_NAME, Kept, Shelf
from blobstore.text_tables import LmdbTables, MemoryTables, Totals, Writing
from blobstore.units import MIB
from tests.support.clock import FakeClock
from tests.support.texts import NAMESPACE, NBYTES, found_in, run_of

RETENTION_S = 1000.0
ID = NAMESPACE.id
CHAIN = run_of(8)
KEYS = list(CHAIN)


class Place:
    """Where a shelf is, and how it is opened (again)."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.clock = FakeClock()

    def open(self, quota_bytes: int = MIB) -> Shelf:
        return Shelf.open(
            self.directory,
            quota_bytes=quota_bytes,
            retention_s=RETENTION_S,
            wall_clock=self.clock,
        )


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path if request.param == "disk" else None)


@pytest.fixture
def shelf(place: Place) -> Iterator[Shelf]:
    made = place.open()
    yield made
    made.close()


def keep(shelf: Shelf, texts: Mapping[bytes, TextEntry], *, only_new: bool = False) -> Kept:
    return shelf.keep(Noted(NAMESPACE, key, entry, only_new) for key, entry in texts.items())


def read(shelf: Shelf, keys: list[bytes] = KEYS) -> list[TextEntry | None]:
    entries, damaged = shelf.read(ID, keys)
    assert not damaged
    return entries


def held(shelf: Shelf, texts: Mapping[bytes, TextEntry] = CHAIN) -> list[int]:
    return [at for at, entry in enumerate(read(shelf, list(texts))) if entry is not None]


def some(*numbers: int, **changes: str | bytes | int) -> dict[bytes, TextEntry]:
    return {KEYS[at]: replace(CHAIN[KEYS[at]], **changes) for at in numbers}  # type: ignore[arg-type]


class TestKeeping:
    def test_what_was_kept_is_read(self, shelf: Shelf) -> None:
        kept = keep(shelf, CHAIN)
        assert (kept.refused, kept.evicted, kept.no_room) == (0, 0, 0)
        assert read(shelf) == list(CHAIN.values())
        assert (kept.totals.rows, kept.totals.kv_nbytes) == (8, 8 * NBYTES)
        assert kept.totals == shelf.totals()

    def test_other_namespaces_have_others(self, shelf: Shelf) -> None:
        keep(shelf, CHAIN)
        assert shelf.read(bytes(32), KEYS) == ([None] * 8, [])
        assert shelf.known(bytes(32), KEYS, ()) == 0

    def test_tokens_of_another_key_are_refused(self, shelf: Shelf) -> None:
        wrong = some(3, tokens=bytes(64))
        assert keep(shelf, CHAIN | wrong).refused == 1
        assert held(shelf) == [0, 1, 2, 4, 5, 6, 7]

    def test_leading_keys_are_known_until_one_is_not(self, shelf: Shelf) -> None:
        keep(shelf, some(0, 1, 4))
        assert shelf.known(ID, KEYS, ()) == 2
        assert shelf.known(ID, KEYS, {KEYS[2], KEYS[3]}) == 5
        assert shelf.known(ID, KEYS[:1], ()) == 1

    def test_what_a_blob_continues_is_found_from_its_end(self, shelf: Shelf) -> None:
        keep(shelf, CHAIN)
        assert shelf.ancestors(ID, KEYS[5], 100) == KEYS[5::-1]
        assert shelf.ancestors(ID, KEYS[5], 2) == [KEYS[5], KEYS[4]]
        shelf.discard(ID, [KEYS[3]])
        assert shelf.ancestors(ID, KEYS[5], 100) == [KEYS[5], KEYS[4]]

    def test_a_later_text_replaces_an_earlier_one(self, shelf: Shelf) -> None:
        keep(shelf, CHAIN)
        before = shelf.totals()
        keep(shelf, some(2, digest=b"another digest.."))
        assert read(shelf)[2] == some(2, digest=b"another digest..")[KEYS[2]]
        assert replace(shelf.totals(), next_seq=0) == replace(before, next_seq=0)

    def test_unless_it_is_for_new_ones(self, shelf: Shelf) -> None:
        keep(shelf, some(1))
        keep(shelf, some(1, 2, digest=b"another digest.."), only_new=True)
        assert read(shelf)[1] == CHAIN[KEYS[1]]
        assert read(shelf)[2] == some(2, digest=b"another digest..")[KEYS[2]]

    def test_the_callers_text_stays_when_none_is_told(self, shelf: Shelf) -> None:
        keep(shelf, some(0, text="what was said"))
        keep(shelf, some(0, digest=b"another digest.."))
        assert read(shelf)[0] == some(0, digest=b"another digest..", text="what was said")[KEYS[0]]
        keep(shelf, some(0, text="something else"))
        assert read(shelf)[0] == some(0, text="something else")[KEYS[0]]

    def test_what_is_known_is_not_written_again(self, shelf: Shelf) -> None:
        before = keep(shelf, CHAIN).totals
        assert keep(shelf, CHAIN).totals == before
        assert keep(shelf, CHAIN, only_new=True).totals == before


class TestRoom:
    def test_the_oldest_go_for_new_ones(self, place: Place) -> None:
        runs = [run_of(3, seed=seed) for seed in range(1, 9)]
        shelf = place.open(quota_bytes=7000)
        for run in runs:
            keep(shelf, run)
            assert shelf.totals().nbytes <= 7000
        sizes = [len(held(shelf, run)) for run in runs]
        assert sizes[-1] == 3
        assert sizes == sorted(sizes)
        assert 0 < sum(sizes) < 24
        shelf.close()

    def test_what_others_continue_stays_until_they_have_gone(self, place: Place) -> None:
        """A long conversation does not lose its beginning to short ones."""
        shelf = place.open(quota_bytes=9000)
        keep(shelf, some(0, 1, 2, 3))
        for seed in range(1, 30):
            keep(shelf, run_of(1, seed=seed))
            left = held(shelf)
            assert left == list(range(len(left)))
        assert not left
        shelf.close()

    def test_what_is_continued_stays_with_it(self, place: Place) -> None:
        shelf = place.open(quota_bytes=9000)
        for at in range(8):
            keep(shelf, some(at))
            for seed in range(4):
                keep(shelf, run_of(1, seed=100 * at + seed))
        assert held(shelf) == list(range(8))
        shelf.close()

    def test_what_continues_the_oldest_does_not_push_it_out(self, place: Place) -> None:
        shelf = place.open(quota_bytes=8 * MIB)
        keep(shelf, some(0, 1))
        for seed in range(1, 9):
            keep(shelf, run_of(1, seed=seed))
        shelf._room.quota_bytes = shelf.totals().nbytes
        assert keep(shelf, some(2)).no_room == 0
        assert held(shelf) == [0, 1, 2]
        shelf.close()

    def test_callers_texts_take_no_more_memory_than_one_may(self, shelf: Shelf) -> None:
        keep(shelf, some(0, 1, 2, text="a" * (400 << 10)))
        assert [entry and len(entry.text) for entry in read(shelf, KEYS[:2])] == [400 << 10] * 2
        keep(shelf, some(3))
        entries = read(shelf, KEYS[:4])
        assert [entry and (entry.text, entry.n_tokens) for entry in entries] == [("", 16)] * 4

    def test_conversations_that_grew_in_turn_leave_room_for_new_ones_at_once(
        self, place: Place
    ) -> None:
        """All but the last turns are older than what continues them, and would only move."""
        chains = [list(run_of(12, seed=seed).items()) for seed in range(1000)]
        shelf = place.open(quota_bytes=8 * MIB)
        for turn in range(12):
            keep(shelf, dict(chain[turn] for chain in chains))
        shelf._room.quota_bytes = full = shelf.totals().nbytes
        for seed in range(2000, 2010):
            kept = keep(shelf, run_of(200, seed=seed))
            assert (kept.no_room, kept.totals.nbytes <= full) == (0, True)
        for chain in chains[::100]:
            left = held(shelf, dict(chain))
            assert left == list(range(len(left)))
        shelf.close()

    def test_more_than_the_quota_is_not_kept(self, place: Place) -> None:
        shelf = place.open(quota_bytes=2000)
        kept = keep(shelf, run_of(40))
        assert kept.no_room == 40 - kept.totals.rows > 30
        assert kept.totals.nbytes <= 2000
        assert keep(shelf, some(0, text="é" * 5000)).no_room == 0, "it compresses"
        shelf.close()

    def test_a_quota_that_was_lowered_is_kept_from_then_on(self, tmp_path: Path) -> None:
        place = Place(tmp_path)
        shelf = place.open(quota_bytes=8 * MIB)
        for seed in range(20):
            keep(shelf, run_of(500, seed=seed))
        assert shelf.totals().nbytes > 3 * MIB
        shelf.close()
        shelf = place.open(quota_bytes=20_000)
        while shelf.expire()[0]:
            pass
        assert 10_000 < shelf.totals().nbytes <= 20_000
        for seed in range(30, 50):
            assert keep(shelf, run_of(3, seed=seed)).no_room == 0
        assert held(shelf, run_of(3, seed=49)) == [0, 1, 2]
        shelf.close()

    def test_after_its_time_a_text_goes(self, place: Place, shelf: Shelf) -> None:
        keep(shelf, some(0, 1, 2))
        place.clock.advance(RETENTION_S / 2)
        keep(shelf, some(3, 4))
        place.clock.advance(RETENTION_S / 2)
        assert shelf.expire()[0] == 0
        place.clock.advance(1)
        assert shelf.expire()[0] == 0, "others continue them"
        assert held(shelf) == [0, 1, 2, 3, 4]
        place.clock.advance(RETENTION_S / 2)
        assert shelf.expire()[0] == 5
        assert shelf.totals() == replace(Totals(), next_seq=shelf.totals().next_seq)

    def test_what_is_noted_again_begins_anew(self, place: Place, shelf: Shelf) -> None:
        keep(shelf, some(0))
        for _ in range(4):
            place.clock.advance(RETENTION_S / 2)
            keep(shelf, some(0), only_new=True)
            assert shelf.expire()[0] == 0
        assert held(shelf) == [0]


class TestForgetting:
    def test_it_goes_with_all_that_continues_it(self, shelf: Shelf) -> None:
        keep(shelf, CHAIN | run_of(2, seed=5))
        erased, totals = shelf.forget(ID, [KEYS[3], bytes(32)])
        assert erased == set(KEYS[3:])
        assert held(shelf) == [0, 1, 2]
        assert totals == shelf.totals()
        assert totals.rows == 5

    def test_what_continues_an_unknown_key_is_found(self, shelf: Shelf) -> None:
        keep(shelf, some(3, 4))
        assert shelf.forget(ID, [KEYS[2]])[0] == {KEYS[3], KEYS[4]}

    def test_a_name_that_begins_another_is_another(self, shelf: Shelf) -> None:
        engine = replace(NAMESPACE, hash_scheme="engine")
        short, long = b"12345678", b"1234567800000000"
        notes = [
            Noted(engine, b"child" + parent, TextEntry(parent, 1, bytes(4), 1, b""), False)
            for parent in (short, long)
        ]
        shelf.keep(notes)
        assert shelf.forget(engine.id, [short])[0] == {b"child" + short}

    def test_only_what_is_damaged_is_discarded(self, shelf: Shelf) -> None:
        keep(shelf, CHAIN)
        shelf.discard(ID, [KEYS[3]])
        assert held(shelf) == [0, 1, 2, 4, 5, 6, 7]


def slots_and_keys(directory: Path) -> dict[int, bytes]:
    found = KeyFile(directory / DIRECTORY / KEYS_NAME)
    keys = {slot: key for slot in range(100) if (key := found.get(slot)) is not None}
    found.close()
    return keys


class TestOnDisk:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(tmp_path)

    def test_texts_outlast_the_process(self, place: Place) -> None:
        shelf = place.open()
        totals = keep(shelf, CHAIN).totals
        shelf.set_terms(ID, b"told")
        shelf.close()
        shelf = place.open()
        assert read(shelf) == list(CHAIN.values())
        assert (shelf.totals(), shelf.terms()) == (totals, {ID: b"told"})
        shelf.close()

    def test_no_file_holds_tokens_in_the_clear(self, tmp_path: Path, shelf: Shelf) -> None:
        keep(shelf, some(0, 1, 2, text="what nobody may read"))
        assert not found_in(tmp_path, b"nobody may")
        for entry in some(0, 1, 2).values():
            assert not found_in(tmp_path, entry.tokens[:8])
            assert not found_in(tmp_path, encode(entry, zstandard.ZstdCompressor())[-20:])

    def test_nothing_can_decrypt_what_was_forgotten(self, place: Place, tmp_path: Path) -> None:
        """Free pages of the database may hold it still, so its key is what must have gone."""
        shelf = place.open()
        keep(shelf, CHAIN)
        keys = slots_and_keys(tmp_path)
        shutil.copytree(tmp_path / DIRECTORY, tmp_path / "before")
        shelf.forget(ID, [KEYS[4]])
        shelf.close()
        assert len(found_in(tmp_path / DIRECTORY, *keys.values())) == 4
        # Even with all of the database as it was before.
        shutil.copy(tmp_path / "before" / "data.mdb", tmp_path / DIRECTORY / "data.mdb")
        shelf = place.open()
        entries, damaged = shelf.read(ID, KEYS)
        assert entries[:4] == list(CHAIN.values())[:4]
        assert (entries[4:], damaged) == ([None] * 4, KEYS[4:])
        shelf.close()

    @pytest.mark.parametrize(
        "go",
        [
            lambda shelf: keep(shelf, some(0, digest=b"another digest..")),
            lambda shelf: shelf.discard(ID, KEYS[:1]),
            lambda shelf: keep(shelf, run_of(60, seed=9)),
        ],
        ids=["replaced", "discarded", "evicted"],
    )
    def test_whatever_goes_loses_its_key(
        self, go: Callable[[Shelf], object], place: Place, tmp_path: Path
    ) -> None:
        shelf = place.open(quota_bytes=20_000)
        keep(shelf, some(0))
        ((_, key),) = slots_and_keys(tmp_path).items()
        go(shelf)
        assert not found_in(tmp_path, key)
        shelf.close()

    def test_a_text_that_fails_its_check_is_damaged(self, place: Place, tmp_path: Path) -> None:
        shelf = place.open()
        keep(shelf, CHAIN)
        shelf.close()
        keys = slots_and_keys(tmp_path)
        path = tmp_path / DIRECTORY / KEYS_NAME
        body = path.read_bytes().replace(keys[2], bytes(31) + b"\1")
        path.write_bytes(body)
        shelf = place.open()
        entries, damaged = shelf.read(ID, KEYS)
        assert sum(entry is None for entry in entries) == len(damaged) == 1
        shelf.discard(ID, damaged)
        keep(shelf, CHAIN, only_new=True)
        assert read(shelf) == list(CHAIN.values())
        shelf.close()

    @pytest.mark.parametrize("at", range(0, 200, 7))
    def test_a_row_with_a_flipped_bit_is_damaged(self, at: int, place: Place) -> None:
        shelf = place.open()
        keep(shelf, some(0))

        def flip(txn: Writing) -> None:
            found = txn.oldest()
            assert found is not None
            seq, row = found
            flipped = bytearray(row)
            flipped[at % len(row)] ^= 4
            name = ID[:16] + KEYS[0]
            txn.remove(seq, name, b"")
            txn.put(seq, name, b"", bytes(flipped))

        shelf._tables.write(flip)
        entries, damaged = shelf.read(ID, KEYS[:1])
        assert (entries, damaged) == ([None], KEYS[:1])
        shelf.discard(ID, damaged)
        keep(shelf, some(0), only_new=True)
        assert held(shelf) == [0]
        shelf.close()
        shelf = place.open()
        assert keep(shelf, {}).totals == replace(shelf.totals(), rows=1, kv_nbytes=NBYTES)
        shelf.close()

    def test_keys_that_a_crash_left_are_wiped_before_the_first_change(
        self, place: Place, tmp_path: Path
    ) -> None:
        shelf = place.open()
        keep(shelf, some(0, 1))
        shelf.close()
        left = KeyFile(tmp_path / DIRECTORY / KEYS_NAME)
        left._free, left._n = [], 2
        _, key = left.take()
        left.close()
        shelf = place.open()
        keep(shelf, some(2))
        assert not found_in(tmp_path, key)
        assert held(shelf) == [0, 1, 2]
        shelf.close()

    def test_a_disk_that_refuses_keys_leaves_nothing_behind(
        self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep(shelf, some(0))

        def refuse(self: KeyFile) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(KeyFile, "sync", refuse)
        with pytest.raises(StorageFailed, match="No space left"):
            keep(shelf, some(1, 2))
        monkeypatch.undo()
        assert held(shelf) == [0]
        keep(shelf, some(1, 2))
        assert held(shelf) == [0, 1, 2]

    def test_a_failed_commit_leaves_no_keys(
        self, tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep(shelf, some(0))
        before = slots_and_keys(tmp_path)

        def refuse(self: LmdbTables, change: object, **kwargs: object) -> None:
            raise StorageFailed(5, "the disk refuses")

        monkeypatch.setattr(LmdbTables, "write", refuse)
        with pytest.raises(StorageFailed):
            keep(shelf, some(1, 2))
        assert slots_and_keys(tmp_path) == before

    def test_a_reader_meets_a_replaced_text_never_damage(
        self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep(shelf, some(0))
        opened, digests = Shelf._opened, [b"the first digest", b"the next digest."]

        def between(self: Shelf, namespace_id: bytes, row: object) -> TextEntry | None:
            if digests:
                replacing = some(0, digest=digests.pop())
                monkeypatch.setattr(Shelf, "_opened", opened)
                keep(shelf, replacing)
                monkeypatch.setattr(Shelf, "_opened", between)
            return opened(self, namespace_id, row)  # type: ignore[arg-type]

        monkeypatch.setattr(Shelf, "_opened", between)
        assert read(shelf, KEYS[:1]) == [None], "twice in a row: nothing is known, nothing damaged"
        digests.append(b"another digest..")
        assert read(shelf, KEYS[:1]) == list(some(0, digest=b"another digest..").values())


class ShelfMachine(RuleBasedStateMachine):
    """Whatever is done, what is there is right, whole from the root on, and counted."""

    @initialize()
    def begin(self) -> None:
        self.clock = FakeClock()
        self.shelf = Shelf(
            MemoryTables(),
            MemoryKeys(),
            quota_bytes=6000,
            retention_s=RETENTION_S,
            wall_clock=self.clock,
        )
        self.runs = [run_of(5, seed=seed) for seed in range(4)]
        self.told = {key: entry for run in self.runs for key, entry in run.items()}

    @rule(run=st.integers(0, 3), start=st.integers(0, 4), n=st.integers(1, 5), new=st.booleans())
    def keep(self, run: int, start: int, n: int, new: bool) -> None:
        chosen = list(self.runs[run].items())[start : start + n]
        keep(self.shelf, dict(chosen), only_new=new)

    @rule(run=st.integers(0, 3), at=st.integers(0, 4))
    def forget(self, run: int, at: int) -> None:
        keys = list(self.runs[run])
        self.shelf.forget(ID, [keys[at]])
        assert keys[at] not in self._held()

    @rule(run=st.integers(0, 3), at=st.integers(0, 4))
    def discard(self, run: int, at: int) -> None:
        self.shelf.discard(ID, [list(self.runs[run])[at]])

    @rule(seconds=st.floats(0, RETENTION_S))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.shelf.expire()

    def _held(self) -> dict[bytes, TextEntry]:
        keys = list(self.told)
        return {
            key: entry
            for key, entry in zip(keys, read(self.shelf, keys), strict=True)
            if entry is not None
        }

    @invariant()
    def all_is_right(self) -> None:
        held = self._held()
        assert all(self.told[key] == entry for key, entry in held.items())
        totals = self.shelf.totals()
        assert (totals.rows, totals.kv_nbytes) == (len(held), len(held) * NBYTES)
        assert totals.nbytes <= 6000
        assert (totals.nbytes == 0) == (not held)
        keys = self.shelf._keys
        assert isinstance(keys, MemoryKeys)
        assert len(keys._keys) == len(held), "a key for each, and no other"


ShelfMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestShelfMachine = ShelfMachine.TestCase
