"""The rows of the HTTP door: one large blob each way, through our client, on loopback."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from blobstore.bench.blobs import key_chain, opaque, require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate, timed
from blobstore.bench.raw_copy import caller_buffers
from blobstore.bench.raw_tcp import LIMIT_NAME, TcpPeer
from blobstore.bench.report import Row, Setting, rate_row
from blobstore.bench.setup import Setup
from blobstore.clients import Client
from blobstore.units import MIB


@dataclass(frozen=True, slots=True)
class _Scale:
    blob_bytes: int
    blobs: int
    """Taken in turns, so that what is read is not what was read last."""
    n_pairs: int

    @property
    def working_set_bytes(self) -> int:
        return self.blobs * self.blob_bytes


def _scale(setup: Setup) -> _Scale:
    return setup.scale(_Scale(64 * MIB, 16, 24), _Scale(4 * MIB, 2, 3))


def rows(setup: Setup) -> list[Row]:
    """`http.get` and `http.put`, beside the bytes alone over a socket."""
    scale = _scale(setup)
    dram_bytes = 2 * scale.working_set_bytes + 64 * MIB
    setup.need_memory(dram_bytes + 2 * scale.working_set_bytes)
    options = {"http.listen": "127.0.0.1:0"}
    with (
        OwnDaemon(setup.directory, dram_bytes=dram_bytes, options=options) as daemon,
        daemon.http_client() as kv,
        TcpPeer(scale.blob_bytes) as peer,
    ):
        setup.say("http.put")
        put = _put(kv, peer, scale)
        setup.say("http.get")
        get = _get(kv, peer, scale)
    return [get, put]


def _get(kv: Client, peer: TcpPeer, scale: _Scale) -> Row:
    """Blobs in DRAM into a caller's buffer."""
    ns = kv.namespace(opaque("http-get", scale.blob_bytes))
    sources = caller_buffers(scale.blobs, scale.blob_bytes, seed=1)
    chains = [key_chain(f"http-get-{n}", 1) for n in range(scale.blobs)]
    for keys, source in zip(chains, sources, strict=True):
        require(kv.put_from(ns, keys, [source]) == ["stored"], "the blob was stored")
    targets = caller_buffers(scale.blobs, scale.blob_bytes)
    turns = count()

    def get() -> float:
        turn = next(turns) % scale.blobs

        def into_target() -> None:
            require(kv.get_into(ns, chains[turn], [targets[turn]]) == 1, "the blob was held")

        taken_s = timed(into_target)
        require(bool(np.array_equal(targets[turn], sources[turn])), "the bytes are those put")
        return taken_s

    pairs = alternate(
        lambda: [get()],
        lambda: [peer.get(targets[next(turns) % scale.blobs])],
        scale.n_pairs,
    )
    setting = Setting(scale.working_set_bytes, least=0.50)
    return rate_row("http.get", pairs, scale.blob_bytes, LIMIT_NAME, setting)


def _put(kv: Client, peer: TcpPeer, scale: _Scale) -> Row:
    """New blobs into DRAM."""
    ns = kv.namespace(opaque("http-put", scale.blob_bytes))
    sources = caller_buffers(scale.blobs, scale.blob_bytes, seed=2)
    turns = count()

    def put() -> float:
        turn = next(turns)
        keys, source = key_chain(f"http-put-{turn}", 1), sources[turn % scale.blobs]

        def from_source() -> None:
            require(kv.put_from(ns, keys, [source]) == ["stored"], "the blob was stored")

        taken_s = timed(from_source)
        kv.drop(ns, keys)
        return taken_s

    pairs = alternate(
        lambda: [put()],
        lambda: [peer.put(sources[next(turns) % scale.blobs])],
        scale.n_pairs,
    )
    setting = Setting(scale.working_set_bytes, least=0.40)
    return rate_row("http.put", pairs, scale.blob_bytes, LIMIT_NAME, setting)
