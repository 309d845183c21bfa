"""The daemon behind its breaker: there, not there yet, or left alone for a moment."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from blobstore.clients import writing
from blobstore.clients.vllm import daemon as daemons
from blobstore.clients.vllm import reasons
from blobstore.clients.vllm.breaker import Breaker
from blobstore.clients.vllm.daemon import Daemon
from blobstore.errors import Busy, DeadlineExceeded, Unavailable
from tests.support.polling import poll_until


class FakeClient:
    """A client that answers pings as it is told."""

    def __init__(self) -> None:
        self.answers = True

    def ping(self, *, timeout_s: float) -> bool:
        return self.answers

    def close(self) -> None:
        return None


class Bench:
    """A daemon that may be absent, with a clock of the test's."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.there = True
        self.client = FakeClient()
        self.daemon = Daemon("unix:/b", self.connect, Breaker(lambda: self.now_s))

    def connect(self) -> Any:
        if not self.there:
            raise Unavailable("no daemon")
        return self.client


def test_an_absent_daemon_is_left_alone_and_found_later(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.there = False
    assert bench.daemon.usable
    assert bench.daemon.reach() is None
    assert not bench.daemon.usable
    bench.now_s += 10.0
    assert bench.daemon.reach() is None
    assert len(caplog.records) == 1
    bench.there = True
    bench.now_s += 10.0
    assert bench.daemon.reach() is bench.client


def test_a_slow_answer_of_a_daemon_that_is_there_is_no_fault() -> None:
    bench = Bench()
    bench.daemon.reach()
    bench.daemon.note("deadline")
    assert bench.daemon.usable


def test_a_frozen_daemon_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.daemon.reach()
    bench.client.answers = False
    bench.daemon.note("deadline")
    assert not bench.daemon.usable
    assert bench.daemon.reach() is None
    bench.now_s += 10.0
    bench.daemon.note("deadline")
    assert len(caplog.records) == 1
    bench.daemon.note("absent")
    assert bench.daemon.usable


def test_a_lost_daemon_is_said_by_its_client_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.daemon.reach()
    bench.daemon.note("unavailable")
    assert not bench.daemon.usable
    assert caplog.records == []


def test_both_halves_share_a_daemon() -> None:
    one, other = (daemons.borrow("unix:/nowhere") for _ in range(2))
    assert one is other
    daemons.give_back("unix:/nowhere")
    assert daemons.borrow("unix:/nowhere") is one
    daemons.give_back("unix:/nowhere")
    daemons.give_back("unix:/nowhere")
    another = daemons.borrow("unix:/nowhere")
    assert another is not one
    daemons.give_back("unix:/nowhere")
    poll_until(lambda: one.reach() is None)


def test_what_the_breaker_goes_by_are_the_words_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in Unavailable, DeadlineExceeded, Busy:
        monkeypatch.setattr(error, "code", f"{error.code}, renamed")
    monkeypatch.setattr(writing, "ORPHAN", "orphan, renamed")
    words = runpy.run_path(reasons.__file__)
    assert words["UNAVAILABLE"] == "unavailable, renamed"
    assert words["DEADLINE"] == "deadline, renamed"
    assert words["BUSY"] == "busy, renamed"
    assert words["ORPHAN"] == "orphan, renamed"
