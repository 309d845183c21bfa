"""The local socket against whatever bytes: typed errors, bounded memory, nobody else disturbed."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import protocol as p
from blobstore.clients import Client
from blobstore.errors import BY_CODE
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, count_right, opaque, put
from tests.support.daemon import Daemon, daemon
from tests.support.fuzz import REQUESTS, Fuzzer
from tests.support.polling import poll_until
from tests.support.puppet import Puppet
from tests.support.raw_client import HungUp, RawClient

SMALL = opaque(64 * KIB + 1)
KEYS = chain(SMALL, 1, 4)
N_FRAMES = 2000
RSS_GROWTH_MAX = 64 * MIB


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all of it."""
    with daemon(tmp_path_factory.mktemp("fuzzed")) as run:
        yield run


@pytest.fixture
def raw(run: Daemon) -> Iterator[RawClient]:
    with RawClient(run.socket) as raw:
        raw.ask(p.Declare(SMALL.encode()))
        yield raw


@pytest.fixture
def bystander(run: Daemon) -> Iterator[Puppet]:
    """Another process, with a lease and an open writer, whom nothing of this may concern."""
    with Puppet(run.address) as puppet:
        puppet.do("put", MIB, 7, 4)
        assert puppet.do("lease", MIB, 7, 4) == 4
        assert puppet.do("reserve", MIB, 8, 2) == [""] * 2
        yield puppet
        assert puppet.do("views_right", MIB, 7, 4)
        puppet.do("fill", 0x11)
        assert puppet.do("seal")["results"] == ["stored"] * 2
        with Client(run.address) as kv:
            namespace = opaque(MIB)
            kv.drop(kv.namespace(namespace), chain(namespace, 8, 1))


def rss_anon(run: Daemon) -> int:
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * KIB


def errors_are_typed(run: Daemon) -> None:
    """Nothing that came in was a surprise to the daemon."""
    assert run.process.poll() is None, run.said
    assert "Traceback" not in run.said, run.said
    assert "failed" not in run.said, run.said
    assert run.said.count("\n") < 100


def barrier(raw: RawClient) -> Counter[str]:
    """Codes of all errors that come before the answer to a ping of our own."""
    codes: Counter[str] = Counter()
    raw.send(raw.frame(p.Ping(b"barrier"), 77))
    while True:
        request_id, _, reply = raw.hear()
        if isinstance(reply, p.Pong) and (request_id, reply.payload) == (77, b"barrier"):
            return codes
        if isinstance(reply, p.Failed):
            codes[reply.code] += 1


def test_random_and_mutated_frames(run: Daemon, bystander: Puppet) -> None:
    rng = random.Random(11)
    before = rss_anon(run)
    codes: Counter[str] = Counter()
    connection: RawClient | None = None
    with Client(run.address) as kv:
        put(kv, SMALL, KEYS)
        for number in range(N_FRAMES):
            if connection is None:
                connection = RawClient(run.socket)
                fuzzer = Fuzzer(number, connection.boot_id, SMALL, KEYS)
            try:
                if rng.random() < 0.2:
                    connection.send(fuzzer.broken_frame())
                    connection.close()
                    connection = None
                else:
                    connection.send(fuzzer.whole_frame())
                    codes += barrier(connection)
            except HungUp:
                assert connection is not None
                connection.close()
                connection = None
                codes["hung up"] += 1
            if number % 200 == 0:
                assert kv.ping()
                assert bystander.do("get", MIB, 7, 4) == 4
    if connection is not None:
        connection.close()
    assert codes["error"] == 0
    assert min(codes[code] for code in ("invalid_request", "stale_boot", "hung up")) > 10, codes
    assert rss_anon(run) - before < RSS_GROWTH_MAX
    errors_are_typed(run)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_absurd_fields_of_every_message_get_typed_answers(
    run: Daemon, raw: RawClient, bystander: Puppet, kind: type[p.Request]
) -> None:
    fuzzer = Fuzzer(REQUESTS.index(kind), raw.boot_id, SMALL, KEYS)
    for _ in range(150):
        raw.send(raw.frame(fuzzer.request(kind)))
        assert barrier(raw).keys() <= BY_CODE.keys() - {"error"}
    errors_are_typed(run)


