"""What the scheduler is told of chunks: never by waiting, and never for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blobstore.clients.vllm.tier_lookups import FRESH_S, TierLookups

TIMEOUT_S = 0.5
A, B, C = (bytes([n]) * 36 for n in range(3))


class Scheduler:
    """Asks in steps, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.asked: list[list[bytes]] = []
        self.misses: Counter[str] = Counter()
        self.takes_more = True
        self.lookups = TierLookups(self.submit, TIMEOUT_S, self.missed, lambda: self.now_s)

    def submit(self, keys: list[bytes]) -> bool:
        if self.takes_more:
            self.asked.append(keys)
        return self.takes_more

    def missed(self, why: str, n: int) -> None:
        self.misses[why] += n

    def step(self, request: str, keys: Sequence[bytes]) -> list[bool | None]:
        found = [self.lookups.held(key, request) for key in keys]
        self.lookups.end_of_step()
        return found


def test_a_step_asks_once_for_all_and_the_next_knows() -> None:
    scheduler = Scheduler()
    assert scheduler.step("r", [A, B, C]) == [None, None, None]
    assert scheduler.asked == [[A, B, C]]
    assert scheduler.step("r", [A, B, C]) == [None, None, None]
    scheduler.lookups.answered([A, B, C], [True, True, False])
    assert scheduler.step("r", [A, B, C]) == [True, True, False]
    assert scheduler.asked == [[A, B, C]]
    assert not scheduler.misses


def test_an_answer_that_does_not_come_is_a_no_from_the_deadline_on() -> None:
    scheduler = Scheduler()
    scheduler.step("r", [A])
    scheduler.now_s += TIMEOUT_S - 0.01
    assert scheduler.step("r", [A]) == [None]
    scheduler.now_s += 0.01
    assert scheduler.step("r", [A]) == [False]
    scheduler.lookups.answered([A], [True])
    assert scheduler.step("r", [A]) == [False], "the request may have gone on without it"
    assert scheduler.misses == {"deadline": 1}


def test_an_answer_that_is_there_counts_however_late_the_step_is() -> None:
    scheduler = Scheduler()
    scheduler.step("r", [A])
    scheduler.lookups.answered([A], [True])
    scheduler.now_s += 10 * TIMEOUT_S
    assert scheduler.step("r", [A]) == [True]


def test_what_could_not_be_loaded_is_not_found_again() -> None:
    scheduler = Scheduler()
    scheduler.step("r", [A, B])
    scheduler.lookups.answered([A, B], [True, True])
    assert scheduler.step("r", [A, B]) == [True, True]
    scheduler.lookups.missing([B, C])
    for _ in range(3):
        scheduler.now_s += FRESH_S
        assert scheduler.step("r", [A, B]) == [True, False]
    assert len(scheduler.asked) == 1


def test_another_request_asks_again_for_what_was_not_there_a_while_ago() -> None:
    scheduler = Scheduler()
    scheduler.step("writer", [A])
    scheduler.lookups.answered([A], [False])
    assert scheduler.step("writer", [A]) == [False]
    scheduler.now_s += FRESH_S / 2
    assert scheduler.step("soon", [A]) == [False]
    scheduler.now_s += FRESH_S / 2
    assert scheduler.step("later", [A]) == [None]
    assert scheduler.asked == [[A], [A]]
    scheduler.lookups.answered([A], [True])
    assert scheduler.step("later", [A]) == [True]
    assert scheduler.step("writer", [A]) == [True]


def test_where_no_more_can_be_asked_it_is_a_no_at_once() -> None:
    scheduler = Scheduler()
    scheduler.takes_more = False
    scheduler.step("r", [A, B])
    assert scheduler.step("r", [A, B]) == [False, False]
    assert scheduler.misses == {"busy": 2}


def test_a_request_that_ends_takes_its_questions_along() -> None:
    scheduler = Scheduler()
    scheduler.lookups.held(A, "gone")
    scheduler.lookups.finished("gone")
    scheduler.lookups.end_of_step()
    assert scheduler.asked == []
    scheduler.step("r", [A, B])
    scheduler.step("s", [B])
    scheduler.lookups.finished("r")
    assert len(scheduler.lookups) == 1
    scheduler.lookups.finished("s")
    scheduler.lookups.finished("s")
    assert len(scheduler.lookups) == 0
    scheduler.lookups.answered([A, B], [True, True])
    assert scheduler.step("t", [A]) == [None]
