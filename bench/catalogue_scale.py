"""`blobstore bench catalogue`: how a large catalogue opens, and what it costs to keep."""

from __future__ import annotations

import statistics

from blobstore.bench.blobs import key_chain, opaque, require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.report import Row, Setting, bound_row
from blobstore.bench.setup import Setup
from blobstore.clients import Client
from blobstore.units import GIB, KIB, MIB

BLOBS = 200_000
CHAIN = 1000
BLOB_BYTES = 64
OPEN_S = 2.0
PER_BLOB_BYTES = KIB


def rows(setup: Setup) -> list[Row]:
    """Seconds from the start of the process to the first connection, and bytes per blob."""
    n_blobs = setup.scale(BLOBS, 2 * CHAIN)
    starts = setup.scale(5, 2)
    own = OwnDaemon(setup.directory, dram_bytes=64 * MIB, ssd_bytes=2 * GIB)
    with own as daemon:
        empty_bytes = _restarted(daemon, starts)[1]
        with daemon.client() as kv:
            for turn in range(n_blobs // CHAIN):
                setup.say(f"catalogue: {turn * CHAIN} of {n_blobs} blobs")
                _put_chain(kv, turn)
        opened_s, full_bytes = _restarted(daemon, starts)
        with daemon.client() as kv:
            held = kv.stats()["blobs"]
            require(held == n_blobs, f"{n_blobs} blobs were there after the restart, found {held}")
        catalogue_bytes = sum(f.stat().st_size for f in daemon.data.rglob("data.mdb"))
    per_blob = [
        (after - before) / n_blobs for before, after in zip(empty_bytes, full_bytes, strict=True)
    ]
    setting = Setting(catalogue_bytes, sync="fdatasync")
    return [
        bound_row("catalogue.open", statistics.median(opened_s), "s", OPEN_S, opened_s, setting),
        bound_row(
            "catalogue.memory_per_blob",
            statistics.median(per_blob), "B", PER_BLOB_BYTES, per_blob, setting,
        ),
    ]  # fmt: skip


def _put_chain(kv: Client, turn: int) -> None:
    ns = kv.namespace(opaque("catalogue", BLOB_BYTES))
    keys = key_chain(f"catalogue-{turn}", CHAIN)
    payload = turn.to_bytes(BLOB_BYTES, "little")
    results = kv.put_from(ns, keys, [payload] * CHAIN, retention="durable")
    require(list(results) == ["stored"] * CHAIN, "every blob was stored")


def _restarted(daemon: OwnDaemon, times: int) -> tuple[list[float], list[int]]:
    """Seconds that each start took, and the resident bytes after it, without the arena."""
    taken_s, resident_bytes = [], []
    for _ in range(times):
        daemon.stop()
        taken_s.append(daemon.start())
        with daemon.client() as kv:
            kv.ping()
        resident_bytes.append(daemon.memory_bytes("RssAnon") + daemon.memory_bytes("RssFile"))
    return taken_s, resident_bytes
