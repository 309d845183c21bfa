from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import superseded as module
from blobstore.index import Index, Record, Retention
from blobstore.sessions import Sessions
from blobstore.superseded import FILE_NAME, Superseded
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.sealed_file import read_sealed, write_sealed
from tests.support.clock import FakeClock
from tests.support.store_client import opaque

GRACE_S = 60.0
WALL_OFFSET_S = 1e9


def done(work: Coroutine[Any, Any, int]) -> int:
    """What work returns that waits for nothing but its next turn."""
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            return int(end.value)


class Tree:
    """Blobs by names, each of which continues another."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.index = Index()
        self.sessions = Sessions()
        self.state = self.index.declare(opaque(100))
        self.marks = Superseded(self.index, self.sessions, self.clock, GRACE_S)
        self.index.on_discarded = self.marks.forget

    def grow(self, names: str, on: Record | None = None, **settings: bool) -> Record:
        """A blob for each letter, each on the one before; the last."""
        for name in names:
            key = hashlib.sha256(name.encode()).digest()
            record = Record(self.state, key, on, 100, 16)
            record.ssd = settings.get("ssd", False)
            record.last_used = self.clock()
            self.index.add(record)
            on = record
        assert on is not None
        return on

    def of(self, name: str) -> Record:
        return self.state.blobs[hashlib.sha256(name.encode()).digest()]

    def session(self, name: str, leaf: Record) -> None:
        chain = [leaf]
        while (parent := chain[0].parent) is not None:
            chain.insert(0, parent)
        self.sessions.used(name, chain, self.clock(), None, again=False)

    def replace(self, old: str, new: str) -> int:
        keys = (hashlib.sha256(name.encode()).digest() for name in (old, new))
        return done(self.marks.replace(self.state, *keys))

    def marked(self, names: str) -> str:
        return "".join(name for name in names if self.marks.standing(self.of(name)))


@pytest.fixture
def tree() -> Tree:
    """`abcd` and `abxy`, two contexts that share `ab`."""
    made = Tree()
    made.grow("abcd")
    made.grow("xy", on=made.of("b"))
    return made


ALL = "abcdxy"


class TestMarks:
    def test_only_what_the_old_branch_has_alone_is_marked(self, tree: Tree) -> None:
        assert tree.replace("d", "y") == 2
        assert tree.marked(ALL) == "cd"
        assert len(tree.marks) == 2

    def test_nothing_goes_first_before_the_grace_period_is_over(self, tree: Tree) -> None:
        tree.replace("d", "y")
        tree.clock.advance(GRACE_S - 1)
        assert not tree.marks.goes_first(tree.of("d"))
        assert tree.marks.standing(tree.of("d")) == {"first_in_s": pytest.approx(1.0)}
        tree.clock.advance(1)
        assert tree.marks.goes_first(tree.of("c"))
        assert not tree.marks.goes_first(tree.of("b"))

    def test_what_others_continue_from_the_leaf_keeps_the_branch(self, tree: Tree) -> None:
        tree.grow("e", on=tree.of("d"))
        assert tree.replace("d", "y") == 0
        assert tree.replace("c", "y") == 0

    def test_a_branch_off_the_old_one_is_a_living_context(self, tree: Tree) -> None:
        tree.grow("e", on=tree.of("c"))
        assert tree.replace("d", "y") == 1
        assert tree.marked("abcdexy") == "d"
        assert tree.replace("e", "y") == 2  # now nothing living continues `c`
        assert tree.marked("abcdexy") == "cde"

    def test_where_a_session_ends_is_a_living_context(self, tree: Tree) -> None:
        tree.session("s", tree.of("c"))
        assert tree.replace("d", "y") == 1
        assert tree.marked(ALL) == "d"

    def test_the_session_of_the_old_context_goes_on_with_the_new_one(self, tree: Tree) -> None:
        tree.session("s", tree.of("d"))
        assert tree.replace("d", "y") == 2
        found = tree.sessions.find("s")
        assert found is not None
        assert found.key == tree.of("y").key
        assert tree.sessions.ends_at(tree.of("y"))
        assert not tree.sessions.ends_at(tree.of("d"))

    def test_a_context_may_be_cut_back_to_its_head(self, tree: Tree) -> None:
        tree.replace("y", "b")
        assert tree.marked(ALL) == "xy"
        tree.replace("d", "b")
        assert tree.marked(ALL) == "cdxy"  # and not `b`, though nothing living continues it
        tree.grow("z")
        tree.replace("b", "z")
        assert tree.marked(ALL) == "abcdxy"

    def test_where_a_context_was_cut_back_it_lives_whatever_becomes_of_others(
        self, tree: Tree
    ) -> None:
        tree.grow("z")
        tree.replace("y", "b")
        tree.replace("d", "z")
        assert tree.marked(ALL) == "cdxy"

    def test_once_the_new_one_is_replaced_too_nothing_keeps_what_both_shared(
        self, tree: Tree
    ) -> None:
        tree.grow("z")
        assert tree.replace("d", "y") == 2
        assert tree.replace("y", "z") == 4
        assert tree.marked("abcdxyz") == "abcdxy"

    def test_again_changes_nothing(self, tree: Tree) -> None:
        tree.replace("d", "y")
        tree.clock.advance(GRACE_S - 1)
        assert tree.replace("d", "y") == 2
        tree.clock.advance(1)
        assert tree.marks.goes_first(tree.of("d"))

    @pytest.mark.parametrize(("old", "new"), [("?", "y"), ("d", "?"), ("d", "d"), ("b", "d")])
    def test_what_is_not_held_or_goes_on_is_not_replaced(
        self, old: str, new: str, tree: Tree
    ) -> None:
        assert tree.replace(old, new) == 0
        assert tree.marked(ALL) == ""

    def test_every_blob_that_is_marked_is_told_of(self, tree: Tree) -> None:
        told: list[Record] = []
        tree.marks.on_marked = told.append
        tree.replace("d", "y")
        assert told == [tree.of("d"), tree.of("c")]

    def test_long_branches_are_marked_in_turns(self, tree: Tree) -> None:
        n = 2 * module.SLICE + 7
        leaf = tree.grow("".join(chr(0x4E00 + at) for at in range(n)), on=tree.of("b"))

        async def replace() -> tuple[int, int]:
            task = asyncio.create_task(tree.marks.replace(tree.state, leaf.key, tree.of("y").key))
            await asyncio.sleep(0)
            first = len(tree.marks)
            return first, await task

        assert asyncio.run(replace()) == (module.SLICE, n)
        assert len(tree.marks) == n

    def test_a_use_between_two_turns_ends_it(self, tree: Tree) -> None:
        n = 2 * module.SLICE
        leaf = tree.grow("".join(chr(0x4E00 + at) for at in range(n)), on=tree.of("b"))

        async def replace() -> int:
            task = asyncio.create_task(tree.marks.replace(tree.state, leaf.key, tree.of("y").key))
            await asyncio.sleep(0)
            tree.marks.used(leaf)
            return await task

        assert asyncio.run(replace()) == module.SLICE
        assert len(tree.marks) == 0


class TestReversal:
    def test_a_use_takes_the_marks_back_as_far_as_it_reaches(self, tree: Tree) -> None:
        tree.replace("d", "y")
        tree.clock.advance(2 * GRACE_S)
        tree.marks.used(tree.of("c"))
        assert tree.marked(ALL) == "d"
        tree.marks.used(tree.of("d"))
        assert tree.marked(ALL) == ""

    def test_the_other_way_round_takes_them_back(self, tree: Tree) -> None:
        tree.replace("d", "y")
        assert tree.replace("y", "d") == 2
        assert tree.marked(ALL) == "xy"

    def test_a_new_blob_takes_them_back_for_what_it_continues(self, tree: Tree) -> None:
        tree.replace("d", "y")
        tree.grow("e", on=tree.of("c"))
        assert tree.marked("abcdexy") == "d"

    def test_what_is_gone_is_forgotten(self, tree: Tree) -> None:
        tree.replace("d", "y")
        tree.index.discard(tree.of("d"))
        assert tree.marks.stats() == {"blobs": 1, "branches": 1}
        tree.index.discard(tree.of("c"))
        assert tree.marks.stats() == {"blobs": 0, "branches": 0}


class TestRoom:
    def test_what_is_due_on_ssd_is_as_good_as_free(self) -> None:
        tree = Tree()
        tree.grow("ab", ssd=True)
        tree.grow("cd", on=tree.of("b"), ssd=True)
        tree.grow("e", on=tree.of("d"))  # in DRAM alone
        tree.grow("x", on=tree.of("b"), ssd=True)
        assert tree.replace("e", "x") == 3
        assert tree.marks.ssd_bytes == 0
        tree.clock.advance(GRACE_S)
        assert tree.marks.ssd_bytes == 200
        tree.marks.used(tree.of("c"))
        assert tree.marks.ssd_bytes == 100
        tree.index.discard(tree.of("e"))
        tree.index.discard(tree.of("d"))
        assert tree.marks.ssd_bytes == 0

    def test_what_comes_to_ssd_or_leaves_it_counts_from_then_on(self, tree: Tree) -> None:
        order = tree.marks.first_out_of_ssd(LeafLru())
        tree.replace("d", "y")
        tree.clock.advance(GRACE_S)
        order.enter(tree.of("c"), 100)
        order.enter(tree.of("x"), 100)
        assert tree.marks.ssd_bytes == 100
        order.leave(tree.of("c"))
        order.leave(tree.of("x"))
        assert tree.marks.ssd_bytes == 0


def restarted(tree: Tree, directory: Path, *, wall_s: float = 0.0) -> Superseded:
    """The marks of a store that starts with the same blobs, after so much time on the wall."""
    marks = Superseded(tree.index, tree.sessions, tree.clock, GRACE_S)
    marks.load(directory)
    marks.adopt(WALL_OFFSET_S + wall_s)
    return marks


def save(marks: Superseded, directory: Path) -> None:
    work: Callable[[], None] | None = marks.unsaved(directory, WALL_OFFSET_S)
    assert work is not None
    work()


class TestRestarts:
    @pytest.fixture
    def tree(self) -> Tree:
        made = Tree()
        made.grow("abcd", ssd=True)
        made.grow("xy", on=made.of("b"), ssd=True)
        made.grow("e", on=made.of("c"), ssd=True)
        return made

    def test_marks_are_known_again(self, tree: Tree, tmp_path: Path) -> None:
        tree.replace("d", "y")
        tree.replace("e", "y")
        save(tree.marks, tmp_path)
        again = restarted(tree, tmp_path)
        assert again.stats() == tree.marks.stats() == {"blobs": 3, "branches": 1}
        assert not again.goes_first(tree.of("d"))
        tree.clock.advance(GRACE_S)
        assert again.goes_first(tree.of("d"))
        assert not again.goes_first(tree.of("b"))

    def test_what_was_taken_back_is_not_marked(self, tree: Tree, tmp_path: Path) -> None:
        tree.replace("d", "y")
        tree.replace("e", "y")
        tree.marks.used(tree.of("c"))
        save(tree.marks, tmp_path)
        again = restarted(tree, tmp_path)
        assert again.stats() == {"blobs": 2, "branches": 2}
        assert not again.standing(tree.of("c"))

    def test_what_was_used_after_an_older_file_is_not_marked(
        self, tree: Tree, tmp_path: Path
    ) -> None:
        tree.replace("d", "y")
        tree.replace("e", "y")
        save(tree.marks, tmp_path)
        tree.clock.advance(GRACE_S + 1)
        tree.of("e").last_used = tree.clock()
        again = restarted(tree, tmp_path)
        assert again.stats() == {"blobs": 1, "branches": 1}
        assert again.goes_first(tree.of("d"))

    def test_what_is_in_dram_alone_is_not_told_of_on_disk(self, tmp_path: Path) -> None:
        tree = Tree()
        tree.grow("ab").retention = Retention.VOLATILE
        tree.grow("x")
        assert tree.replace("b", "x") == 2
        save(tree.marks, tmp_path)
        assert tree.of("b").key not in (tmp_path / FILE_NAME).read_bytes()
        assert len(restarted(tree, tmp_path)) == 0

    def test_a_wall_clock_that_went_back_delays_by_no_more_than_the_grace_period(
        self, tree: Tree, tmp_path: Path
    ) -> None:
        tree.replace("d", "y")
        save(tree.marks, tmp_path)
        again = restarted(tree, tmp_path, wall_s=-1e6)
        tree.clock.advance(GRACE_S)
        assert again.goes_first(tree.of("d"))

    def test_nothing_is_written_unless_something_changed(self, tree: Tree, tmp_path: Path) -> None:
        assert tree.marks.unsaved(tmp_path, 0.0) is None
        tree.replace("d", "y")
        assert tree.marks.unsaved(tmp_path, 0.0) is not None
        assert tree.marks.unsaved(tmp_path, 0.0) is None
        tree.marks.used(tree.of("d"))
        assert tree.marks.unsaved(tmp_path, 0.0) is not None

    def test_the_file_is_as_it_is_described(self, tree: Tree, tmp_path: Path) -> None:
        """As docs/FORMAT-disk.md has it."""
        tree.replace("d", "y")
        save(tree.marks, tmp_path)
        body = read_sealed(tmp_path / FILE_NAME, b"bs-super", 1)
        due_s = WALL_OFFSET_S + tree.clock() + GRACE_S
        assert msgspec.msgpack.decode(body) == [[tree.state.id, tree.of("d").key, due_s]]

    @pytest.mark.parametrize("body", [b"", b"\xc0", b"\x91\x90"])
    def test_a_body_that_is_none_of_ours_marks_nothing(
        self, body: bytes, tree: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_sealed(tmp_path / FILE_NAME, b"bs-super", 1, body)
        with caplog.at_level(logging.WARNING):
            assert len(restarted(tree, tmp_path)) == 0
        assert "superseded contexts from before are not known" in caplog.text

    def test_blobs_that_are_gone_are_passed_over(self, tree: Tree, tmp_path: Path) -> None:
        tree.replace("d", "y")
        save(tree.marks, tmp_path)
        tree.index.discard(tree.of("d"))
        assert len(restarted(tree, tmp_path)) == 0

    def test_a_first_start_and_a_full_disk_are_survived(
        self, tree: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert len(restarted(tree, tmp_path)) == 0
        assert not caplog.records
        tree.replace("d", "y")
        with caplog.at_level(logging.WARNING):
            save(tree.marks, tmp_path / "missing")
        assert "superseded contexts are not saved" in caplog.text


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_living_context_has_a_marked_blob(data: st.DataObject) -> None:
    """Any tree, and any leaves replaced and used in any order, beside a plain model."""
    tree = Tree()
    blobs: list[Record] = []
    parents = data.draw(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
    for at, parent in enumerate(parents):
        on = blobs[parent % len(blobs)] if blobs and parent >= 0 else None
        blobs.append(tree.grow(chr(0x4E00 + at), on=on))
    living = {record for record in blobs if not record.has_children}
    ends = data.draw(st.lists(st.sampled_from(blobs), max_size=3))
    for at, record in enumerate(ends):
        tree.session(f"s{at}", record)
    living |= set(ends)
    steps = data.draw(st.lists(st.tuples(st.sampled_from(blobs), st.sampled_from(blobs))))
    for old, new in steps:
        if data.draw(st.booleans()):
            tree.marks.used(new)
            if not new.has_children or tree.sessions.ends_at(new):
                living.add(new)
            continue
        done(tree.marks.replace(tree.state, old.key, new.key))
        if old is not new:
            living.add(new)
            living.discard(old)
    marked = {record for record in blobs if tree.marks.standing(record)}
    for leaf in living:
        node: Record | None = leaf
        while node is not None:
            assert node not in marked
            node = node.parent
    for record in marked:
        assert all(child in marked for child in record.children())
    assert {r for r in marked if r.parent not in marked} == set(tree.marks._tops)
