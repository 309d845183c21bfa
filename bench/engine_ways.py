"""The ways in which a context's state comes to an engine, each brought about and proved.

Before a turn the blobs are put where the way begins; after it the lease must say that
they came from there. A turn that came another way is no figure of this one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import takewhile
from threading import Barrier

from blobstore.bench.blobs import require
from blobstore.bench.engine import CHUNK_TOKENS, RESTORE_TIMEOUT_S, Turn
from blobstore.bench.engine_process import EngineProcess
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.page_cache import evict
from blobstore.clients import Client
from blobstore.clients.bound import BoundNamespace
from blobstore.keys import Keys
from blobstore.terms import Terms

COLD, DRAM, SSD, REBUILD, BOTH = WAYS = ("cold", "dram", "ssd", "rebuild", "both")
"""Computed by the engine; from a tier; by another runner from the text; from SSD and so at once."""
BOTH_UNEVEN = "both_uneven"
"""As BOTH, where one of the two is three times as fast as the other."""

MAX_TOKENS = 8
SETTLED_S = 60.0
_POLL_S = 0.005

_RECALL = {DRAM: "fetch", SSD: "fetch", REBUILD: "rebuild", BOTH: "both"}
_SERVED = {DRAM: {"dram"}, SSD: {"ssd"}, REBUILD: {"rebuild"}, BOTH: {"ssd", "rebuild"}}


class Ways:
    """One engine, and the daemon that its contexts are kept by."""

    def __init__(
        self, daemon: OwnDaemon, kv: Client, ns: BoundNamespace, engine: EngineProcess
    ) -> None:
        self._daemon = daemon
        self._kv = kv
        self._ns = ns
        self._engine = engine
        self._known: dict[bytes, None] = {}

    def stored(self, ids: Sequence[int]) -> Keys:
        """An engine has stored all full blobs of `ids`; their keys."""
        keys = self._ns.keys(ids)
        self._known.update(dict.fromkeys(keys))
        return keys

    def known_blobs(self, ids: Sequence[int]) -> int:
        """How many leading blobs of `ids` were stored once, before the last token."""
        return len(list(takewhile(self._known.__contains__, self._ns.keys(ids[:-1]))))

    def take(self, way: str, ids: Sequence[int], prefix_blobs: int, *, store: str = "") -> Turn:
        """Answer `ids`, whose first `prefix_blobs` blobs are known, with those from `way`.

        Raises BenchInvalid if they came otherwise.
        """
        keys = self._ns.keys(ids[: prefix_blobs * CHUNK_TOKENS])
        if keys and way != COLD:
            self._bring_to(way, keys)
            self._recall(_RECALL[way])
        turn = self._engine.answer(
            ids,
            MAX_TOKENS,
            restore=way != COLD,
            store=store,
            prefix_tokens=len(keys) * CHUNK_TOKENS,
        )
        if way != COLD:
            served = {tier for tier, blobs in turn.served.items() if blobs}
            require(
                served <= _SERVED[way] and turn.restored_blobs == len(keys),
                f"{len(keys)} blobs came by way of {way}, but it was {turn.served}",
            )
        return turn

    def rebuilt_for(self, keys: Keys, readers: int) -> list[float]:
        """The seconds until each of so many `readers` has what one rebuild makes for all."""
        self._bring_to(REBUILD, keys)
        self._recall(_RECALL[REBUILD])
        began = Barrier(readers)

        def read(kv: Client) -> float:
            ns = kv.namespace(self._ns.namespace)
            began.wait(SETTLED_S)
            started_s = time.perf_counter()
            with kv.get(ns, keys, timeout_s=RESTORE_TIMEOUT_S) as lease:
                taken_s = time.perf_counter() - started_s
                require(len(lease) == len(keys), f"{len(keys)} blobs came back, not {len(lease)}")
            return taken_s

        with ExitStack() as stack, ThreadPoolExecutor(readers) as threads:
            clients = [stack.enter_context(self._daemon.client()) for _ in range(readers)]
            return list(threads.map(read, clients))

    def _bring_to(self, way: str, keys: Keys) -> None:
        """Put the blobs of `keys`, and no others that count, where `way` begins."""
        if way == REBUILD:
            self._kv.drop(self._ns, keys[:1])
            require(self._kv.match(self._ns, keys).blobs == 0, "only the text was left")
            return
        if way == DRAM or self._kv.match(self._ns, keys).blobs < len(keys):
            self._bring_back(keys)
        if way != DRAM:
            self._push_out(keys)

    def _recall(self, how: str) -> None:
        self._kv.namespace(self._ns.namespace, terms=Terms(recall=how))

    def _bring_back(self, keys: Keys) -> None:
        """By whatever way is fastest: another turn may have left only their text."""
        self._recall("fastest")
        with self._kv.get(self._ns, keys, timeout_s=RESTORE_TIMEOUT_S) as lease:
            require(len(lease) == len(keys), f"{len(keys)} blobs were held, found {len(lease)}")

    def _push_out(self, keys: Keys) -> None:
        """Leave the copies on SSD alone, and none of them in the page cache.

        What continues them goes as well: no blob is in DRAM without those before it.
        """
        deadline_s = time.monotonic() + SETTLED_S
        while True:
            self._kv.drop(self._ns, list(self._known), tier="dram")
            tiers = self._kv.match(self._ns, keys).tiers
            if tiers == ("ssd",) * len(keys):
                break
            require(time.monotonic() < deadline_s, f"blobs leave DRAM within a minute: {tiers}")
            time.sleep(_POLL_S)
        evict(self._daemon.segment_files())
