"""`blobstore bench idle`: what the daemon takes when nobody asks, and its memory under load."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from blobstore.bench.blobs import key_chain, opaque
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.raw_copy import Bytes, caller_buffers
from blobstore.bench.report import Row, Setting, bound_row
from blobstore.bench.setup import Setup
from blobstore.clients import BoundNamespace, Client
from blobstore.units import GIB, MIB

IDLE_CORES = 0.01
LOADED_BYTES = 100 * MIB
CLIENTS = 4
BLOB_BYTES = 4 * MIB
BATCH = 8


def rows(setup: Setup) -> list[Row]:
    """CPU of an idle daemon with a client connected; its anonymous memory under load."""
    own = OwnDaemon(setup.directory, dram_bytes=512 * MIB, ssd_bytes=GIB)
    with own as daemon, daemon.client() as kv:
        source = caller_buffers(BATCH, BLOB_BYTES, seed=8)
        setup.say("idle.memory: load")
        anonymous = _under_load(daemon, source, setup.scale(15.0, 1.0))
        setup.say("idle.cpu: waiting")
        while kv.stats()["tiers"]["ssd"]["dirty_bytes"]:
            time.sleep(0.1)
        cores = _idle_cores(daemon, *setup.scale((5, 4.0), (2, 0.5)))
    setting = Setting(CLIENTS * BATCH * BLOB_BYTES)
    return [
        bound_row(
            "idle.cpu", statistics.median(cores), "share of a core", IDLE_CORES, cores, setting
        ),
        bound_row("idle.memory", max(anonymous), "B", LOADED_BYTES, anonymous, setting),
    ]


def _idle_cores(daemon: OwnDaemon, times: int, seconds: float) -> list[float]:
    cores = []
    for _ in range(times):
        cpu_s, started_s = daemon.cpu_s(), time.monotonic()
        time.sleep(seconds)
        cores.append((daemon.cpu_s() - cpu_s) / (time.monotonic() - started_s))
    return cores


def _under_load(daemon: OwnDaemon, source: list[Bytes], seconds: float) -> list[float]:
    """Anonymous memory of the daemon, sampled while clients put and get."""
    over = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as threads:
        working = [threads.submit(_work, daemon, source, n, over.is_set) for n in range(CLIENTS)]
        sampled, deadline_s = [], time.monotonic() + seconds
        try:
            while time.monotonic() < deadline_s:
                sampled.append(float(daemon.memory_bytes("RssAnon")))
                time.sleep(0.05)
        finally:
            over.set()
        for done in working:
            done.result()
    return sampled


def _work(daemon: OwnDaemon, source: list[Bytes], number: int, over: Callable[[], bool]) -> None:
    """Put new contexts and read them back, through DRAM and SSD, until it is over."""
    with daemon.client() as kv:
        ns, turn = kv.namespace(opaque("load", BLOB_BYTES)), 0
        while not over():
            _turn(kv, ns, source, f"load-{number}-{turn}")
            turn += 1


def _turn(kv: Client, ns: BoundNamespace, source: list[Bytes], label: str) -> None:
    keys = key_chain(label, BATCH)
    kv.put_from(ns, keys, source)
    kv.match(ns, keys)
    kv.drop(ns, keys, tier="dram")
    with kv.get(ns, keys, timeout_s=10.0) as lease:
        for number in range(len(lease)):
            lease[number][0]
