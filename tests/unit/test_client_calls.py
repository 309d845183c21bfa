"""What each call returns, and what it returns when something is wrong: for both clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import BoundNamespace, Hit, KVLayout, Namespace, operations
from blobstore.clients.windows import windows
from blobstore.errors import FrameTooLarge, InvalidRequest, Unavailable
from blobstore.protocol import (
    KEYS_MAX,
    Declare,
    Done,
    Drop,
    Exists,
    Failed,
    Get,
    Match,
    Matched,
    Pin,
    Ping,
    Prefetch,
    Report,
    Request,
    Reserve,
    Stat,
    Stats,
    Verify,
)
from tests.support.both_clients import KINDS, connect
from tests.support.scripted_daemon import ScriptedDaemon

NBYTES = 5000
NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES), tokens_per_blob=16)
KEYS = NAMESPACE.keys(range(16 * 4))
EVERY_KIND = (Ping, Declare, Match, Get, Reserve, Exists, Drop, Pin, Prefetch, Stat, Stats, Verify)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        yield daemon


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, daemon: ScriptedDaemon) -> Iterator[Any]:
    with connect(request.param, daemon.address, timeout_s=5.0) as kv:
        yield kv


@pytest.fixture
def ns(kv: Any) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(NAMESPACE)
    return bound


def store(daemon: ScriptedDaemon, n: int) -> None:
    for number, key in enumerate(KEYS[:n]):
        daemon.store(NAMESPACE, key, bytes([number]) * NBYTES)


def every_call(kv: Any, ns: BoundNamespace) -> dict[str, Any]:
    """What all calls return, for comparison after a fault."""
    lease = kv.get(ns, KEYS)
    with kv.put(ns, KEYS[:2]) as writer:
        writer[0][:] = b"x" * NBYTES
    return {
        "ping": kv.ping(),
        "match": kv.match(ns, KEYS).blobs,
        "match reason": kv.match(ns, KEYS).reason,
        "get": len(lease),
        "get reason": lease.reason,
        "put": writer.results,
        "put reasons": writer.reasons,
        "get_into": kv.get_into(ns, KEYS, [bytearray(NBYTES) for _ in KEYS]),
        "put_from": kv.put_from(ns, KEYS, [bytes(NBYTES)] * len(KEYS)),
        "exists": kv.exists(ns, KEYS),
        "drop": kv.drop(ns, KEYS),
        "pin": kv.pin(ns, KEYS, 1.0),
        "prefetch": kv.prefetch(ns, KEYS),
        "stat": kv.stat(ns, KEYS),
        "stats": kv.stats(),
        "verify": kv.verify(),
    }


def all_missed(reason: str) -> dict[str, Any]:
    return {
        "ping": False,
        "match": 0,
        "match reason": reason,
        "get": 0,
        "get reason": reason,
        "put": ["refused"] * 2,
        "put reasons": [reason] * 2,
        "get_into": 0,
        "put_from": ["refused"] * 4,
        "exists": [False] * 4,
        "drop": 0,
        "pin": 0,
        "prefetch": 0,
        "stat": [],
        "stats": {"reason": reason},
        "verify": {"reason": reason},
    }


def test_ping_says_that_the_daemon_answers(kv: Any) -> None:
    assert kv.ping() is True


def test_match_counts_leading_blobs_and_their_tokens(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    store(daemon, 3)
    daemon.script[Match] = lambda request: Matched(3, 2, 0.25)
    hit = kv.match(ns, KEYS)
    assert (hit.blobs, hit.tokens, hit.eta_s, hit.reason) == (3, 48, 0.25, "")
    assert hit.tiers == ("dram", "dram", "ssd")


def test_match_of_a_tail_counts_its_tokens_only(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    keys = ns.keys(range(16 * 2 + 5), tail=True)
    for key in keys:
        daemon.store(NAMESPACE, key, b"x" * NBYTES)
    assert kv.match(ns, keys).tokens == 37
    assert kv.match(ns, keys[:2]).tokens == 32


def test_exists_drop_pin_and_prefetch_count(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    store(daemon, 2)
    assert kv.exists(ns, KEYS) == [True, True, False, False]
    assert kv.pin(ns, KEYS, 30.0) == 2
    assert kv.prefetch(ns, KEYS) == 2
    assert kv.drop(ns, KEYS[1:], "dram") == 1
    (drop,) = daemon.seen(Drop)
    assert isinstance(drop, Drop)
    assert drop.tier == "dram"
    (pin,) = daemon.seen(Pin)
    assert isinstance(pin, Pin)
    assert pin.ttl_s == 30.0


def test_reports_come_as_plain_values(daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace) -> None:
    store(daemon, 2)
    assert kv.stat(ns, KEYS) == [{"nbytes": NBYTES}] * 2
    assert kv.stats() == {"blobs": 2}
    assert kv.verify() == {"blobs": 2}


def test_no_keys_take_no_round_trip(daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace) -> None:
    before = len(daemon.requests)
    assert kv.match(ns, []) == Hit(0, 0)
    assert len(kv.get(ns, [])) == 0
    with kv.put(ns, []) as writer:
        assert len(writer) == 0
    assert writer.results == []
    assert kv.get_into(ns, [], []) == 0
    assert kv.put_from(ns, [], []) == []
    assert kv.exists(ns, []) == []
    assert kv.stat(ns, []) == []
    assert kv.drop(ns, []) == kv.pin(ns, [], 1.0) == kv.prefetch(ns, []) == 0
    assert len(daemon.requests) == before


def test_keys_of_an_engine_are_taken_as_they_are(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    daemon.store(NAMESPACE, b"8 bytes!", b"x" * NBYTES)
    assert kv.match(ns, [b"8 bytes!", b"others!!"]).blobs == 1


def test_the_callers_mistakes_raise(kv: Any, ns: BoundNamespace) -> None:
    with pytest.raises(InvalidRequest, match="keys are a list"):
        kv.match(ns, b"not a list")
    with pytest.raises(InvalidRequest, match="7 bytes"):
        kv.exists(ns, [b"7 bytes"])
    with pytest.raises(InvalidRequest, match="timeout_s"):
        kv.match(ns, KEYS, timeout_s=-1)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        kv.ping(timeout_s=float("nan"))
    with pytest.raises(InvalidRequest, match="'hbm'"):
        kv.prefetch(ns, KEYS, "hbm")
    with pytest.raises(InvalidRequest, match="parent"):
        kv.put(ns, KEYS, parent=b"short")


def test_what_the_daemon_calls_a_mistake_raises(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    daemon.script[Drop] = lambda request: Failed("invalid_request", "unknown tier 'tape'")
    with pytest.raises(InvalidRequest, match="tape"):
        kv.drop(ns, KEYS, "tape")


@pytest.mark.parametrize("kind", KINDS)
def test_more_keys_than_a_frame_holds_raise_and_harm_nothing(
    kind: str, daemon: ScriptedDaemon
) -> None:
    daemon.max_body_bytes = 1000
    with connect(kind, daemon.address) as kv:
        ns = kv.namespace(NAMESPACE)
        with pytest.raises(FrameTooLarge, match="limit of 1000"):
            kv.match(ns, NAMESPACE.keys(range(16 * 40)))
        assert kv.ping()


@pytest.mark.parametrize("code", ["busy", "full", "storage_failed", "corrupt", "error", "new_one"])
def test_a_fault_in_the_daemon_is_a_miss_with_its_code(
    code: str, daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    for kind in EVERY_KIND:
        daemon.script[kind] = lambda request: Failed(code, "as scripted")
    assert every_call(kv, ns) == all_missed("error" if code == "new_one" else code)


def test_a_dead_daemon_is_a_miss(daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace) -> None:
    daemon.stop()
    assert every_call(kv, ns) == all_missed("unavailable")
    daemon.start()
    assert kv.ping()


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_daemon_is_a_miss_by_the_deadline(kind: str, daemon: ScriptedDaemon) -> None:
    with connect(kind, daemon.address, timeout_s=0.05) as kv:
        ns = kv.namespace(NAMESPACE)
        daemon.silence(*EVERY_KIND)
        assert every_call(kv, ns) == all_missed("deadline")
        daemon.answer_late()
        assert kv.ping()


def test_a_call_that_must_not_wait_gets_what_is_there(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    store(daemon, 2)
    assert len(kv.get(ns, KEYS, timeout_s=0)) == 2
    (get,) = daemon.seen(Get)
    assert isinstance(get, Get)
    assert get.timeout_s == 0


def test_a_reply_of_the_wrong_kind_is_a_miss(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    def wrong(request: Request) -> Done | Report:
        return Report({}) if isinstance(request, Drop | Pin | Prefetch) else Done(1)

    for kind in EVERY_KIND:
        daemon.script[kind] = wrong
    assert every_call(kv, ns) == all_missed("protocol")


def test_a_closed_client_misses(kv: Any, ns: BoundNamespace) -> None:
    lease = kv.get(ns, KEYS)
    if hasattr(kv, "_client"):
        kv._run(kv._client.close())
    else:
        kv.close()
    assert len(lease) == 0
    assert every_call(kv, ns) == all_missed("unavailable")


def test_a_restarted_daemon_is_found_again_and_told_of_the_namespace(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace
) -> None:
    assert kv.boot_id == 7
    daemon.restart()
    store(daemon, 0)
    assert kv.match(ns, KEYS) == Hit(0, 0)
    assert kv.boot_id == 8
    assert ns.id in daemon.namespaces


def test_a_namespace_may_come_from_another_client(daemon: ScriptedDaemon, kv: Any) -> None:
    store(daemon, 1)
    daemon.namespaces.clear()
    assert kv.match(BoundNamespace(NAMESPACE), KEYS).blobs == 1


def test_a_namespace_is_had_without_a_daemon(daemon: ScriptedDaemon, kv: Any) -> None:
    daemon.stop()
    ns = kv.namespace(NAMESPACE)
    assert ns.id == NAMESPACE.id
    daemon.start()
    store(daemon, 1)
    daemon.namespaces.clear()
    assert kv.match(ns, KEYS).blobs == 1


def test_a_namespace_that_the_daemon_never_accepts_is_the_callers_mistake(
    daemon: ScriptedDaemon, kv: Any
) -> None:
    daemon.script[Declare] = lambda request: Failed("invalid_request", "too many parts")
    with pytest.raises(InvalidRequest, match="too many parts"):
        kv.namespace(NAMESPACE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_connection_is_made_now_or_raises(kind: str, tmp_path: Path) -> None:
    said = r"no daemon answers at .*nobody.*: start one with `blobstore serve"
    with pytest.raises(Unavailable, match=said):
        connect(kind, f"unix:{tmp_path / 'nobody'}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("address", ["", "/run/x.sock", "unix:", "tcp://x", "ftp://x"])
def test_only_addresses_of_sockets_and_http_are_taken(kind: str, address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"unix:/run/blobstore\.sock"):
        connect(kind, address)


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_does_not_fit_an_address_is_refused_with_its_length(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"107 bytes.*has 124"):
        connect(kind, "unix:/tmp/" + "x" * 119)


def test_calls_of_many_keys_are_cut_so_that_their_replies_are_bounded(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(daemon, 4)
    monkeypatch.setattr(operations, "STAT_KEYS", 2)
    monkeypatch.setattr(operations, "KEYS_MAX", 3)
    assert [facts["nbytes"] for facts in kv.stat(ns, KEYS)] == [NBYTES] * 4
    assert kv.exists(ns, KEYS) == [True] * 4
    assert kv.pin(ns, KEYS, 1.0) == 4
    assert kv.drop(ns, KEYS) == 4
    sizes = {
        kind: [len(r.keys) // r.key_bytes for r in daemon.seen(kind) if isinstance(r, kind)]
        for kind in (Stat, Exists, Pin, Drop)
    }
    assert sizes == {Stat: [2, 2], Exists: [3, 1], Pin: [3, 1], Drop: [1, 3]}


def test_a_fault_in_the_middle_of_a_cut_call_is_a_miss(
    daemon: ScriptedDaemon, kv: Any, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(daemon, 4)
    monkeypatch.setattr(operations, "STAT_KEYS", 2)
    monkeypatch.setattr(operations, "KEYS_MAX", 2)

    def second_fails(request: Request) -> Any:
        fails = len(daemon.seen(type(request))) == 2
        return Failed("busy", "") if fails else daemon.default(request)

    daemon.script[Stat] = daemon.script[Exists] = second_fails
    assert kv.stat(ns, KEYS) == []
    assert kv.exists(ns, KEYS) == [False] * 4


def test_a_window_has_no_more_keys_than_a_call_may_have() -> None:
    cut = windows([0] * (KEYS_MAX + 1), 80)
    assert cut == [range(KEYS_MAX), range(KEYS_MAX, KEYS_MAX + 1)]
