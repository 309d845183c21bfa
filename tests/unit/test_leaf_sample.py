"""Items that may go, and draws among them."""

from __future__ import annotations

import numpy as np

from blobstore.tiering.leaf_sample import LeafSample


def _leaves(n: int) -> LeafSample[str]:
    leaves: LeafSample[str] = LeafSample(np.random.default_rng(1))
    for slot in range(n):
        leaves.put(f"item {slot}", slot)
    return leaves


def test_few_are_drawn_whole() -> None:
    items, slots = _leaves(5).draw(5)
    assert sorted(items) == [f"item {slot}" for slot in range(5)]
    assert [f"item {slot}" for slot in slots] == items


def test_a_draw_of_many_is_fair_and_names_the_right_slots() -> None:
    leaves = _leaves(1000)
    counts = np.zeros(1000)
    for _ in range(500):
        items, slots = leaves.draw(64)
        assert [f"item {slot}" for slot in slots] == items
        np.add.at(counts, slots, 1)
    assert counts.min() > 5
    assert counts.max() < 80


def test_removing_keeps_the_others() -> None:
    leaves = _leaves(300)
    for slot in range(0, 300, 2):
        leaves.remove(f"item {slot}")
        leaves.remove(f"item {slot}")
    items, slots = leaves.all()
    assert sorted(slots.tolist()) == list(range(1, 300, 2))
    assert [f"item {slot}" for slot in slots] == items
    assert "item 1" in leaves
    assert "item 2" not in leaves


def test_an_item_is_in_once_with_its_latest_slot() -> None:
    leaves = _leaves(1)
    leaves.put("item 0", 7)
    assert len(leaves) == 1
    assert leaves.all()[1].tolist() == [7]
