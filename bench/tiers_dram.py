"""The rows of the DRAM tier: leases, copies out of it, copies into it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from blobstore import protocol
from blobstore.bench.blobs import counters, frame_bytes, key_chain, opaque, require
from blobstore.bench.cores import apart
from blobstore.bench.machine import beyond_caches_bytes
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate, timed
from blobstore.bench.raw_copy import SharedBuffers, caller_buffers, copy_each
from blobstore.bench.raw_echo import LIMIT_NAME, Echo
from blobstore.bench.report import Row, Setting, latency_row, rate_row
from blobstore.bench.setup import Setup
from blobstore.clients import Client
from blobstore.keys import Keys
from blobstore.units import MIB

COPY_LIMIT_NAME = "memcpy of the same sizes on one thread, shared memory and a caller's buffer"


@dataclass(frozen=True, slots=True)
class _Scale:
    lease_blobs: int
    lease_blob_bytes: int
    copy_blobs: int
    copy_blob_bytes: int
    n_pairs: int
    leases_per_pair: int

    @property
    def copy_bytes(self) -> int:
        return self.copy_blobs * self.copy_blob_bytes

    @property
    def lease_bytes(self) -> int:
        return self.lease_blobs * self.lease_blob_bytes

    @property
    def dram_bytes(self) -> int:
        # Beyond the blobs: the staging reserve of a sixteenth, and slack.
        return max(self.copy_bytes, self.lease_bytes) * 5 // 4 + 64 * MIB


def _scale(setup: Setup) -> _Scale:
    if setup.tiny:
        return _Scale(50, MIB // 4, 8, 2 * MIB, 3, 5)
    return _Scale(500, 4 * MIB, beyond_caches_bytes() // (16 * MIB), 16 * MIB, 15, 50)


def rows(setup: Setup) -> list[Row]:
    """`dram.lease`, `dram.get_into`, `dram.put` and `dram.put_pressed`."""
    scale = _scale(setup)
    setup.need_memory(scale.dram_bytes + 2 * scale.copy_bytes)
    # Without an SSD tier: nothing is written behind the back of a measurement.
    with OwnDaemon(setup.directory, dram_bytes=scale.dram_bytes) as daemon, daemon.client() as kv:
        setup.say("dram.lease")
        lease = _lease(kv, daemon.pid, scale)
        with SharedBuffers(scale.copy_blobs, scale.copy_blob_bytes) as shared:
            setup.say("dram.get_into")
            get_into = _get_into(kv, scale, shared)
            setup.say("dram.put")
            put = _put(kv, scale, shared)
        setup.say("dram.put_pressed")
        pressed = _put_pressed(kv, scale)
    return [lease, get_into, put, pressed]


def _lease(kv: Client, daemon_pid: int, scale: _Scale) -> Row:
    """Lease all blobs in one call, and read the first byte of each in place."""
    ns = kv.namespace(opaque("lease", scale.lease_blob_bytes))
    keys = key_chain("lease", scale.lease_blobs)
    (buffer,) = caller_buffers(1, scale.lease_blob_bytes, seed=1)
    kv.put_from(ns, keys, [buffer] * len(keys))
    first = int(buffer[0])

    def lease_once() -> float:
        started_s = time.perf_counter()
        with kv.get(ns, keys) as lease:
            total = 0
            for payload in lease:
                total += payload[0]
            taken_s = time.perf_counter() - started_s
        require(total == first * len(keys), "every first byte was there")
        return taken_s

    extents, held = bytes(16 * len(keys)), {"dram": len(keys)}
    request = protocol.encode(protocol.Get(ns.id, keys.packed, keys.key_bytes, 1.0))
    reply = protocol.encode(protocol.Leased(1, extents, "", held))
    with Echo() as echo, apart(daemon_pid, echo.pid):
        pairs = alternate(
            lambda: [lease_once() for _ in range(scale.leases_per_pair)],
            lambda: echo.round_trips(
                scale.leases_per_pair, frame_bytes(request), frame_bytes(reply)
            ),
            scale.n_pairs,
        )
    kv.drop(ns, keys)
    return latency_row("dram.lease", pairs, LIMIT_NAME, Setting(scale.lease_bytes, least=0.08))


def _get_into(kv: Client, scale: _Scale, shared: SharedBuffers) -> Row:
    """Copy the leading blobs into a caller's buffers."""
    ns = kv.namespace(opaque("get-into", scale.copy_blob_bytes))
    keys = key_chain("get-into", scale.copy_blobs)
    stored = caller_buffers(scale.copy_blobs, scale.copy_blob_bytes, seed=2)
    kv.put_from(ns, keys, stored)
    target = caller_buffers(scale.copy_blobs, scale.copy_blob_bytes)
    require(kv.get_into(ns, keys, target) == len(keys), "all blobs were there")
    require(all(map(np.array_equal, stored, target)), "the copies equal what was put")
    pairs = alternate(
        lambda: [timed(lambda: kv.get_into(ns, keys, target))],
        lambda: [sum(copy_each(shared.views, target))],
        scale.n_pairs,
    )
    kv.drop(ns, keys)
    setting = Setting(scale.copy_bytes, least=0.90)
    return rate_row("dram.get_into", pairs, scale.copy_bytes, COPY_LIMIT_NAME, setting)


