"""The rows of the SSD tier: durable puts, cold reads, and how soon a layer is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from blobstore.bench.background_puts import BackgroundPuts
from blobstore.bench.blobs import counters, key_chain, layered, opaque, require
from blobstore.bench.machine import beyond_caches_bytes
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.page_cache import evict, resident_pages
from blobstore.bench.pairs import Pairs, alternate
from blobstore.bench.raw_copy import SharedBuffers, caller_buffers
from blobstore.bench.raw_disk import IN_FLIGHT, RawFile
from blobstore.bench.report import Row, Setting, latency_row, rate_row
from blobstore.bench.setup import Setup
from blobstore.clients import Client
from blobstore.keys import Keys
from blobstore.units import MIB

WRITE_LIMIT_NAME = f"O_DIRECT writes of new space, {IN_FLIGHT} in flight, fdatasync after each"
READ_LIMIT_NAME = f"O_DIRECT reads into shared memory, {IN_FLIGHT} in flight"
LAYERS = 32
SETTLED_S = 60.0
PROMOTED_SAMPLES = 2
"""That are promoted one after the other: a gibibyte in sum."""


@dataclass(frozen=True, slots=True)
class _Scale:
    blob_bytes: int
    per_sample: int
    """Blobs that one sample writes or reads."""
    read_samples: int
    """Different sets of blobs that reads take in turns."""
    ssd_bytes: int
    context_blobs: int
    n_pairs: int

    @property
    def sample_bytes(self) -> int:
        return self.per_sample * self.blob_bytes

    @property
    def dram_bytes(self) -> int:
        return 2 * self.sample_bytes + 64 * MIB


def _scale(setup: Setup) -> _Scale:
    if setup.tiny:
        return _Scale(2 * MIB, 4, 2, 96 * MIB, 2, 3)
    per_sample = 32
    read_samples = -(-beyond_caches_bytes() // (per_sample * 16 * MIB))
    return _Scale(16 * MIB, per_sample, read_samples, 2048 * MIB, 16, 12)


def rows(setup: Setup) -> list[Row]:
    """`ssd.write` (empty, then full), `ssd.read`, `ssd.promote` and `ssd.first_layer`."""
    scale = _scale(setup)
    setup.need_memory(scale.dram_bytes + 2 * scale.sample_bytes)
    own = OwnDaemon(
        setup.directory,
        dram_bytes=scale.dram_bytes,
        ssd_bytes=scale.ssd_bytes,
        options={"tiering.policy": "lru"},  # a learned one would keep once-only blobs off the disk
    )
    with (
        own as daemon,
        daemon.client() as kv,
        RawFile(setup.directory) as raw,
    ):
        disk = _Disk(daemon, kv, raw, scale)
        setup.say("ssd.read")
        found = [disk.read()]
        setup.say("ssd.promote")
        found.append(disk.promote())
        setup.say("ssd.first_layer")
        found.append(disk.first_layer())
        setup.say("ssd.write")
        found.append(disk.write_empty())
        setup.say("ssd.write.full")
        found.append(disk.write_full())
    return found


class _Disk:
    """One daemon with an SSD tier, and a raw file beside it on the same disk."""

    def __init__(self, daemon: OwnDaemon, kv: Client, raw: RawFile, scale: _Scale) -> None:
        self._daemon = daemon
        self._kv = kv
        self._raw = raw
        self._scale = scale
        self._source = caller_buffers(scale.per_sample, scale.blob_bytes, seed=4)
        self._ns = kv.namespace(opaque("ssd", scale.blob_bytes))
        self._fresh = (key_chain(f"write-{n}", scale.per_sample) for n in count())

    def write_empty(self) -> Row:
        """Durable puts while the tier has room."""

        def sample() -> float:
            keys, taken_s = self._put_fresh()
            self._kv.drop(self._ns, keys)
            self._until(self._given_back)
            return taken_s

        pairs = alternate(lambda: [sample()], self._raw_write, self._scale.n_pairs)
        return self._write_row("ssd.write", pairs)

    def write_full(self) -> Row:
        """Durable puts into a full tier: each makes other blobs leave it."""
        self._fill_up()

        def sample() -> float:
            evicted = self._counter("ssd_evicted")
            keys, taken_s = self._put_fresh()
            evicted = self._counter("ssd_evicted") - evicted
            require(evicted >= len(keys) // 2, f"{len(keys)} puts evicted others, not {evicted}")
            # Durable blobs are never evicted, so that they make way for others here.
            self._kv.drop(self._ns, keys)
            self._fill_up()
            return taken_s

        pairs = alternate(lambda: [sample()], self._raw_write, self._scale.n_pairs)
        return self._write_row("ssd.write.full", pairs)

    def read(self) -> Row:
        """Lease cold blobs: they are read and their digests checked before the call returns."""
        scale = self._scale
        chains = [key_chain(f"read-{n}", scale.per_sample) for n in range(scale.read_samples)]
        for keys in chains:
            self._kv.put_from(self._ns, keys, self._source, retention="durable")
        self._raw.write(self._source * scale.read_samples)
        turns = _cycle(scale.read_samples)

        with SharedBuffers(scale.per_sample, scale.blob_bytes) as shared:
            pairs = alternate(
                lambda: [self._read_cold(self._ns, chains[next(turns)])],
                lambda: [self._raw.read(shared.views, first=next(turns) * scale.per_sample)],
                scale.n_pairs,
            )
        self._raw.truncate()
        for keys in chains:
            self._kv.drop(self._ns, keys)
        working_set = scale.read_samples * scale.sample_bytes
        setting = Setting(working_set, cold=True, least=0.85)
        return rate_row("ssd.read", pairs, scale.sample_bytes, READ_LIMIT_NAME, setting)

    def promote(self) -> Row:
        """Bring cold blobs into DRAM while puts go on, beside raw reads while puts go on."""
        scale = self._scale
        chains = [key_chain(f"promote-{n}", scale.per_sample) for n in range(PROMOTED_SAMPLES)]
        for keys in chains:
            self._kv.put_from(self._ns, keys, self._source, retention="durable")
        self._raw.write(self._source * len(chains))
        starts = [n * scale.per_sample for n in range(len(chains))]
        with (
            SharedBuffers(scale.per_sample, scale.blob_bytes) as shared,
            self._daemon.client() as other,
            BackgroundPuts(other, self._source[0]) as puts,
        ):
            pairs = alternate(
                lambda: [sum(self._read_cold(self._ns, keys) for keys in chains)],
                lambda: [sum(self._raw.read(shared.views, first=first) for first in starts)],
                scale.n_pairs,
            )
        require(puts.done > 0, "puts went on meanwhile")
        self._raw.truncate()
        for keys in chains:
            self._kv.drop(self._ns, keys)
        nbytes = len(chains) * scale.sample_bytes
        setting = Setting(nbytes, cold=True, least=0.85)
        limit_name = f"{READ_LIMIT_NAME}, while puts go on"
        return rate_row("ssd.promote", pairs, nbytes, limit_name, setting)

    def first_layer(self) -> Row:
        """How soon the first part of every blob of a cold context is readable."""
        scale, kv = self._scale, self._kv
        ns = kv.namespace(layered("layers", scale.blob_bytes, LAYERS))
        keys = key_chain("layers", scale.context_blobs)
        kv.put_from(ns, keys, self._source[: len(keys)], retention="durable")

        def first_parts() -> float:
            self._make_cold(ns, keys)
            started_s = time.perf_counter()
            with kv.get(ns, keys, timeout_s=60.0, stream=True) as lease:
                for number in range(len(keys)):
                    require(lease.wait(number, 0, timeout_s=60.0), "each first part came")
                taken_s = time.perf_counter() - started_s
                for number in range(len(keys)):
                    require(lease.wait(number, LAYERS - 1, timeout_s=60.0), "each last part came")
                require(lease.served == {"ssd": len(keys)}, "the whole context came from ssd")
            return taken_s

        pairs = alternate(
            lambda: [first_parts()], lambda: [self._read_cold(ns, keys)], scale.n_pairs
        )
        kv.drop(ns, keys)
        setting = Setting(len(keys) * scale.blob_bytes, cold=True, least=1 / 0.15)
        name = "get of the whole context, cold"
        return latency_row("ssd.first_layer", pairs, name, setting)

    def _put_fresh(self) -> tuple[Keys, float]:
        """Put one sample of new blobs, several at once, each on its own; keys and seconds."""
        keys = next(self._fresh)

        def put(number: int) -> Sequence[str]:
            return self._kv.put_from(
                self._ns, keys[number : number + 1], [self._source[number]], retention="durable"
            )

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            started_s = time.perf_counter()
            results = list(threads.map(put, range(len(keys))))
            taken_s = time.perf_counter() - started_s
        require(results == [["stored"]] * len(keys), "every put stored new bytes")
        return keys, taken_s

    def _raw_write(self) -> list[float]:
        taken_s = self._raw.write(self._source)
        self._raw.truncate()
        return [taken_s]

    def _read_cold(self, ns: Any, keys: Keys) -> float:
        self._make_cold(ns, keys)
        started_s = time.perf_counter()
        with self._kv.get(ns, keys, timeout_s=60.0) as lease:
            taken_s = time.perf_counter() - started_s
            require(lease.served == {"ssd": len(keys)}, "every blob came from ssd")
        cached = resident_pages(self._daemon.segment_files())
        require(cached == 0, f"reads bypassed the page cache, which holds {cached} pages")
        return taken_s

    def _make_cold(self, ns: Any, keys: Keys) -> None:
        self._kv.drop(ns, keys, tier="dram")
        warm = self._kv.match(ns, keys).tiers.count("dram")
        require(warm == 0, f"no blob was in DRAM, but {warm} were")
        evict(self._daemon.segment_files())
        cached = resident_pages(self._daemon.segment_files())
        require(cached == 0, f"no page of a segment was cached, but {cached} were")

    def _fill_up(self) -> None:
        """Put evictable blobs until as many leave the tier as enter it."""
        evicted = 0
        deadline_s = time.monotonic() + SETTLED_S
        while evicted < self._scale.per_sample:
            require(time.monotonic() < deadline_s, "the tier is full within a minute")
            evicted = -self._counter("ssd_evicted")
            self._kv.put_from(self._ns, next(self._fresh), self._source)
            self._until(lambda ssd: not ssd["dirty_bytes"])
            evicted += self._counter("ssd_evicted")

    def _until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline_s = time.monotonic() + SETTLED_S
        while not holds(self._kv.stats()["tiers"]["ssd"]):
            require(time.monotonic() < deadline_s, "the disk is done within a minute")
            time.sleep(0.005)

    def _given_back(self, ssd: dict[str, Any]) -> bool:
        """Nothing is still on its way back to the file system, which would hold up writes."""
        return bool(ssd["spare_bytes"] <= self._scale.ssd_bytes // 16)

    def _counter(self, name: str) -> int:
        return int(counters(self._kv)[name])

    def _write_row(self, name: str, pairs: Pairs) -> Row:
        setting = Setting(self._scale.sample_bytes, sync="fdatasync", least=0.85)
        return rate_row(name, pairs, self._scale.sample_bytes, WRITE_LIMIT_NAME, setting)


def _cycle(n: int) -> Iterator[int]:
    return (number % n for number in count())