def keyed(kind: type[Any], *fields: object, keys: bytes = KEYS.packed, size: int = 32) -> p.Request:
    """A message of this kind about our keys."""
    request: p.Request = kind(SMALL.id, keys, size, *fields)
    return request


ABSURD = [
    *(keyed(p.Get, seconds) for seconds in (math.nan, math.inf, -1.0, -0.001, 1e300)),
    *(keyed(p.Pin, seconds) for seconds in (math.nan, -1.0)),
    p.Verify(math.nan),
    p.Verify(-1.0),
    *(keyed(p.Match, size=size) for size in (0, 1, 7, 33, 65, 2**63)),
    keyed(p.Match, keys=b""),
    keyed(p.Match, keys=KEYS.packed[:-1]),
    keyed(p.Drop, "moon"),
    keyed(p.Reserve, b"", 0, "eternal", 0.0),
    keyed(p.Reserve, b"", 0, "", 0.0),
    keyed(p.Reserve, b"", 2**63, "standard", 0.0),
    keyed(p.Reserve, b"", SMALL.tokens_per_blob, "standard", 0.0),
    keyed(p.Reserve, b"", 0, "standard", math.nan),
    keyed(p.Reserve, KEYS[0], 0, "standard", 0.0),
    keyed(p.Reserve, b"", 0, "standard", 0.0, keys=KEYS[0] * 2),
    keyed(p.Reserve, b"", 0, "standard", 0.0, "group", 2**63, [2**63]),
    keyed(p.Reserve, b"", 0, "standard", 0.0, "group", 0, [0, 1]),
    keyed(p.Reserve, b"", 0, "standard", 0.0, "", 0, [], {}, b"123"),
    keyed(p.Reserve, b"", 0, "standard", 0.0, "", 0, [], {}, bytes(400_000)),
    keyed(p.Reserve, b"", 0, "standard", 0.0, "", 0, [], {}, b"", "x" * ((1 << 20) + 1)),
    keyed(p.Forget, keys=b""),
    p.Declare(SMALL.encode(), {"text": "always"}),
    p.Declare(SMALL.encode(), {"texts": "off"}),
    p.Seal(2**63),
    p.Abort(2**63),
    p.SealParts(2**63, 0, [0]),
    p.Wait(2**63, 0, 0, 1, 0.0),
    p.Declare(b""),
    p.Declare(bytes(1000)),
    p.Declare(SMALL.encode() + b"\0"),
    p.Hello(p.VERSION, "again"),
]


@pytest.mark.parametrize("number", range(len(ABSURD)))
def test_an_absurd_field_is_the_callers_fault_and_named(
    run: Daemon, raw: RawClient, number: int
) -> None:
    reply = raw.ask(ABSURD[number])
    assert isinstance(reply, p.Failed), (ABSURD[number], reply)
    assert reply.code in ("invalid_request", "size_mismatch"), reply
    assert reply.message
    assert isinstance(raw.ask(p.Ping()), p.Pong)
    errors_are_typed(run)


def reserve_one(raw: RawClient, seed: int) -> tuple[int, int]:
    """Reservation and offset of one blob lent to `raw`."""
    key = chain(SMALL, seed, 1)[0]
    reserved = raw.ask(p.Reserve(SMALL.id, key, 32, b"", 0, "standard", 5.0))
    assert isinstance(reserved, p.Reserved)
    assert reserved.reasons == [""]
    return reserved.reservation_id, int(np.frombuffer(reserved.extents, "<u8")[0])


