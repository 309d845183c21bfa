from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.index import Index, NamespaceState, Record, Retention, first_false
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.tiering.tier import Extent
from tests.support.identities import repeatable

NAMESPACE = Namespace("m", KVLayout.opaque(100), tokens_per_blob=16)


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


class Tree:
    """An index with blobs of small numbers."""

    def __init__(self) -> None:
        self.index = Index()
        self.state = self.index.declare(NAMESPACE)

    def add(self, number: int, parent: Record | None = None, *, dram: bool = True) -> Record:
        record = Record(self.state, key_of(number), parent, 100, 16)
        if dram:
            record.show_in_dram(Extent(0, 4096 * number, 100))
        else:
            record.ssd = True
        self.index.add(record)
        return record

    def chain(self, first: int, n: int, parent: Record | None = None) -> list[Record]:
        made = []
        for number in range(first, first + n):
            parent = self.add(number, parent)
            made.append(parent)
        return made

    def lose(self, record: Record) -> Record | None:
        record.packed, record.ssd = b"", False
        return self.index.lose(record)

    def leading(self, *numbers: int) -> int:
        return self.index.leading(self.state, b"".join(map(key_of, numbers)), 32)


@pytest.fixture
def tree() -> Tree:
    return Tree()


@repeatable
@given(n=st.integers(0, 300), at=st.integers(0, 300))
def test_the_first_false_of_a_falling_test_is_found_by_few_questions(n: int, at: int) -> None:
    asked = []

    def test(i: int) -> bool:
        asked.append(i)
        return i < at

    assert first_false(n, test) == min(n, at)
    assert len(asked) <= 1 + n.bit_length()


class CountedBlobs(dict[bytes, Record]):
    """Counts how often it is asked."""

    asked = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.mark.parametrize("held", [0, 1, 2, 499, 500, 999, 1000])
def test_match_of_a_long_chain_asks_for_few_keys(tree: Tree, held: int) -> None:
    tree.chain(0, held)
    counted = CountedBlobs(tree.state.blobs)
    tree.state.blobs = counted
    assert tree.leading(*range(1000)) == held
    assert counted.asked <= 16


def test_match_of_keys_that_were_put_as_roots_asks_for_each(tree: Tree) -> None:
    for number in (0, 1, 2, 4):
        tree.add(number)
    assert tree.leading(0, 1, 2, 3, 4) == 3
    assert tree.leading(3, 4) == 0


def test_match_of_a_chain_that_hangs_on_another_part_of_it_put_as_root(tree: Tree) -> None:
    tree.chain(0, 3)
    tree.chain(3, 3)
    assert tree.leading(*range(6)) == 6
    assert tree.leading(*range(8)) == 6


def test_match_of_the_middle_of_a_chain(tree: Tree) -> None:
    tree.chain(0, 10)
    assert tree.leading(*range(4, 12)) == 6


@repeatable
@given(st.data())
def test_match_finds_what_asking_for_every_key_finds(data: st.DataObject) -> None:
    tree = Tree()
    held = data.draw(st.integers(0, 12))
    records = tree.chain(0, held)
    for at in data.draw(st.sets(st.integers(0, 11), max_size=3)):
        if at < held - 1:
            tree.lose(records[at])
    asked = data.draw(st.integers(1, 14))
    leading = 0
    while leading < min(asked, held) and records[leading].held:
        leading += 1
    assert tree.leading(*range(asked)) == leading


def test_warm_counts_leading_blobs_in_dram(tree: Tree) -> None:
    records = tree.chain(0, 3)
    for number in range(3, 6):
        records.append(tree.add(number, records[-1], dram=False))
    keys = b"".join(map(key_of, range(6)))
    assert tree.index.leading(tree.state, keys, 32) == 6
    assert tree.index.warm(tree.state, keys, 32, 6) == 3


