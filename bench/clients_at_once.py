"""`blobstore bench clients`: four client processes at once, beside one alone."""

from __future__ import annotations

from functools import partial

from blobstore.bench.blobs import key_chain, opaque
from blobstore.bench.client_process import BLOB_BYTES, BLOBS, KINDS, MATCHED, ClientProcesses
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate
from blobstore.bench.raw_copy import caller_buffers
from blobstore.bench.report import Row, Setting, count_row, rate_row
from blobstore.bench.setup import Setup
from blobstore.units import MIB

CLIENTS = 4
LEAST = 0.85
"""Of what one client alone does, the four together do at least this."""

_LIMIT_NAME = "one client process alone"
_BLOBS_PER_CALL = {"get_into": BLOBS, "put": 4}


def rows(setup: Setup) -> list[Row]:
    """What all clients did together, for each kind of call."""
    found = []
    seconds, n_pairs = setup.scale((1.0, 7), (0.1, 2))
    dram_bytes = (CLIENTS + 1) * BLOBS * BLOB_BYTES + 256 * MIB
    setup.need_memory(dram_bytes + CLIENTS * BLOBS * BLOB_BYTES)
    with OwnDaemon(setup.directory, dram_bytes=dram_bytes) as daemon:
        with daemon.client() as kv:
            ns = kv.namespace(opaque("clients", BLOB_BYTES))
            sources = caller_buffers(BLOBS, BLOB_BYTES, seed=7)
            kv.put_from(ns, key_chain("clients", BLOBS), sources)
        for kind in KINDS:
            setup.say(f"clients.{kind}")
            with ClientProcesses(daemon.address, kind, CLIENTS) as clients:
                pairs = alternate(
                    partial(_seconds_per_call, clients, CLIENTS, seconds),
                    partial(_seconds_per_call, clients, 1, seconds),
                    n_pairs,
                )
            blobs = _BLOBS_PER_CALL.get(kind)
            if blobs is None:
                setting = Setting(MATCHED * 32, least=LEAST)
                found.append(count_row(f"clients.{kind}", pairs, 1, _LIMIT_NAME, setting))
            else:
                nbytes = blobs * BLOB_BYTES
                setting = Setting(CLIENTS * nbytes, least=LEAST)
                found.append(rate_row(f"clients.{kind}", pairs, nbytes, _LIMIT_NAME, setting))
    return found


def _seconds_per_call(clients: ClientProcesses, n: int, seconds: float) -> list[float]:
    return [seconds / clients.work(n, seconds)]
