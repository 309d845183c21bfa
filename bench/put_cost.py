"""`blobstore bench put-cost`: a put beside many blobs costs what it costs beside few."""

from __future__ import annotations

import time
from itertools import count

from blobstore.bench.blobs import key_chain, opaque, require
from blobstore.bench.cores import apart
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate
from blobstore.bench.report import Row, Setting, latency_row
from blobstore.bench.setup import Setup
from blobstore.clients import Client
from blobstore.units import GIB, KIB, MIB

FEW, MANY = 100, 10_000
LEAST = 1 / 1.2
BLOB_BYTES = 8 * KIB


def rows(setup: Setup) -> list[Row]:
    """The latency of one put, in memory and durable."""
    return [_row(setup, "standard", 40), _row(setup, "durable", 10)]


def _row(setup: Setup, retention: str, puts_per_pair: int) -> Row:
    many = setup.scale(MANY, 5 * FEW)
    ssd_bytes = GIB if retention == "durable" else 0
    setup.say(f"put-cost.{retention}: {many} blobs against {FEW}")
    with (
        _daemon(setup, ssd_bytes) as large,
        _daemon(setup, ssd_bytes) as small,
        large.client() as beside_many,
        small.client() as beside_few,
    ):
        first, second = _Puts(beside_many, retention, many), _Puts(beside_few, retention, FEW)
        with apart(large.pid, small.pid):
            pairs = alternate(
                lambda: [first.put() for _ in range(puts_per_pair)],
                lambda: [second.put() for _ in range(puts_per_pair)],
                setup.scale(25, 3),
            )
    setting = Setting(
        many * BLOB_BYTES,
        sync="fdatasync" if retention == "durable" else "none",
        least=LEAST,
    )
    return latency_row(f"put_cost.{retention}", pairs, f"the same put beside {FEW} blobs", setting)


def _daemon(setup: Setup, ssd_bytes: int) -> OwnDaemon:
    return OwnDaemon(setup.directory, dram_bytes=256 * MIB, ssd_bytes=ssd_bytes)


class _Puts:
    """A store that holds `n_blobs`, before and after each put."""

    def __init__(self, kv: Client, retention: str, n_blobs: int) -> None:
        self._kv = kv
        self._retention = retention
        self._ns = kv.namespace(opaque("put-cost", BLOB_BYTES))
        self._payload = bytes(BLOB_BYTES)
        self._turns = count()
        for start in range(0, n_blobs, FEW):
            keys = key_chain(f"held-{start}", FEW)
            kv.put_from(self._ns, keys, [self._payload] * FEW, retention=retention)
        require(kv.stats()["blobs"] == n_blobs, f"the store holds {n_blobs} blobs")

    def put(self) -> float:
        """The seconds that one put of one new blob takes."""
        keys = key_chain(f"new-{next(self._turns)}", 1)
        started_s = time.perf_counter()
        with self._kv.put(self._ns, keys, retention=self._retention) as writer:
            writer[0][:] = self._payload
        taken_s = time.perf_counter() - started_s
        require(list(writer.results) == ["stored"], "the put stored a new blob")
        self._kv.drop(self._ns, keys)
        return taken_s
