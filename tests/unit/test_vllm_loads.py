"""Loads of a worker: into the blocks of their request, and each ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.loads import THREADS, WINDOW_BYTES, Ended, Loads, _Run
from blobstore.clients.vllm.metadata import Load
from blobstore.clients.vllm.recorder import LOADED, LOADED_BYTES, MISSED, Recorder
from tests.support.clock import FakeClock
from tests.support.polling import poll_until
from tests.support.served_store import served_store
from tests.support.vllm_fakes import (
    BLOB_BYTES,
    FakeCopies,
    FakeDaemon,
    FakeIdentity,
    block_hashes,
    content,
)

TOKENS = list(range(32))
BLOBS = 4
TIMEOUT_S = 5.0
BLOBS_A_WINDOW = WINDOW_BYTES // BLOB_BYTES
OTHERS = b"another request's"


class Bench:
    """A worker's loads over a client, or none. The store holds TOKENS."""

    def __init__(self, client: Client | None) -> None:
        self.clock = FakeClock()
        self.identity = FakeIdentity()
        self.ns = self.identity.bound()
        self.keys = self.identity.keys(block_hashes(TOKENS))
        self.copies = FakeCopies()
        self.copies.blocks = dict.fromkeys(range(1, 20), OTHERS)
        self.client = client
        self.daemon = FakeDaemon(client)
        self.recorder = Recorder()
        daemon: Any = self.daemon
        self.loads = Loads(
            self.identity, daemon, self.recorder, Faults(), timeout_s=TIMEOUT_S, clock=self.clock
        )
        if client is not None:
            self.put(client)

    def put(self, client: Client) -> None:
        payloads = [content(TOKENS, 2 * n) + content(TOKENS, 2 * n + 1) for n in range(BLOBS)]
        assert client.put_from(self.ns, self.keys, payloads) == ["stored"] * BLOBS

    def load(self, first: int = 0, end: int = BLOBS, **fields: Any) -> Load:
        told: dict[str, Any] = {"skip": 0, "hint": {}, "stream": False} | fields
        blocks = list(range(1 + 2 * first, 1 + 2 * end))
        keys = self.keys[first:end].packed
        return Load("r", self.ns.namespace.encode(), keys, 32, blocks=[blocks], **told)

    def run(self, *loads: Load) -> list[Ended]:
        copies: Any = self.copies
        self.loads.start(loads, copies)
        return self.ended(len(loads))

    def ended(self, n: int) -> list[Ended]:
        """So many loads, once they have ended."""
        ended: list[Ended] = []

        def all_ended() -> bool:
            ended.extend(self.loads.take())
            return len(ended) >= n

        poll_until(all_ended)
        return ended

    def blocks(self) -> dict[int, bytes]:
        """Those that were written."""
        return {block: each for block, each in self.copies.blocks.items() if each != OTHERS}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        made = Bench(client)
        yield made
        made.loads.close(5.0)


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_hold_what_their_tokens_dictate(bench: Bench, stream: bool) -> None:
    assert bench.run(bench.load(stream=stream)) == [Ended("r", 4, whole=True)]
    assert bench.blocks() == {block + 1: content(TOKENS, block) for block in range(8)}
    data = bench.recorder.take()
    assert data is not None
    assert (data[LOADED], data[LOADED_BYTES]) == ({"": 32}, {"": BLOBS * BLOB_BYTES})


def test_blocks_before_the_first_token_are_left_alone(bench: Bench) -> None:
    """They are the engine's own hit, and other requests read them."""
    assert bench.run(bench.load(1, 3, skip=4)) == [Ended("r", 2, whole=True)]
    assert bench.blocks() == {block + 1: content(TOKENS, block) for block in range(3, 6)}
    data = bench.recorder.take()
    assert data is not None
    assert data[LOADED] == {"": 12}


def test_what_was_evicted_meanwhile_fails_and_says_how_far_it_came(bench: Bench) -> None:
    assert bench.client is not None
    bench.client.drop(bench.ns, bench.keys[2:])
    assert bench.run(bench.load()) == [Ended("r", 2, whole=False)]
    assert set(bench.blocks()) == {1, 2, 3, 4}
    data = bench.recorder.take()
    assert data is not None
    assert data[MISSED] == {"absent": 1}


def test_blobs_come_from_ssd(bench: Bench) -> None:
    assert bench.client is not None
    poll_until(lambda: bench.client and bench.client.drop(bench.ns, bench.keys, "dram") == BLOBS)
    assert bench.run(bench.load(stream=True)) == [Ended("r", 4, whole=True)]
    assert bench.blocks() == {block + 1: content(TOKENS, block) for block in range(8)}


def test_without_a_daemon_a_load_ends_at_once() -> None:
    bench = Bench(None)
    assert bench.run(bench.load()) == [Ended("r", 0, whole=False)]
    assert bench.recorder.take() == {MISSED: {"unavailable": 1}}
    bench.loads.close(5.0)


def test_a_load_of_nothing_fails() -> None:
    bench = Bench(None)
    assert bench.run(Load("r", b"", b"", 8, 0, (), {}, stream=False)) == [
        Ended("r", 0, whole=False)
    ]
    bench.loads.close(5.0)


