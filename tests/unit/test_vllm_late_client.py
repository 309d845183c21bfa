"""A client of a daemon that comes late, and goes."""

from __future__ import annotations

import threading
from typing import Any

from blobstore.clients.vllm.breaker import PAUSE_S, Breaker
from blobstore.clients.vllm.late_client import LateClient
from blobstore.errors import Unavailable
from tests.support.clock import FakeClock
from tests.support.polling import poll_until

JOIN_S = 20.0


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


def test_a_client_is_there_as_soon_as_the_daemon_is() -> None:
    clock, place = FakeClock(), Place()
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
    clock, place = FakeClock(), Place()
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

    late = LateClient(connect, Breaker(FakeClock()))
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

    late = LateClient(connect, Breaker(FakeClock()))
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

    late = LateClient(connect, Breaker(FakeClock()))
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
