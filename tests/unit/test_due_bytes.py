from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blobstore.tiering.due_bytes import DueBytes
from tests.support.clock import FakeClock


def test_an_item_counts_from_its_time_on_until_it_is_removed() -> None:
    clock = FakeClock()
    due: DueBytes[str] = DueBytes(clock)
    due.add("a", clock() + 10, 100)
    due.add("b", clock() + 5, 7)
    assert due.now_bytes == 0
    clock.advance(5)
    assert due.now_bytes == 7
    clock.advance(5)
    assert due.now_bytes == 107
    due.remove("b")
    due.remove("b")
    assert (due.now_bytes, len(due)) == (100, 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "pass"]), st.integers(0, 4), st.integers(0, 9))
)


@given(STEPS)
def test_the_sum_is_that_of_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    clock = FakeClock()
    due: DueBytes[int] = DueBytes(clock)
    known: dict[int, tuple[float, int]] = {}
    for step, item, number in steps:
        if step == "add":
            known[item] = clock() + number, 2**item
            due.add(item, *known[item])
        elif step == "remove":
            known.pop(item, None)
            due.remove(item)
        else:
            clock.advance(number)
        wanted = sum(nbytes for due_s, nbytes in known.values() if due_s <= clock())
        assert (due.now_bytes, len(due)) == (wanted, len(known))
