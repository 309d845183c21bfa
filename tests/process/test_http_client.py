"""Clients over HTTP against a real daemon: cancelled reads, idle gaps, ports, forks, TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import subprocess
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import AsyncClient, Client, http_pool, http_wire
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_exchange import HttpSteps
from blobstore.clients.http_pool import CONNECTIONS_MAX
from blobstore.clients.http_wire import Wire
from blobstore.errors import InvalidRequest, Unavailable
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, count_right, opaque, payload_of, payloads_of, put
from tests.support.both_clients import HTTP_KINDS, connect, reach
from tests.support.daemon import Daemon, daemon
from tests.support.http_daemon import HttpDaemon
from tests.support.polling import poll_until

LARGE = opaque(8 * MIB, "large")
SMALL = opaque(4 * KIB, "small")
N = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("http-client")
    with daemon(home, "--dram", "192MiB", "--ssd", "off", "--http", "127.0.0.1:0") as run:
        yield run


@pytest.fixture
def door(run: Daemon) -> HttpDaemon:
    return HttpDaemon(run)


@pytest.fixture
async def loop_kv(door: HttpDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(door.url, token=door.token, timeout_s=20.0) as kv:
        yield kv


@pytest.fixture(params=HTTP_KINDS)
def kv(request: pytest.FixtureRequest, run: Daemon) -> Iterator[Any]:
    with reach(request.param, run, timeout_s=20.0) as kv:
        yield kv


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Connections that were made."""
    made: list[object] = []

    def counted(address: HttpAddress) -> HttpSteps[Wire]:
        made.append(address)
        return http_wire.connect(address)

    monkeypatch.setattr(http_pool, "connect", counted)
    return made


async def test_a_cancelled_get_is_never_the_answer_to_another(
    run: Daemon, door: HttpDaemon, loop_kv: AsyncClient, connected: list[object]
) -> None:
    kv, rng = loop_kv, random.Random(45)
    keys = chain(LARGE, 1, N)
    with Client(run.address) as local:
        put(local, LARGE, keys)
    ns = await kv.namespace(LARGE)
    cancelled = 0
    for number in range(200):
        cut, wanted = rng.sample(range(N), 2)
        task = asyncio.ensure_future(kv.get(ns, keys[cut : cut + 1]))
        await asyncio.sleep(rng.random() * rng.choice([0.002, 0.020]))
        cancelled += task.cancel()
        async with kv.get(ns, keys[wanted : wanted + 1]) as lease:
            assert lease.reason == "", number
            assert lease[0] == payload_of(keys[wanted], LARGE.nbytes), number
        await asyncio.wait([task])
        del task
    assert cancelled, "some were under way"
    assert len(connected) <= 1 + cancelled
    assert len(kv._runner._pool._idle) <= CONNECTIONS_MAX  # type: ignore[attr-defined]
    assert "Traceback" not in run.said, run.said
    assert "ERROR" not in run.said


async def test_a_cancelled_get_into_writes_no_more(
    door: HttpDaemon, loop_kv: AsyncClient, run: Daemon
) -> None:
    kv, rng = loop_kv, random.Random(46)
    keys = chain(LARGE, 1, N)
    with Client(run.address) as local:
        put(local, LARGE, keys)
    ns = await kv.namespace(LARGE)
    buffer = np.zeros(N * LARGE.nbytes, np.uint8)
    for _ in range(20):
        task = asyncio.ensure_future(kv.get_into(ns, keys, buffer))
        await asyncio.sleep(rng.random() * 0.020)
        task.cancel()
        await asyncio.wait([task])
        buffer[:] = 0
        await kv.ping()
        assert not buffer.any()
    assert await kv.get_into(ns, keys, buffer) == N
    assert [row.tobytes() for row in buffer.reshape(N, -1)] == payloads_of(keys, LARGE.nbytes)


async def test_a_cancelled_put_stores_nothing(door: HttpDaemon, loop_kv: AsyncClient) -> None:
    kv, rng = loop_kv, random.Random(47)
    ns = await kv.namespace(LARGE)
    whole = bytes(LARGE.nbytes)
    for seed in range(100, 120):
        task = asyncio.ensure_future(kv.put_from(ns, chain(LARGE, seed, 1), [whole]))
        await asyncio.sleep(rng.random() * 0.010)
        task.cancel()
        await asyncio.wait([task])
        if await kv.exists(ns, chain(LARGE, seed, 1)) == [True]:
            assert await kv.put_from(ns, chain(LARGE, seed, 1), [whole]) == ["exists"]
    assert (await kv.ping()) is True
    poll_until(door.nothing_is_lent, 10.0, "what was lent has come back")


def test_five_thousand_small_gets_use_few_ports(kv: Any, connected: list[object]) -> None:
    keys = chain(SMALL, 2, 50)
    put(kv, SMALL, keys)
    ns = kv.namespace(SMALL)
    for number in range(5000):
        index = number % 50
        assert kv.get(ns, keys[index : index + 1])[0] == payload_of(keys[index], SMALL.nbytes)
    assert len(connected) <= CONNECTIONS_MAX


