"""What is remembered of items, of those that left, and how much of it."""

from __future__ import annotations

import pytest

from blobstore.tiering import item_table
from blobstore.tiering.item_table import UNKNOWN, ItemTable


def _table() -> ItemTable[str]:
    return ItemTable(lambda item: int(item.strip("abc")))


def test_slots_are_kept_and_unknown_items_have_none() -> None:
    table = _table()
    slots = table.admit(["a1", "a2"])
    assert table.admit(["a2", "a1"]).tolist() == slots[::-1].tolist()
    assert table.slots(["a1", "a9"]).tolist() == [slots[0], -1]
    assert table.slot("a9") == -1


def test_whether_known_before_or_new_an_item_has_one_slot() -> None:
    table = _table()
    known, new, again, other = (
        table.admit(["a1"]).tolist() + table.admit(["a2", "a2", "a3"]).tolist()
    )
    assert new == again
    assert len({known, new, other}) == 3
    assert table.admit(["a3", "a1", "a4", "a2"]).tolist()[:2] == [other, known]
    assert table.slot("a2") == new


def test_content_that_comes_back_as_another_item_is_known_again() -> None:
    table = _table()
    (slot,) = table.admit(["a1"])
    table.uses[slot] = 5
    table.forget("a1")
    assert table.slot("a1") == -1
    (again,) = table.admit(["b1"])
    assert table.uses[again] == 5
    assert table.n_ghosts == 0


def test_an_item_is_found_as_long_as_it_or_its_ghost_is_known() -> None:
    table = _table()
    (slot,) = table.admit(["a1"])
    assert table.find("a1") == slot
    table.forget("a1")
    assert table.find("a1") == table.find("b1") == slot
    assert table.find("a2") == UNKNOWN
    assert UNKNOWN not in table.admit([f"a{n}" for n in range(100)])


def test_columns_keep_their_values_when_they_grow() -> None:
    table = _table()
    slots = table.admit([f"a{n}" for n in range(5000)])
    assert len(set(slots.tolist())) == 5000
    assert (table.parent[slots] == -1).all()
    assert (table.uses[slots] == 0).all()
    table.last_s[slots[-1]] = 7.0
    assert table.view.last_s[slots[-1]] == 7.0


def test_ghosts_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_table, "_GHOSTS_MIN", 100)
    table = _table()
    for n in range(10_000):
        (slot,) = table.admit([f"a{n}"])
        table.uses[slot] = 1
        table.forget(f"a{n}")
        assert len(table) <= 101
    assert len(table.last_s) == 1024
    assert table.uses[table.admit(["a9999"])[0]] == 1
    assert table.uses[table.admit(["a5"])[0]] == 0


def test_forgetting_the_same_content_twice_leaves_one_ghost() -> None:
    table = _table()
    table.admit(["a1", "b1"])
    table.forget("a1")
    table.forget("b1")
    table.forget("b1")
    assert table.n_ghosts == 1
