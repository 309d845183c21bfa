"""The clients' contract when the daemon dies, restarts, hangs, or has no SSD."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import (
    BoundNamespace,
    Client,
    Keys,
    KVLayout,
    LayerGroup,
    Namespace,
    Shard,
    WriterGroup,
)
from blobstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from blobstore.units import KIB
from tests.support.blobs import chain, count_right, opaque, payload_of, payloads_of, put
from tests.support.both_clients import connect, reach
from tests.support.contract import holds_nothing
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until, wait_s

NBYTES = 100 * KIB
N = 4
RESERVATION_S = 1.0


class TestRestart:
    def test_durable_blobs_outlive_a_kill_and_the_same_client_finds_them(
        self, kind: str, tmp_path: Path
    ) -> None:
        namespace = opaque(NBYTES)
        kept, lost = chain(namespace, 1, N), chain(namespace, 2, N)
        with daemon(tmp_path) as first, connect(kind, first.address, timeout_s=20.0) as kv:
            before = kv.boot_id
            ns = kv.namespace(namespace)
            assert put(kv, namespace, kept, "durable") == ["stored"] * N
            assert put(kv, namespace, lost, "volatile") == ["stored"] * N
            lease = kv.get(ns, lost)
            first.kill()
            assert_all_miss(kv, ns, kept)
            assert [bytes(view) for view in lease] == payloads_of(lost, NBYTES)
            with daemon(tmp_path) as second:
                assert second.address == first.address
                assert kv.match(ns, kept).blobs == N
                assert kv.boot_id != before
                assert kv.match(ns, kept).tiers == ("ssd",) * N
                assert count_right(kv, namespace, kept) == N
                assert kv.exists(ns, lost) == [False] * N
                assert [bytes(view) for view in lease] == payloads_of(lost, NBYTES)
                lease.release()
                assert put(kv, namespace, lost) == ["stored"] * N
                poll_until(lambda: holds_nothing(kv), 5.0)

    def test_whatever_was_open_ends_with_a_reason(self, kind: str, tmp_path: Path) -> None:
        namespace = opaque(NBYTES)
        keys, others = chain(namespace, 1, N), chain(namespace, 2, N)
        with daemon(tmp_path) as first, connect(kind, first.address, timeout_s=20.0) as kv:
            ns = kv.namespace(namespace)
            writer, durable = kv.put(ns, keys), kv.put(ns, others, retention="durable")
            streamed = kv.get(ns, others, stream=True, wait=True)
            assert len(streamed) == N
            for i in range(N):
                writer[i][:] = durable[i][:] = bytes(NBYTES)
            first.kill()
            with daemon(tmp_path):
                assert kv.ping()
                assert streamed.wait(0) is False
                assert streamed.reason in ("unavailable", "stale_boot")
                streamed.release()
                writer.seal()
                assert writer.results == ["refused"] * N
                assert set(writer.reasons) <= {"unavailable", "stale_boot"}
                with pytest.raises((Unavailable, InvalidRequest)):
                    durable.seal()
                assert kv.exists(ns, [*keys, *others]) == [False] * 2 * N
                poll_until(lambda: holds_nothing(kv), 5.0)


def assert_all_miss(kv: Any, ns: BoundNamespace, keys: Keys) -> None:
    """There is no daemon: every call says so, at once."""
    started_s = time.monotonic()
    assert (kv.match(ns, keys).blobs, kv.match(ns, keys).reason) == (0, "unavailable")
    assert (len(kv.get(ns, keys)), kv.get(ns, keys).reason) == (0, "unavailable")
    with kv.put(ns, keys) as writer:
        writer[0][:] = bytes(NBYTES)
    assert writer.reasons == ["unavailable"] * N
    assert kv.put_from(ns, keys, payloads_of(keys, NBYTES)) == ["refused"] * N
    assert kv.get_into(ns, keys, bytearray(N * NBYTES)) == 0
    assert kv.exists(ns, keys) == [False] * N
    assert (kv.drop(ns, keys), kv.pin(ns, keys, 9.0), kv.prefetch(ns, keys)) == (0, 0, 0)
    assert (kv.ping(), kv.stat(ns, keys)) == (False, [])
    assert kv.stats() == kv.verify() == {"reason": "unavailable"}
    with pytest.raises(Unavailable):
        kv.put_from(ns, keys, payloads_of(keys, NBYTES), retention="durable")
    assert time.monotonic() - started_s < 5.0


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Without SSD, and impatient."""
    environ = {"BLOBSTORE__TIMES__RESERVATION_S": str(RESERVATION_S)}
    options = ("--dram", "16MiB", "--ssd", "off", "--http", "127.0.0.1:0")
    with daemon(tmp_path_factory.mktemp("bare"), *options, environ=environ) as run:
        yield run


@pytest.fixture
def lonely(kind: str, bare: Daemon) -> Iterator[Any]:
    """A client of the daemon without SSD."""
    with reach(kind, bare, timeout_s=20.0) as kv:
        yield kv


