"""`blobstore bench rpc`: what a call costs beside a bare echo of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from blobstore import protocol
from blobstore.bench.blobs import frame_bytes, key_chain, opaque, require
from blobstore.bench.cores import apart
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate
from blobstore.bench.raw_echo import LIMIT_NAME, Echo
from blobstore.bench.report import Row, Setting, latency_row
from blobstore.bench.setup import Setup
from blobstore.units import MIB

CHAIN = 1000
BLOB_BYTES = 64


def rows(setup: Setup) -> list[Row]:
    """The rows of the round trips."""
    n_pairs, calls = setup.scale((25, 200), (3, 20))
    found = []
    with (
        OwnDaemon(setup.directory, dram_bytes=64 * MIB) as daemon,
        daemon.client() as kv,
        Echo() as echo,
        apart(daemon.pid, echo.pid),
    ):
        ns = kv.namespace(opaque("rpc", BLOB_BYTES))
        whole, half = key_chain("whole", CHAIN), key_chain("half", CHAIN)
        payload = bytes(BLOB_BYTES)
        kv.put_from(ns, whole, [payload] * CHAIN)
        kv.put_from(ns, half[: CHAIN // 2], [payload] * (CHAIN // 2))

        def row(name: str, call: Callable[[], object], sizes: tuple[int, int], least: float) -> Row:
            setup.say(name)
            pairs = alternate(
                lambda: _timed_calls(call, calls),
                lambda: echo.round_trips(calls, *sizes),
                n_pairs,
            )
            return latency_row(name, pairs, LIMIT_NAME, Setting(sum(sizes), least=least))

        ping = frame_bytes(protocol.encode(protocol.Ping()))
        found.append(row("rpc.ping", kv.ping, (ping, ping), 0.40))
        request = protocol.encode(protocol.Match(ns.id, whole.packed, whole.key_bytes))
        reply = protocol.encode(protocol.Matched(CHAIN, CHAIN, 0.0))
        sizes = frame_bytes(request), frame_bytes(reply)
        for name, keys, held in (("", whole, CHAIN), (".half", half, CHAIN // 2)):
            require(kv.match(ns, keys).blobs == held, f"match finds {held} of {CHAIN} keys")
            found.append(row(f"rpc.match_{CHAIN}{name}", partial(kv.match, ns, keys), sizes, 0.20))
    return found


def _timed_calls(call: Callable[[], object], n: int) -> Sequence[float]:
    taken_s = []
    for _ in range(n):
        started_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - started_s)
    return taken_s
