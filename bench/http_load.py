"""`blobstore bench http`: requests a second, the loop's lag and the memory of the HTTP door."""

from __future__ import annotations

import asyncio
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import aiohttp

from blobstore.bench.blobs import key_chain, opaque, require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.raw_copy import Bytes, caller_buffers
from blobstore.bench.report import Row, Setting, bound_row
from blobstore.bench.setup import Setup
from blobstore.clients import BoundNamespace, Client
from blobstore.units import KIB, MIB

REQUESTS_PER_S = 2000
CONNECTIONS = 16
MATCHED = 10
LAG_S = 0.020
RISE_BYTES = 64 * MIB
STREAMS = 3
_SETTLE_S = 1.0


def rows(setup: Setup) -> list[Row]:
    """`http.requests`, `http.loop_lag` and `http.memory`."""
    blob_bytes = setup.scale(200 * MIB, 4 * MIB)
    dram_bytes = 2 * STREAMS * blob_bytes + 128 * MIB
    setup.need_memory(2 * dram_bytes)
    options = {"http.listen": "127.0.0.1:0"}
    with (
        OwnDaemon(setup.directory, dram_bytes=dram_bytes, options=options) as daemon,
        daemon.http_client() as kv,
    ):
        setup.say("http.requests")
        requests = _requests(daemon, kv, setup.scale((5, 4000), (2, 200)))
        setup.say("http.memory")
        ns = kv.namespace(opaque("http-load", blob_bytes))
        sources = caller_buffers(STREAMS, blob_bytes, seed=3)
        memory = _memory(daemon, ns, sources)
        setup.say("http.loop_lag")
        lag = _loop_lag(daemon, ns, sources, setup.scale(2, 1))
    return [requests, lag, memory]


def _requests(daemon: OwnDaemon, kv: Client, scale: tuple[int, int]) -> Row:
    """Matches of ten keys over one pool of connections; every answer is checked."""
    times, n = scale
    ns = kv.namespace(opaque("http-requests", 4 * KIB))
    keys = key_chain("http-requests", MATCHED)
    kv.put_from(ns, keys, caller_buffers(MATCHED, 4 * KIB))
    url = f"{daemon.http_address}/v1/namespaces/{ns.id.hex()}/match"
    body = {"keys": [key.hex() for key in keys]}
    seconds = [asyncio.run(_ask_all(url, daemon.http_token, body, n)) for _ in range(times)]
    rate = n / statistics.median(seconds)
    row = bound_row(
        "http.requests", REQUESTS_PER_S / rate, "ratio", 1.0, seconds, Setting(MATCHED * 4 * KIB)
    )
    return _as_rate(row, rate)


async def _ask_all(url: str, token: str, body: object, n: int) -> float:
    left = iter(range(n))
    pool = aiohttp.TCPConnector(limit=CONNECTIONS)
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=pool, headers=headers, timeout=timeout) as session:

        async def worker() -> None:
            for _ in left:
                async with session.post(url, json=body) as response:
                    found = await response.json()
                    require(found["blobs"] == MATCHED, f"all keys matched, but: {found}")

        started_s = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))
        return time.perf_counter() - started_s


def _memory(daemon: OwnDaemon, ns: BoundNamespace, sources: list[Bytes]) -> Row:
    """How much anonymous memory rises while three blobs come and three go, all at once."""
    before = daemon.memory_bytes("RssAnon")
    samples = [0.0]
    with _sampled(lambda: float(daemon.memory_bytes("RssAnon") - before), samples):
        _move(daemon, ns, sources, "memory")
    setting = Setting(2 * STREAMS * sources[0].nbytes)
    return bound_row("http.memory", max(samples), "B", RISE_BYTES, samples, setting)


def _loop_lag(daemon: OwnDaemon, ns: BoundNamespace, sources: list[Bytes], times: int) -> Row:
    """The 99th percentile of the last minute, read after more than 1 GiB has moved."""
    started_s = time.perf_counter()
    for turn in range(times):
        _move(daemon, ns, sources, f"lag-{turn}")
    time.sleep(max(0.0, _SETTLE_S - (time.perf_counter() - started_s)))
    p99_s = _metric(daemon, "blobstore_loop_lag_p99_seconds")
    setting = Setting(times * 2 * STREAMS * sources[0].nbytes)
    return bound_row("http.loop_lag", p99_s, "s", LAG_S, [p99_s], setting)


def _move(daemon: OwnDaemon, ns: BoundNamespace, sources: list[Bytes], label: str) -> None:
    """Put each source while another blob is read; all of it is dropped afterwards."""
    held = [key_chain(f"{label}-held-{n}", 1) for n in range(STREAMS)]
    fresh = [key_chain(f"{label}-fresh-{n}", 1) for n in range(STREAMS)]
    targets = caller_buffers(STREAMS, sources[0].nbytes)

    def put(number: int) -> None:
        with daemon.http_client() as kv:
            results = kv.put_from(ns, fresh[number], [sources[number]])
            require(results == ["stored"], f"the blob was stored, but {results}")

    def get(number: int) -> None:
        with daemon.http_client() as kv:
            n = kv.get_into(ns, held[number], [targets[number]])
            require(n == 1, "the blob was held")

    with daemon.client() as local:
        for keys, source in zip(held, sources, strict=True):
            local.put_from(ns, keys, [source])
        with ThreadPoolExecutor(2 * STREAMS) as threads:
            moves = [threads.submit(move, n) for n in range(STREAMS) for move in (put, get)]
            for move in moves:
                move.result()
        for keys in held + fresh:
            local.drop(ns, keys)


@contextmanager
def _sampled(read: Callable[[], float], samples: list[float]) -> Iterator[None]:
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.01):
            samples.append(read())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _metric(daemon: OwnDaemon, name: str) -> float:
    url = f"{daemon.http_address}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 (our own daemon)
        text = reply.read().decode()
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    require(found is not None, f"the daemon shows {name}")
    assert found is not None
    return float(found[1])


def _as_rate(row: Row, rate: float) -> Row:
    return replace(
        row, value=rate, unit="1/s", limit=float(REQUESTS_PER_S), limit_name="requests wanted"
    )
