from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.text_entry import OBJECT_BYTES, Noted, TextEntry
from blobstore.text_pending import PendingTexts
from tests.support.texts import NAMESPACE, TOKENS, run_of

ONE_BYTES = OBJECT_BYTES + 4 * TOKENS
CHAIN = run_of(6)
KEYS = list(CHAIN)


def noted(at: int, *, only_new: bool = False, **changes: str | bytes) -> Noted:
    entry: TextEntry = replace(CHAIN[KEYS[at]], **changes)  # type: ignore[arg-type]
    return Noted(NAMESPACE, KEYS[at], entry, only_new)


def filled(n: int = 6) -> PendingTexts:
    pending = PendingTexts(100 * ONE_BYTES)
    for at in range(n):
        assert pending.add(noted(at))
    return pending


def held(pending: PendingTexts) -> list[int]:
    return [at for at, key in enumerate(KEYS) if pending.get(NAMESPACE.id, key) is not None]


def test_what_waits_and_what_is_being_written_can_be_read() -> None:
    pending = filled()
    assert pending.take(2, 1 << 20) == [noted(0), noted(1)]
    assert held(pending) == [0, 1, 2, 3, 4, 5]
    assert pending.get(bytes(32), KEYS[0]) is None
    pending.taken()
    assert held(pending) == [2, 3, 4, 5]
    assert len(pending) == 4


def test_a_batch_ends_with_its_bytes() -> None:
    pending = filled()
    assert len(pending.take(100, 2 * ONE_BYTES - 1)) == 2
    pending.taken()
    assert len(pending.take(100, 0)) == 1


def test_what_could_not_be_written_is_first_again_but_for_what_came_meanwhile() -> None:
    pending = filled(3)
    pending.take(2, 1 << 20)
    pending.add(noted(0, digest=b"new"))
    pending.put_back()
    assert held(pending) == [0, 1, 2]
    found = pending.take(10, 1 << 20)
    assert [item.entry.digest for item in found if item.key == KEYS[0]] == [b"new"]
    assert len(found) == 3


def test_beyond_its_bytes_nothing_is_taken_in() -> None:
    pending = PendingTexts(2 * ONE_BYTES)
    assert [pending.add(noted(at)) for at in range(3)] == [True, True, False]
    assert pending.add(noted(0, only_new=True)), "it is there"
    pending.drop(NAMESPACE.id, KEYS[1:2])
    assert pending.add(noted(2))


def test_a_second_note_replaces_the_first_unless_it_is_for_new_ones() -> None:
    pending = filled(1)
    pending.add(noted(0, only_new=True, digest=b"other"))
    assert pending.get(NAMESPACE.id, KEYS[0]) == noted(0)
    pending.add(noted(0, text="said"))
    pending.add(noted(0, digest=b"other"))
    assert pending.get(NAMESPACE.id, KEYS[0]) == noted(0, digest=b"other", text="said")


@pytest.mark.parametrize("n_taken", [0, 1, 3, 6])
def test_what_is_dropped_goes_with_all_that_continues_it(n_taken: int) -> None:
    pending = filled()
    pending.take(n_taken, 1 << 20)
    assert pending.drop(NAMESPACE.id, [KEYS[2]]) == set(KEYS[2:])
    assert held(pending) == [0, 1]
    pending.put_back()
    assert held(pending) == [0, 1], "and does not come back"


def test_what_continues_a_key_that_is_not_pending_is_dropped_with_it() -> None:
    pending = PendingTexts(1 << 20)
    for at in (3, 4):
        pending.add(noted(at))
    assert pending.drop(NAMESPACE.id, [KEYS[2]]) == {KEYS[3], KEYS[4]}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4))))
def test_its_bytes_are_those_of_what_it_holds(steps: list[tuple[int, int]]) -> None:
    pending = PendingTexts(1 << 30)
    taken = False
    for at, step in steps:
        if step == 0:
            pending.drop(NAMESPACE.id, [KEYS[at]])
        elif step == 1 and not taken:
            pending.take(at, 1 << 20)
            taken = True
        elif step == 2 and taken:
            pending.put_back()
            taken = False
        elif step == 3 and taken:
            pending.taken()
            taken = False
        else:
            pending.add(noted(at))
    if taken:
        pending.taken()
    assert pending._nbytes == len(pending) * ONE_BYTES
    pending.drop(NAMESPACE.id, KEYS)
    assert (pending._nbytes, len(pending), pending._children) == (0, 0, {})