def _put(kv: Client, scale: _Scale, shared: SharedBuffers) -> Row:
    """Reserve, write and seal new blobs; their digests are computed before they show."""
    ns = kv.namespace(opaque("put", scale.copy_blob_bytes))
    source = caller_buffers(scale.copy_blobs, scale.copy_blob_bytes, seed=3)
    turns = iter(range(1 << 30))

    def put_once() -> float:
        keys = key_chain(f"put-{next(turns)}", scale.copy_blobs)
        started_s = time.perf_counter()
        results = kv.put_from(ns, keys, source)
        taken_s = time.perf_counter() - started_s
        require(results == ["stored"] * len(keys), "every put stored new bytes")
        kv.drop(ns, keys)
        return taken_s

    pairs = alternate(
        lambda: [put_once()], lambda: [sum(copy_each(source, shared.views))], scale.n_pairs
    )
    setting = Setting(scale.copy_bytes, least=0.60)
    return rate_row("dram.put", pairs, scale.copy_bytes, COPY_LIMIT_NAME, setting)


def _put_pressed(kv: Client, scale: _Scale) -> Row:
    """Put into a full tier, where each blob makes others leave, and into one with free room."""
    ns = kv.namespace(opaque("put-pressed", scale.copy_blob_bytes))
    source = caller_buffers(scale.copy_blobs, scale.copy_blob_bytes, seed=4)
    held: list[Keys] = []

    def put_once() -> float:
        keys = key_chain(f"put-pressed-{next(turns)}", scale.copy_blobs)
        taken_s = timed(lambda: results.extend(kv.put_from(ns, keys, source)))
        require(results == ["stored"] * len(keys), "every put stored new bytes")
        results.clear()
        held.append(keys)
        return taken_s

    def dropped() -> int:
        return int(counters(kv)["dropped"])

    def pressed() -> float:
        before = dropped()
        while dropped() == before:
            put_once()
        before = dropped()
        taken_s = put_once()
        require(dropped() - before >= scale.copy_blobs, "every blob made another one leave")
        return taken_s

    def unpressed() -> float:
        while held:
            kv.drop(ns, held.pop())
        return put_once()

    turns, results = iter(range(1 << 30)), list[str]()
    pairs = alternate(lambda: [pressed()], lambda: [unpressed()], scale.n_pairs)
    setting = Setting(scale.copy_bytes, least=1 / 1.3)
    limit_name = "the same put into free room"
    return rate_row("dram.put_pressed", pairs, scale.copy_bytes, limit_name, setting)