@pytest.mark.parametrize(
    ("warm", "cold", "appended"), [(0, 1, 1), (0, 3, 3), (1, 8, 1), (3, 4, 1), (12, 8, 4)]
)
def test_warm_is_not_deceived_by_what_was_appended_to_a_cold_blob(
    tree: Tree, warm: int, cold: int, appended: int
) -> None:
    records = tree.chain(0, warm)
    for number in range(warm, warm + cold):
        records.append(tree.add(number, records[-1] if records else None, dram=False))
    tree.chain(warm + cold, appended, records[-1])
    n = warm + cold + appended
    keys = b"".join(map(key_of, range(n)))
    assert tree.index.leading(tree.state, keys, 32) == n
    assert tree.index.warm(tree.state, keys, 32, n) == warm


def test_a_leaf_whose_bytes_are_lost_goes_and_its_parent_is_told(tree: Tree) -> None:
    parent, leaf = tree.chain(0, 2)
    assert tree.lose(leaf) is parent
    assert leaf.gone
    assert not parent.has_children
    assert key_of(1) not in tree.state.blobs


def test_an_inner_blob_whose_bytes_are_lost_stays_as_a_hole(tree: Tree) -> None:
    _, inner, leaf = tree.chain(0, 3)
    assert tree.lose(inner) is None
    assert (inner.hole, inner.held, tree.index.n_holes) == (True, False, 1)
    assert tree.leading(0, 1, 2) == 1
    assert tree.leading(2) == 1
    assert leaf.parent is inner
    tree.index.mend(inner)
    inner.ssd = True
    assert tree.index.n_holes == 0
    assert tree.leading(0, 1, 2) == 3


def test_losing_a_hole_again_counts_it_once(tree: Tree) -> None:
    inner, _ = tree.chain(0, 2)
    tree.lose(inner)
    tree.index.lose(inner)
    assert tree.index.n_holes == 1


def test_holes_go_with_the_last_blob_that_continues_them(tree: Tree) -> None:
    root, first, second, leaf = tree.chain(0, 4)
    sibling = tree.add(9, first)
    tree.lose(second)
    tree.lose(first)
    assert tree.index.discard(leaf) is first
    assert second.gone
    assert not first.gone
    assert tree.index.discard(sibling) is root
    assert first.gone
    assert tree.index.n_holes == 0
    assert list(tree.state.blobs) == [key_of(0)]


def test_subtree_has_ancestors_before_what_continues_them(tree: Tree) -> None:
    root, left, *_ = tree.chain(0, 3)
    tree.chain(5, 2, root)
    tree.add(9, left)
    found = tree.index.subtree(root)
    assert {record.key for record in found} == {key_of(n) for n in (0, 1, 2, 5, 6, 9)}
    for record in found[1:]:
        assert record.parent is not None
        assert found.index(record.parent) < found.index(record)


@repeatable
@given(st.lists(st.integers(0, 5), max_size=30))
def test_children_are_the_same_however_many_come_and_go(moves: list[int]) -> None:
    state = NamespaceState(NAMESPACE)
    parent = Record(state, key_of(100), None, 0, 0)
    pool = [Record(state, key_of(n), parent, 0, 0) for n in range(6)]
    wanted: set[Record] = set()
    for n in moves:
        if pool[n] in wanted:
            parent.disown(pool[n])
        else:
            parent.adopt(pool[n])
        wanted ^= {pool[n]}
        assert set(parent.children()) == wanted
        assert parent.has_children == bool(wanted)


def test_disowning_who_is_no_child_changes_nothing(tree: Tree) -> None:
    root, child = tree.chain(0, 2)
    root.disown(tree.add(7))
    assert list(root.children()) == [child]


def test_an_undeclared_namespace_is_a_typed_error() -> None:
    with pytest.raises(UnknownNamespace, match="declare it first"):
        Index().namespace(b"\0" * 32)


def test_declaring_again_gives_the_same_state(tree: Tree) -> None:
    assert tree.index.declare(NAMESPACE) is tree.state


def test_retention_is_parsed_by_name_and_ordered() -> None:
    assert Retention.parse("durable") is Retention.DURABLE
    assert Retention.VOLATILE < Retention.STANDARD < Retention.DURABLE
    with pytest.raises(InvalidRequest, match="volatile, standard or durable"):
        Retention.parse("forever")


def test_a_record_stays_small() -> None:
    """1 KiB per blob is the budget of everything; 200,000 records are made at open."""
    assert Record(NamespaceState(NAMESPACE), b"", None, 0, 0).__sizeof__() <= 256
