"""Keys in order: what comes after each, whatever was added and removed before."""

from __future__ import annotations

import random
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from blobstore.key_order import RUN_KEYS_MAX, KeyOrder
from tests.support.identities import repeatable

KEYS = st.binary(min_size=1, max_size=3)


@repeatable
@given(st.sets(KEYS), st.lists(st.tuples(st.booleans(), KEYS)), KEYS)
def test_it_is_a_sorted_set(first: set[bytes], steps: list[tuple[bool, bytes]], at: bytes) -> None:
    order, held = KeyOrder(first), set(first)
    for add, key in steps:
        if not add:
            order.discard(key)
            held.discard(key)
        elif key not in held:
            order.add(key)
            held.add(key)
    assert len(order) == len(held)
    assert list(order.after(b"")) == sorted(held)
    assert list(order.after(at)) == sorted(key for key in held if key > at)


def test_many_keys_in_any_order_are_cut_into_runs_of_bounded_length() -> None:
    numbers = random.Random(5)
    keys = [numbers.randbytes(8) for _ in range(20 * RUN_KEYS_MAX)]
    order = KeyOrder(keys[: len(keys) // 2])
    for key in keys[len(keys) // 2 :]:
        order.add(key)
    ordered = sorted(keys)
    assert max(map(len, order._runs)) <= RUN_KEYS_MAX
    for start in (0, 1, RUN_KEYS_MAX, len(keys) - 2, len(keys) - 1):
        expected = ordered[start + 1 : start + 11]
        assert list(islice(order.after(ordered[start]), 10)) == expected
    for key in keys[5:]:
        order.discard(key)
    assert list(order.after(b"")) == sorted(keys[:5])
    assert len(order._runs) <= 5


def test_keys_that_come_in_order_are_appended() -> None:
    order = KeyOrder()
    keys = [number.to_bytes(4, "big") for number in range(5 * RUN_KEYS_MAX)]
    for key in keys:
        order.add(key)
    assert list(order.after(b"")) == keys