def test_a_copy_that_fails_ends_the_load(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.copies.fails = True
    assert bench.run(bench.load()) == [Ended("r", 0, whole=False)]
    assert bench.recorder.take() == {MISSED: {"failed": 1}}
    assert "the device is gone" in caplog.text


def test_loads_before_the_tensors_are_known_fail(bench: Bench) -> None:
    bench.loads.start([bench.load()], None)
    assert bench.loads.take() == [Ended("r", 0, whole=False)]


def test_loads_after_the_end_fail(bench: Bench) -> None:
    bench.loads.close(5.0)
    assert bench.run(bench.load()) == [Ended("r", 0, whole=False)]


def test_each_of_many_loads_ends_once(bench: Bench) -> None:
    loads = [bench.load(n % BLOBS, n % BLOBS + 1) for n in range(40)]
    for n, load in enumerate(loads):
        load.request_id = f"r{n}"
    ended = bench.run(*loads)
    assert sorted(each.request_id for each in ended) == sorted(f"r{n}" for n in range(40))
    assert bench.loads.take() == []


def test_an_idle_engine_waits_for_a_load_that_runs(bench: Bench) -> None:
    copies: Any = bench.copies
    bench.loads.start([bench.load()], copies)
    assert bench.loads.take(30.0) == [Ended("r", 4, whole=True)]
    assert bench.loads.take(30.0) == []  # none runs: it does not wait


def test_it_waits_without_a_load_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a load that may come: then the engine looks again."""
    bench, waited = Bench(None), list[float]()
    monkeypatch.setattr(bench.loads._changed, "wait", waited.append)
    assert bench.loads.take(0.5) == []
    assert waited == []
    assert bench.loads.take(0.5, anyway=True) == []
    assert waited == [0.5]
    bench.loads.close(5.0)


def test_a_load_whose_turn_comes_too_late_is_not_read() -> None:
    """A daemon that answers pings but misses deadlines holds up those before it."""
    bench, entered, go = Bench(None), threading.Semaphore(0), threading.Event()

    def reach() -> None:
        entered.release()
        assert go.wait(20.0)

    bench.daemon.reach = reach  # type: ignore[method-assign]
    copies: Any = bench.copies
    bench.loads.start([bench.load() for _ in range(THREADS)], copies)
    for _ in range(THREADS):
        assert entered.acquire(timeout=20.0)
    bench.loads.start([bench.load()], copies)
    bench.clock.advance(TIMEOUT_S + 0.1)
    go.set()
    assert bench.ended(THREADS + 1) == [Ended("r", 0, whole=False)] * (THREADS + 1)
    assert bench.recorder.take() == {MISSED: {"unavailable": THREADS, "deadline": 1}}
    assert not entered.acquire(blocking=False)
    bench.loads.close(5.0)


@pytest.mark.parametrize(
    ("late_s", "blobs", "may_fail", "in_time"),
    [
        (TIMEOUT_S, BLOBS, True, True),
        (TIMEOUT_S + 0.1, BLOBS, True, False),
        (TIMEOUT_S + 0.1, BLOBS, False, True),
        (4 * TIMEOUT_S, 3 * BLOBS_A_WINDOW, True, True),
        (4 * TIMEOUT_S + 0.1, 3 * BLOBS_A_WINDOW, True, False),
    ],
)
def test_a_load_may_be_as_late_as_it_is_long(
    late_s: float, blobs: int, may_fail: bool, in_time: bool
) -> None:
    bench = Bench(None)
    bench.loads._may_fail = may_fail
    load = replace(bench.load(), keys=bytes(32 * blobs), key_bytes=32)
    copies: Any = bench.copies
    run = _Run(load, copies, None, bench.clock())
    bench.clock.advance(late_s)
    assert bench.loads._in_time(run) == in_time
    bench.loads.close(5.0)


class SlowLease(list[bytes]):
    """Each of its blobs takes two seconds to come."""

    reason = "deadline"

    def __init__(self, clock: FakeClock, blobs: int) -> None:
        super().__init__([bytes(BLOB_BYTES)] * blobs)
        self._clock = clock
        self.waits: list[float] = []

    def __enter__(self) -> SlowLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """It may be looked at still."""

    def wait(self, number: int, *, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self._clock.advance(min(2.0, timeout_s))
        return timeout_s >= 2.0


def test_all_blobs_of_a_window_share_a_deadline() -> None:
    bench = Bench(None)
    first, second = SlowLease(bench.clock, BLOBS), SlowLease(bench.clock, 0)
    leases = [first, second]

    class SlowClient:
        def get(self, *args: Any, **kwargs: Any) -> SlowLease:
            bench.clock.advance(1.0)
            return leases.pop(0)

    bench.daemon.client = SlowClient()
    assert bench.run(bench.load(stream=True)) == [Ended("r", 2, whole=False)]
    assert first.waits == [TIMEOUT_S - 1.0, TIMEOUT_S - 3.0, TIMEOUT_S - 5.0]
    assert bench.recorder.take() == {MISSED: {"deadline": 1}}
    bench.loads.close(5.0)


def test_a_load_that_fails_after_its_last_blob_promises_less(bench: Bench) -> None:
    """Else it would be asked for again, to the letter, for ever."""

    def note(reason: str) -> None:
        raise RuntimeError("nobody listens")

    bench.daemon.note = note  # type: ignore[method-assign]
    assert bench.run(bench.load()) == [Ended("r", BLOBS - 1, whole=False)]
