"""Chunks between the engine's rows and a real store; and a store that is not there, or hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from blobstore.clients import Client, Hint, KVLayout, Namespace
from blobstore.clients.bound import BoundNamespace
from blobstore.clients.vllm.breaker import Breaker
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.request_params import RequestParams
from blobstore.clients.vllm.tier_chunks import Chunk
from blobstore.clients.vllm.tier_store import HOLES_MAX, TierStore
from tests.support.served_store import ServedStore, served_store

T = TypeVar("T")

ROW_BYTES = 8192
N_ROWS = 16
TIMEOUT_S = 5.0
NO_PARAMS = RequestParams()


def key(number: int) -> bytes:
    return bytes([number]) * 32 + bytes(4)


def chain(numbers: Sequence[int], first_row: int = 0) -> list[Chunk]:
    """Chunks with these numbers: each continues the one with the number before."""
    return [
        Chunk(key(n), first_row + at, key(n - 1) if n else None) for at, n in enumerate(numbers)
    ]


def roots(numbers: Sequence[int]) -> list[Chunk]:
    return [Chunk(key(n), at, None) for at, n in enumerate(numbers)]


def namespace(nbytes: int = ROW_BYTES) -> BoundNamespace:
    return BoundNamespace(
        Namespace(model="tier", layout=KVLayout.opaque(nbytes), hash_scheme="vllm/test")
    )


class Engine:
    """Host memory cut into rows, as a primary tier has it."""

    def __init__(self, row_bytes: int = ROW_BYTES) -> None:
        self.memory = np.zeros((N_ROWS, row_bytes), np.uint8)

    def row(self, number: int) -> memoryview:
        return memoryview(self.memory[number])

    def fill(self, rows: int = N_ROWS) -> None:
        for number in range(rows):
            self.memory[number] = np.arange(self.memory.shape[1]) % 251 + number


def tier_store(daemon: Any, engine: Engine, recorder: Recorder, **others: Any) -> TierStore:
    ns = others.pop("ns", namespace(engine.memory.shape[1]))
    return TierStore(daemon, lambda: ns, engine.row, recorder, TIMEOUT_S, TIMEOUT_S, **others)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "socket") as served:
        yield served


@pytest.fixture
def daemon(served: ServedStore) -> Iterator[Daemon]:
    daemon = Daemon(served.address, partial(Client, served.address))
    yield daemon
    daemon.close()


def test_chunks_come_back_into_other_rows_and_touch_no_more(daemon: Daemon) -> None:
    recorder, writer, reader = Recorder(), Engine(), Engine()
    writer.fill()
    keys = [key(n) for n in range(4)]
    store = tier_store(daemon, writer, recorder)
    assert store.held(keys) == [False] * 4
    assert store.save(chain(range(4)), NO_PARAMS) == keys
    other = tier_store(daemon, reader, recorder)
    assert other.held([*keys, key(9)]) == [True] * 4 + [False]
    assert other.load(chain([1, 2, 3], first_row=8), NO_PARAMS) == keys[1:]
    assert np.array_equal(reader.memory[8:11], writer.memory[1:4])
    assert not reader.memory[:8].any()
    assert not reader.memory[11:].any()
    assert recorder.take() is None


def test_chunks_are_chains_where_what_they_continue_is_held(daemon: Daemon) -> None:
    engine, recorder = Engine(), Recorder()
    store = tier_store(daemon, engine, recorder)
    store.save(chain([0, 1]), NO_PARAMS)
    store.save(chain([2, 3]), NO_PARAMS)
    assert store.save(chain([8, 9]), NO_PARAMS) == [key(8), key(9)]
    client = daemon.reach()
    assert client is not None
    facts = client.stat(namespace(), [key(n) for n in (0, 1, 2, 3, 8, 9)])
    parents = [fact["parent"] for fact in facts]
    assert parents == ["", *(key(n).hex() for n in (0, 1, 2)), "", key(8).hex()]


def test_what_is_held_is_not_written_again(daemon: Daemon) -> None:
    writer, recorder = Engine(), Recorder()
    writer.fill()
    store = tier_store(daemon, writer, recorder)
    store.save(roots([1]), NO_PARAMS)
    before = writer.memory.copy()
    writer.memory[:] = 7
    assert store.save(chain([0, 1, 2]), NO_PARAMS) == [key(0), key(1), key(2)]
    reader = Engine()
    assert tier_store(daemon, reader, recorder).load(roots([1]), NO_PARAMS) == [key(1)]
    assert np.array_equal(reader.memory[0], before[0])


def test_a_chunk_that_is_gone_leaves_the_others(daemon: Daemon) -> None:
    writer, reader, recorder = Engine(), Engine(), Recorder()
    writer.fill()
    tier_store(daemon, writer, recorder).save(roots([0, 1, 2, 3]), NO_PARAMS)
    client = daemon.reach()
    assert client is not None
    assert client.drop(namespace(), [key(1)]) == 1
    loaded = tier_store(daemon, reader, recorder).load(roots([0, 1, 2, 3]), NO_PARAMS)
    assert loaded == [key(0), key(2), key(3)]
    assert np.array_equal(reader.memory[2:4], writer.memory[2:4])
    assert recorder.take() == {"misses": {"absent": 1}}


def test_a_load_of_holes_ends(daemon: Daemon) -> None:
    engine, recorder = Engine(), Recorder()
    store = tier_store(daemon, engine, recorder)
    store.save([Chunk(key(15), 15, None)], NO_PARAMS)
    assert HOLES_MAX < 14
    assert store.load(roots(range(N_ROWS)), NO_PARAMS) == []
    assert recorder.take() == {"misses": {"absent": N_ROWS}}


def test_what_does_not_fit_is_not_stored_and_counted(daemon: Daemon) -> None:
    engine, recorder = Engine(row_bytes=24 << 20), Recorder()  # the arena has 16 MiB
    store = tier_store(daemon, engine, recorder)
    assert store.save(roots([0, 1]), NO_PARAMS) == []
    assert recorder.take() == {"unsaved_blobs": {"refused": 2}}


def test_params_reach_the_store(daemon: Daemon) -> None:
    store = tier_store(daemon, Engine(), Recorder())
    assert store.save(roots([0]), RequestParams(retention="volatile")) == [key(0)]
    client = daemon.reach()
    assert client is not None
    (facts,) = client.stat(namespace(), [key(0)])
    assert facts["retention"] == "volatile"


def test_what_is_to_live_longer_is_pinned_and_hints_go_along() -> None:
    class Listening(Hung):
        def exists(self, ns: object, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
            return [True, False]

        def put_from(self, *call: Any, timeout_s: float, **terms: Any) -> list[str]:
            self.calls.append(terms["hint"].session)
            return ["stored"]

        def pin(self, ns: object, keys: list[bytes], ttl_s: float, *, timeout_s: float) -> None:
            self.calls.append(f"{len(keys)} for {ttl_s}")

    listening = Listening()
    store = tier_store(listening, Engine(), Recorder())
    params = RequestParams(ttl_s=60.0, hint=Hint(session="s"))
    assert store.save(roots([0, 1]), params) == [key(0), key(1)]
    assert listening.calls == ["s", "2 for 60.0"]


def test_a_durable_put_that_fails_is_no_exception(daemon: Daemon) -> None:
    engine, recorder = Engine(row_bytes=24 << 20), Recorder()
    store = tier_store(daemon, engine, recorder)
    assert store.save(roots([0]), RequestParams(retention="durable")) == []
    assert recorder.take() == {"unsaved_blobs": {"full": 1}}


def test_a_daemon_that_is_not_there_is_a_miss_and_asked_seldom(tmp_path: Path) -> None:
    attempts = []

    def connect() -> Client:
        attempts.append(1)
        return Client(f"unix:{tmp_path}/nobody", timeout_s=0.0)

    recorder, now_s = Recorder(), 0.0
    daemon = Daemon("unix:nobody", connect, Breaker(lambda: now_s))
    store = tier_store(daemon, Engine(), recorder)
    assert store.held([key(0), key(1)]) == [False, False]
    assert store.load(roots([0]), NO_PARAMS) == []
    assert store.save(roots([0]), NO_PARAMS) == []
    assert len(attempts) == 1
    data = recorder.take()
    assert data == {"misses": {"unavailable": 3}, "unsaved_blobs": {"unavailable": 1}}
    now_s = 10.0
    store.held([key(0)])
    assert len(attempts) == 2


def test_without_an_identity_nothing_is_asked() -> None:
    class Untouched:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    recorder = Recorder()
    store = tier_store(Untouched(), Engine(), recorder, ns=None)
    assert store.held([key(0)]) == [False]
    assert store.load(roots([0]), NO_PARAMS) == []
    assert store.save(roots([0]), NO_PARAMS) == []
    assert recorder.take() == {"misses": {"unnamed": 2}, "unsaved_blobs": {"unnamed": 1}}


class Hung:
    """A daemon and its client: every call takes all the time that it has, for nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []
        self.noted: list[str] = []

    def reach(self) -> Any:
        return self

    def note(self, reason: str) -> None:
        self.noted.append(reason)

    def exists(self, ns: object, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        return self._take("exists", timeout_s, [False] * len(keys))

    def get_into(self, *call: object, hint: object, timeout_s: float) -> int:
        return self._take("get_into", timeout_s, 0)

    def put_from(self, *call: Any, timeout_s: float, **terms: object) -> list[str]:
        return self._take("put_from", timeout_s, ["refused"] * len(call[1]))

    def _take(self, verb: str, timeout_s: float, nothing: T) -> T:
        self.calls.append(verb)
        self.now_s += timeout_s
        return nothing


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (lambda store: store.held([key(0), key(1)]), "exists"),
        (lambda store: store.load(roots(range(8)), NO_PARAMS), "get_into"),
        (lambda store: store.save(roots(range(8)), NO_PARAMS), "exists"),
    ],
)
def test_a_daemon_that_hangs_is_waited_for_once(
    call: Callable[[TierStore], list[Any]], verb: str
) -> None:
    hung, recorder = Hung(), Recorder()
    assert not any(call(tier_store(hung, Engine(), recorder, clock=lambda: hung.now_s)))
    assert hung.calls == [verb]
    assert hung.noted == ["deadline"]
    data = recorder.take() or {}
    assert [set(by_reason) for by_reason in data.values()] == [{"deadline"}]


def test_a_store_that_hangs_between_two_runs_is_waited_for_once() -> None:
    hung, recorder = Hung(), Recorder()
    hung.exists = lambda ns, keys, *, timeout_s: [False] * len(keys)  # type: ignore[method-assign]
    store = tier_store(hung, Engine(), recorder, clock=lambda: hung.now_s)
    assert store.save(roots(range(8)), NO_PARAMS) == []
    assert hung.calls == ["put_from"]
    assert recorder.take() == {"unsaved_blobs": {"deadline": 8}}


def test_a_store_that_is_stopping_moves_nothing_more(daemon: Daemon) -> None:
    recorder = Recorder()
    store = tier_store(daemon, Engine(), recorder)
    store.save(roots([0]), NO_PARAMS)
    store.stopping = True
    assert store.load(roots([0]), NO_PARAMS) == []
    assert store.save(roots([0, 1]), NO_PARAMS) == [key(0)]
    assert recorder.take() == {"misses": {"stopped": 1}, "unsaved_blobs": {"stopped": 1}}
