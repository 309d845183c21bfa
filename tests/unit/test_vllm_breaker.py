"""A daemon that fails is left alone for a moment, longer each time."""

from __future__ import annotations

from blobstore.clients.vllm.breaker import PAUSE_MAX_S, PAUSE_S, Breaker
from tests.support.clock import FakeClock


def test_pauses_grow_to_a_bound_and_end_with_success() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    assert not breaker.open
    pauses = []
    for _ in range(8):
        breaker.failed()
        before_s = clock.now_s
        while breaker.open:
            clock.now_s += PAUSE_S
        pauses.append(clock.now_s - before_s)
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses[-1] == PAUSE_MAX_S
    breaker.worked()
    breaker.failed()
    clock.now_s += PAUSE_S
    assert not breaker.open


def test_calls_that_fail_together_are_one_fault() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    for _ in range(5):
        breaker.failed()
    clock.now_s += PAUSE_S
    assert not breaker.open