def test_a_large_blob_is_copied_once(kv: Any) -> None:
    """Straight from the caller's memory, and straight to it."""
    keys = chain(LARGE, 3, N)
    source = np.frombuffer(b"".join(payloads_of(keys, LARGE.nbytes)), np.uint8)
    target = np.zeros_like(source)
    ns = kv.namespace(LARGE)
    kv.drop(ns, keys)
    tracemalloc.start()
    try:
        assert kv.put_from(ns, keys, source) == ["stored"] * N
        assert kv.get_into(ns, keys, target) == N
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(source, target)
    assert peak_bytes < MIB


def test_a_daemon_that_restarts_is_found_again(tmp_path: Path) -> None:
    keys = chain(SMALL, 1, N)
    options = ("--dram", "64MiB", "--http", f"127.0.0.1:{free_port()}")
    for kind in HTTP_KINDS:
        with daemon(tmp_path, *options) as first:
            kv = reach(kind, first, timeout_s=20.0)
            put(kv, SMALL, keys, "durable")
            ns = kv.namespace(SMALL)
        assert kv.match(ns, keys).reason == "unavailable"
        assert kv.get(ns, keys).reason == "unavailable"
        assert kv.put_from(ns, keys, [bytes(SMALL.nbytes)] * N) == ["refused"] * N
        assert kv.stats() == {"reason": "unavailable"}
        with pytest.raises(Unavailable):
            kv.put_from(ns, keys, [bytes(SMALL.nbytes)] * N, retention="durable")
        with daemon(tmp_path, *options):
            assert count_right(kv, SMALL, keys) == N
            boot_id = kv.boot_id  # told with every answer
            assert boot_id == kv.stats()["boot_id"]
        kv.close()


def test_that_it_is_lost_and_found_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--ssd", "off", "--http", f"127.0.0.1:{free_port()}")
    with daemon(tmp_path, *options) as first:
        kv = reach("threads over http", first)
    with caplog.at_level(logging.WARNING, "blobstore.clients"):
        for _ in range(3):
            assert kv.ping() is False
        with daemon(tmp_path, *options):
            for _ in range(3):
                assert kv.ping()
    kv.close()
    assert [record.message.split()[0] for record in caplog.records] == ["lost", "found"]


def test_a_forked_child_connects_anew(run: Daemon, door: HttpDaemon) -> None:
    keys, of_child = chain(SMALL, 5, N), chain(SMALL, 6, N)
    with Client(door.url, token=door.token, timeout_s=20.0) as kv:
        put(kv, SMALL, keys)
        lease = kv.get(kv.namespace(SMALL), keys)
        child = os.fork()
        if child == 0:
            right = count_right(kv, SMALL, keys) == N
            right &= put(kv, SMALL, of_child) == ["stored"] * N
            right &= [bytes(view) for view in lease] == payloads_of(keys, SMALL.nbytes)
            os._exit(0 if right else 1)
        for _ in range(50):
            assert count_right(kv, SMALL, keys) == N
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert count_right(kv, SMALL, of_child) == N


@pytest.mark.parametrize("kind", HTTP_KINDS)
def test_a_token_that_the_daemon_does_not_know_is_told_at_once(kind: str, door: HttpDaemon) -> None:
    for token in ("", "wrong"):
        with pytest.raises(InvalidRequest, match="unauthorized"):
            connect(kind.removesuffix(" over http"), door.url, token=token)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1, with its key beside it."""
    home = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=blobstore", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(home / "key.pem"), "-out", str(home / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return home / "cert.pem"


@pytest.mark.parametrize("kind", HTTP_KINDS)
def test_over_tls_whoever_the_ca_vouches_for_is_served(
    kind: str, certificate: Path, tmp_path: Path
) -> None:
    environ = {
        "BLOBSTORE__HTTP__TLS_CERT": str(certificate),
        "BLOBSTORE__HTTP__TLS_KEY": str(certificate.with_name("key.pem")),
    }
    options = ("--dram", "96MiB", "--ssd", "off", "--http", "127.0.0.1:0")
    with daemon(tmp_path, *options, environ=environ) as run:
        with reach(kind, run, ca_file=str(certificate), timeout_s=20.0) as kv:
            for namespace in (SMALL, LARGE):
                keys = chain(namespace, 1, N)
                assert put(kv, namespace, keys) == ["stored"] * N
                assert count_right(kv, namespace, keys) == N
        with pytest.raises(Unavailable, match=r"self-signed certificate.*ca_file"):
            reach(kind, run)
        plain = HttpDaemon(run).url.replace("https", "HTTP")
        with pytest.raises(Unavailable, match="does it serve TLS"):
            connect(kind.partition(" ")[0], plain, token="t")
        assert "Traceback" not in run.said, run.said


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
