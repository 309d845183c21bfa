"""A daemon that comes late, goes, and is not asked too often meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from blobstore.clients.vllm.breaker import PAUSE_MAX_S, PAUSE_S, Breaker
from blobstore.clients.vllm.late_client import LateClient
from blobstore.errors import Unavailable
from tests.support.polling import poll_until

JOIN_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Place:
    """Where a daemon may be."""

    def __init__(self) -> None:
        self.there = False
        self.attempts = 0
        self.closed = 0

    def connect(self) -> Any:
        self.attempts += 1
        if not self.there:
            raise Unavailable("nobody")
        return self

    def close(self) -> None:
        self.closed += 1


def test_pauses_grow_to_a_bound_and_end_with_success() -> None:
    clock = Clock()
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
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(5):
        breaker.failed()
    clock.now_s += PAUSE_S
    assert not breaker.open


def test_a_client_is_there_as_soon_as_the_daemon_is() -> None:
    clock, place = Clock(), Place()
    late = LateClient(place.connect, Breaker(clock))
    assert late.now() is None
    assert place.attempts == 0
    assert late.reach() is None
    assert late.reason == "unavailable"
    assert late.reach() is None
    assert place.attempts == 1
    place.there = True
    clock.now_s += PAUSE_S
    assert late.reach() is place  # type: ignore[comparison-overlap]
    assert late.now() is place  # type: ignore[comparison-overlap]
    assert late.reach() is late.now()
    assert place.attempts == 2


def test_a_known_client_is_given_while_the_breaker_is_open() -> None:
    clock, place = Clock(), Place()
    breaker = Breaker(clock)
    place.there = True
    late = LateClient(place.connect, breaker)
    client = late.reach()
    breaker.failed()
    assert late.reach() is client is not None


def test_threads_that_look_for_it_together_share_one_attempt() -> None:
    """None of them takes it for absent while another one connects."""
    entered, go = threading.Event(), threading.Event()
    place = Place()
    place.there = True
    found: list[Any] = []

    def connect() -> Any:
        entered.set()
        assert go.wait(JOIN_S)
        return place.connect()

    late = LateClient(connect, Breaker(Clock()))
    looking = [threading.Thread(target=lambda: found.append(late.reach())) for _ in range(3)]
    for thread in looking:
        thread.start()
    assert entered.wait(JOIN_S)
    assert late.now() is None
    go.set()
    for thread in looking:
        thread.join(JOIN_S)
    assert found == [place] * 3
    assert place.attempts == 1


def test_threads_that_wait_for_one_that_fails_do_not_try_again() -> None:
    entered, go = threading.Event(), threading.Event()
    place = Place()
    found: list[Any] = []

    def connect() -> Any:
        entered.set()
        assert go.wait(JOIN_S)
        return place.connect()

    late = LateClient(connect, Breaker(Clock()))
    looking = [threading.Thread(target=lambda: found.append(late.reach())) for _ in range(3)]
    for thread in looking:
        thread.start()
    assert entered.wait(JOIN_S)
    go.set()
    for thread in looking:
        thread.join(JOIN_S)
    assert found == [None] * 3
    assert place.attempts == 1


def test_closed_while_it_connects_leaves_nothing_open() -> None:
    entered, go = threading.Event(), threading.Event()
    place = Place()
    place.there = True

    def connect() -> Any:
        entered.set()
        assert go.wait(JOIN_S)
        return place

    late = LateClient(connect, Breaker(Clock()))
    looking = threading.Thread(target=late.reach)
    closing = threading.Thread(target=late.close)
    looking.start()
    assert entered.wait(JOIN_S)
    closing.start()
    poll_until(lambda: late._closed, JOIN_S)
    go.set()
    looking.join(JOIN_S)
    closing.join(JOIN_S)
    assert place.closed == 1
    assert late.now() is None
    assert late.reach() is None