class TestWithoutSsd:
    def test_a_durable_put_raises_and_says_what_is_missing(self, lonely: Any, model: str) -> None:
        namespace = opaque(NBYTES, model)
        ns, keys = lonely.namespace(namespace), chain(namespace, 1, N)
        writer = lonely.put(ns, keys, retention="durable")
        for i, key in enumerate(keys):
            writer[i][:] = payload_of(key, NBYTES)
        with pytest.raises(InvalidRequest, match="no SSD tier"):
            writer.seal()
        assert writer.results == ["refused"] * N
        with pytest.raises(InvalidRequest, match="no SSD tier"):
            put(lonely, namespace, keys, "durable")
        assert set(put(lonely, namespace, keys)) <= {"stored", "exists"}, "some may be held"
        assert count_right(lonely, namespace, keys) == N

    def test_blobs_live_in_dram_alone(self, lonely: Any, model: str) -> None:
        namespace = opaque(NBYTES, model)
        ns, keys = lonely.namespace(namespace), chain(namespace, 1, N)
        assert put(lonely, namespace, keys) == ["stored"] * N
        assert [blob["tiers"] for blob in lonely.stat(ns, keys)] == [["dram"]] * N
        assert set(lonely.stats()["tiers"]) == {"dram"}
        assert lonely.drop(ns, keys, "dram") == 0
        assert lonely.prefetch(ns, keys) == 0
        large = opaque(4 << 20, model)
        for seed in range(8):
            assert put(lonely, large, chain(large, seed, 1)) == ["stored"]
        assert lonely.match(ns, keys).blobs == 0


@pytest.mark.in_place
class TestImpatientDaemons:
    def test_a_put_that_takes_too_long_expires(self, lonely: Any, model: str) -> None:
        namespace = opaque(NBYTES, model)
        ns, keys = lonely.namespace(namespace), chain(namespace, 1, N)
        slow, durable = lonely.put(ns, keys[:1]), lonely.put(ns, keys[:1], retention="durable")
        with lonely.get(ns, keys[:1], stream=True, wait=True) as lease:
            assert lease.wait(0, timeout_s=10 * RESERVATION_S) is False
            assert lease.reason == "expired"
        slow[0][:] = durable[0][:] = b"s" * NBYTES
        slow.seal()
        assert (slow.results, slow.reasons) == (["refused"], ["expired"])
        poll_until(lambda: lonely.stats()["reservations"] == 0, 5.0)
        with pytest.raises(DeadlineExceeded, match="expired"):
            durable.seal()
        assert lonely.exists(ns, keys[:1]) == [False]
        assert put(lonely, namespace, keys) == ["stored"] * N

    def test_an_incomplete_assembly_expires_as_a_whole(self, lonely: Any, model: str) -> None:
        layout = KVLayout((LayerGroup.attention(layers=1, heads=2, head_size=64),), head_groups=2)
        namespace, group = Namespace(model, layout, tokens_per_blob=4), WriterGroup("engine", 1)
        keys = namespace.keys(range(4))
        ranks = [lonely.namespace(namespace, Shard(rank, 2)) for rank in range(2)]
        share = [bytes(layout.nbytes(4) // 2)]
        used = lonely.stats()["tiers"]["dram"]["used_bytes"]
        assert lonely.put_from(ranks[0], keys, share, group=group) == ["partial"]
        assert lonely.stats()["tiers"]["dram"]["used_bytes"] > used
        poll_until(lambda: lonely.stats()["tiers"]["dram"]["used_bytes"] <= used, 5.0)
        assert lonely.put_from(ranks[1], keys, share, group=group) == ["partial"]
        assert lonely.exists(ranks[1], keys) == [False]
        assert lonely.put_from(ranks[0], keys, share, group=group) == ["stored"]


@contextmanager
def stopped(run: Daemon) -> Iterator[None]:
    run.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        run.process.send_signal(signal.SIGCONT)


class TestADaemonThatHangs:
    def test_every_call_keeps_its_deadline_and_the_client_goes_on(
        self, lonely: Any, bare: Daemon, model: str
    ) -> None:
        namespace = opaque(NBYTES, model)
        ns, keys = lonely.namespace(namespace), chain(namespace, 1, N)
        put(lonely, namespace, keys)
        with stopped(bare):
            started_s = time.monotonic()
            assert lonely.match(ns, keys, timeout_s=0.1).reason == "deadline"
            lease = lonely.get(ns, keys, timeout_s=0.1)
            assert (len(lease), lease.reason) == (0, "deadline")
            new = chain(namespace, 2, N)
            assert lonely.put_from(ns, new, bytes(N * NBYTES), timeout_s=0.1) == ["refused"] * N
            assert lonely.ping(timeout_s=0.1) is False
            assert 0.4 <= time.monotonic() - started_s < 5.0
            wait_s(0.1)
        assert lonely.ping()
        assert count_right(lonely, namespace, keys) == N
        assert put(lonely, namespace, new) == ["stored"] * N
        with Client(bare.address) as observer:
            poll_until(lambda: holds_nothing(observer), 5.0, "what came late was given back")
