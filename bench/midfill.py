"""`blobstore bench midfill`: one turn of a long conversation.

A context of 127,000 tokens is leased and read in place, and four blobs are
appended to it: what an engine does when an agent's turn comes back. The limit
is a memcpy of the bytes that are read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import count

import numpy as np

from blobstore.bench.blobs import key_chain, opaque, require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import Pairs, alternate
from blobstore.bench.raw_copy import Bytes, caller_buffers, copy_each
from blobstore.bench.report import Row, Setting, rate_row
from blobstore.bench.setup import Setup
from blobstore.clients import Client, Lease
from blobstore.keys import Keys
from blobstore.units import MIB

BLOBS = 497
BLOB_BYTES = 256 * 70_000
APPENDED = 4
LIMIT_NAME = "memcpy of the bytes read, out of the same leased memory"


def rows(setup: Setup) -> list[Row]:
    """The row of one turn."""
    n_blobs = setup.scale(BLOBS, 8)
    blob_bytes = setup.scale(BLOB_BYTES, 2 * MIB)
    total_bytes = n_blobs * blob_bytes
    targets = caller_buffers(max(1, min(64, n_blobs)), blob_bytes)
    dram_bytes = total_bytes + 4 * APPENDED * blob_bytes + 128 * MIB
    setup.need_memory(dram_bytes)
    options = {"dram.staging": str(64 * MIB)}
    with (
        OwnDaemon(setup.directory, dram_bytes=dram_bytes, options=options) as daemon,
        daemon.client() as kv,
    ):
        setup.say(f"midfill: {n_blobs} blobs of {blob_bytes} bytes")
        turn = _Turn(kv, n_blobs, blob_bytes)
        pairs = _measure(turn, targets, setup.scale(7, 2))
    return [rate_row("midfill", pairs, total_bytes, LIMIT_NAME, Setting(total_bytes))]


def _measure(turn: _Turn, targets: Sequence[Bytes], n_pairs: int) -> Pairs:
    with turn.lease() as held:
        views = [np.frombuffer(held[number], np.uint8) for number in range(len(held))]
        return alternate(lambda: [turn.run()], partial(_copy_all, views, targets), n_pairs)


class _Turn:
    """A stored context, and the turn that continues it."""

    def __init__(self, kv: Client, n_blobs: int, blob_bytes: int) -> None:
        self._kv = kv
        self.ns = kv.namespace(opaque("midfill", blob_bytes))
        self.keys = key_chain("midfill", n_blobs)
        (buffer,) = caller_buffers(1, blob_bytes, seed=5)
        self._sum = _sum(buffer)
        self._fresh = caller_buffers(APPENDED, blob_bytes, seed=6)
        self._turns = count()
        kv.put_from(self.ns, self.keys, [buffer] * n_blobs)

    def lease(self) -> Lease:
        """The whole context, leased."""
        return self._kv.get(self.ns, self.keys)

    def run(self) -> float:
        """Lease, read every byte in place, append; the seconds taken."""
        appended = key_chain(f"midfill-{next(self._turns)}", APPENDED)
        started_s = time.perf_counter()
        with self.lease() as lease:
            sums = [_sum(lease[number]) for number in range(len(lease))]
        self._append(appended)
        taken_s = time.perf_counter() - started_s
        require(sums == [self._sum] * len(self.keys), "every byte that was stored was read")
        self._kv.drop(self.ns, appended)
        return taken_s

    def _append(self, keys: Keys) -> None:
        with self._kv.put(self.ns, keys, parent=self.keys[-1]) as writer:
            for number, fresh in enumerate(self._fresh):
                writer[number][:] = fresh.data
        require(list(writer.results) == ["stored"] * len(keys), "the new blobs were stored")


def _sum(data: Bytes | memoryview) -> int:
    """One pass over all bytes, as fast as memory gives them."""
    return int(np.add.reduce(np.frombuffer(data, np.uint64)))


def _copy_all(sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[float]:
    """Copy all sources, the targets used in turns; the seconds taken together."""
    step, taken_s = len(targets), 0.0
    for start in range(0, len(sources), step):
        batch = sources[start : start + step]
        taken_s += sum(copy_each(batch, targets[: len(batch)]))
    return [taken_s]
