"""Options of the connector, params of requests, lanes and the daemon behind its breaker."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from blobstore.clients.vllm import daemon as daemons
from blobstore.clients.vllm.breaker import Breaker
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.lane import Lane
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.request_params import RequestParams, Turns
from blobstore.errors import InvalidRequest, Unavailable
from blobstore.hint import Hint
from tests.support.polling import poll_until


def test_options_have_defaults() -> None:
    options = Options.of({"address": "unix:/tmp/b.sock", "timeout_s": 3})
    assert (options.address, options.timeout_s) == ("unix:/tmp/b.sock", 3.0)
    assert options.tokens_per_blob == 256


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"addr": "unix:/b"}, "did you mean address"),
        ({"nothing_alike": 1}, "there are address"),
        ({"tokens_per_blob": "256"}, "is of type int"),
        ({"tokens_per_blob": True}, "is of type int"),
        ({"tokens_per_blob": 0}, "1 or more"),
        ({"retention": "forever"}, "volatile, standard, durable"),
        ({"timeout_s": -1}, "from 0 to"),
        ({"address": "tcp://host"}, "not an address"),
        ({"address": "http://127.0.0.1:80"}, "not an address"),
        ({"kind": "x" * 300}, "kind"),
    ],
)
def test_wrong_options_are_refused_with_what_is_right(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Options.of(given)


def test_params_hold_what_a_request_says_and_the_engine_elsewhere() -> None:
    params = RequestParams.of(
        {"retention": "durable", "ttl": 5, "turn": 3, "remote_host": "of another connector"},
        retention="standard",
        kind="main",
        session="s",
    )
    assert (params.retention, params.ttl_s) == ("durable", 5.0)
    assert params.hint == Hint(session="s", turn=3, kind="main")
    assert RequestParams.of(None, retention="volatile", kind="") == RequestParams("volatile")


@pytest.mark.parametrize(
    "params",
    [
        {"retention": 3}, {"ttl_s": -1}, {"ttl_s": "5"}, {"ttl_s": True}, {"no_store": 1},
        {"no_load": "yes"}, {"session": 7}, {"turn": -1}, {"kind": "x" * 300},
        {"ttl_s": float("nan")},
    ],
)  # fmt: skip
def test_wrong_params_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        RequestParams.of(params, retention="standard", kind="")


def test_turns_count_on_from_what_a_request_says() -> None:
    turns = Turns()
    hints = [Hint(session="s"), Hint(session="t"), Hint(session="s", turn=7), Hint(session="s")]
    assert [turns.numbered(hint).turn for hint in hints] == [0, 0, 7, 8]
    assert turns.numbered(Hint(kind="k")) == Hint(kind="k")


def test_a_lane_runs_jobs_in_order_and_refuses_too_many() -> None:
    lane, go, ran = Lane("test", waiting_max=2), threading.Event(), list[int]()
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert go.wait(10.0)

    assert lane.post(first)
    assert begun.wait(10.0)
    assert [lane.post(lambda n=n: ran.append(n)) for n in range(3)] == [True, True, False]  # type: ignore[misc]
    assert not lane.close(0.0)
    assert not lane.post(lambda: None)
    go.set()
    assert lane.close(10.0)
    assert ran == [0, 1]


def test_a_job_that_raises_does_not_end_its_lane(caplog: pytest.LogCaptureFixture) -> None:
    lane, ran = Lane("test"), threading.Event()

    def fails() -> None:
        raise RuntimeError("no luck")

    lane.post(fails)
    lane.post(ran.set)
    assert ran.wait(10.0)
    assert "no luck" in caplog.text
    lane.close(5.0)


def test_a_fault_is_said_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    faults = Faults()
    for reason in ("", "late", "late", "gone", "", "late"):
        faults.note("saves", reason)
    assert [record.message for record in caplog.records] == [
        "saves: late", "saves: works again", "saves: late",
    ]  # fmt: skip


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


def test_what_must_not_raise_is_said_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def divided(by: int) -> float:
        return 1 / by

    faults = Faults()
    assert faults.guarded(-1.0, divided, 2) == 0.5
    assert caplog.records == []
    for _ in range(3):
        assert faults.guarded(-1.0, divided, by=0) == -1.0
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "divided failed" in record.getMessage()
    assert "ZeroDivisionError" in caplog.text
    assert faults.guarded("other", lambda: str([][0])) == "other"
    assert len(caplog.records) == 2


def test_an_interrupt_is_no_fault() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Faults().guarded(None, interrupted)


@pytest.mark.parametrize("params", [["no", "mapping"], "text", 5])
def test_params_that_are_no_mapping_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequest, match="names with values"):
        RequestParams.of(params, retention="standard", kind="")