def test_what_others_hold_cannot_be_sealed_aborted_released_or_waited_for(tmp_path: Path) -> None:
    """Ids are small numbers: those of other processes are easily guessed."""
    with (
        daemon(tmp_path) as run,
        RawClient(run.socket) as raw,
        Puppet(run.address) as puppet,
        Client(run.address) as kv,
    ):
        raw.ask(p.Declare(SMALL.encode()))
        puppet.do("put", MIB, 7, 4)
        assert puppet.do("lease", MIB, 7, 4) == 4
        assert puppet.do("reserve", MIB, 9, 2) == [""] * 2
        before = kv.stats()
        own, _ = reserve_one(raw, 50)
        for guess in range(own + 50):
            if guess == own:
                continue
            for request in (p.SealParts(guess, 0, [0]), p.Seal(guess), p.Abort(guess)):
                reply = raw.ask(request)
                assert isinstance(reply, p.Failed), request
                assert reply.code == "invalid_request"
            assert isinstance(raw.ask(p.Wait(guess, 0, 0, 1, 0.0)), p.Failed)
        every = list(range(2000))
        assert raw.ask(p.Release(every, [offset * 4096 for offset in every])) == p.Done(0)
        connections = [number for number in range(1, 200) if number != raw.welcome.connection_id]
        assert raw.ask(p.Holding(connections, [], [], [])) == p.Done(0)
        assert raw.ask(p.Abort(own)) == p.Done(1)
        after = kv.stats()
        assert all(after[name] == before[name] for name in ("leases", "reservations", "lent_bytes"))
        assert puppet.do("views_right", MIB, 7, 4)
        puppet.do("fill", 0x22)
        assert puppet.do("seal")["results"] == ["stored"] * 2
        errors_are_typed(run)


def test_absurd_parts_and_extents_of_ones_own_reservation(run: Daemon, raw: RawClient) -> None:
    reservation_id, offset = reserve_one(raw, 60)
    for request in (
        p.SealParts(reservation_id, 2**63, [0]),
        p.SealParts(reservation_id, 1, [0]),
        p.SealParts(reservation_id, 0, [1]),
        p.SealParts(reservation_id, 0, [2**63]),
    ):
        reply = raw.ask(request)
        assert isinstance(reply, p.Failed), request
        assert reply.code == "invalid_request"
    sealed = raw.ask(p.Seal(reservation_id, [b"\0" * 5] * 9, [0, 0, 1, 2**63]))
    assert isinstance(sealed, p.Sealed)
    assert sealed.results == ["stored"]
    assert raw.ask(p.Release([], [offset, offset, offset + 1, 2**63])) == p.Done(1)
    again = raw.ask(p.Seal(reservation_id))
    assert isinstance(again, p.Failed)
    errors_are_typed(run)


def test_half_frames_wait_for_nobody(run: Daemon) -> None:
    """Each keeps its bytes and no more; the connections end with those who opened them."""
    with RawClient(run.socket) as raw:
        whole = raw.frame(p.Ping(b"x" * MIB))
    before = rss_anon(run)
    halves = [RawClient(run.socket) for _ in range(50)]
    for half in halves:
        half.send(whole[: len(whole) // 3])
    with Client(run.address) as kv:
        assert kv.ping()
        own = chain(SMALL, 70, 4)
        assert put(kv, SMALL, own) == ["stored"] * 4
        assert count_right(kv, SMALL, own) == 4
        assert rss_anon(run) - before < RSS_GROWTH_MAX
        for half in halves:
            half.close()
        poll_until(lambda: kv.stats()["clients"] == 1)
    errors_are_typed(run)


def test_a_client_that_never_reads_is_not_answered_without_bound(run: Daemon) -> None:
    before = rss_anon(run)
    with RawClient(run.socket, timeout_s=0.5) as deaf, Client(run.address) as kv:
        question = deaf.frame(p.Ping(b"x" * (256 * KIB)))
        with suppress(TimeoutError):
            for _ in range(1000):
                deaf.send(question)
        assert kv.ping()
        assert rss_anon(run) - before < RSS_GROWTH_MAX
    errors_are_typed(run)
