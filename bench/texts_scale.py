"""`blobstore bench texts`: many texts on disk: how a daemon starts with them, and forgets one."""

from __future__ import annotations

import random
import statistics
import time
from array import array

from blobstore.bench.blobs import require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate
from blobstore.bench.report import Row, Setting, bound_row, latency_row
from blobstore.bench.setup import Setup
from blobstore.clients import BoundNamespace, Client, KVLayout, Namespace
from blobstore.text_shelf import DIRECTORY
from blobstore.units import GIB, MIB

TEXTS = 100_000
CHAIN = 250
"""Blobs of one context."""
BLOB_TOKENS = 256
BLOB_BYTES = 64
VOCABULARY = 50_000
OPEN = 0.8
"""A start reads none of them."""
PER_TEXT_BYTES = 64.0
"""In memory after a start."""
FORGET_S = 1.0
REST_S = 60.0


def rows(setup: Setup) -> list[Row]:
    """A start beside one without texts, memory per text, and the time to forget a context."""
    n_chains = setup.scale(TEXTS // CHAIN, 4)
    own = OwnDaemon(setup.directory, dram_bytes=64 * MIB, ssd_bytes=2 * GIB)
    with own as daemon:
        with daemon.client() as kv:
            ns = kv.namespace(
                Namespace("bench/texts", KVLayout.opaque(BLOB_BYTES), tokens_per_blob=BLOB_TOKENS)
            )
            for number in range(n_chains):
                setup.say(f"texts: {number * CHAIN} of {n_chains * CHAIN}")
                _put(kv, ns, number)
            texts = _at_rest(kv)
        require(texts["entries"] == n_chains * CHAIN, f"{texts['entries']} texts are kept")
        setup.say(f"texts: {texts['bytes']} bytes accounted, {texts['disk_bytes']} on disk")
        starts = Starts(daemon)
        pairs = alternate(
            starts.with_texts, starts.without, setup.scale(5, 1), warm_up=setup.scale(1, 0)
        )
        with daemon.client() as kv:
            forgot_s = [_forget(kv, ns, number) for number in range(min(n_chains, 10))]
    per_text = starts.text_bytes / (n_chains * CHAIN)
    setting = Setting(int(texts["disk_bytes"]), sync="fdatasync")
    beside = Setting(setting.working_set_bytes, sync=setting.sync, least=setup.scale(OPEN, 0.0))
    return [
        latency_row("texts.open", pairs, "a start without texts", beside),
        bound_row("texts.memory_per_text", per_text, "B", PER_TEXT_BYTES, [per_text], setting),
        bound_row("texts.forget", statistics.median(forgot_s), "s", FORGET_S, forgot_s, setting),
    ]


class Starts:
    """Starts of a daemon with the texts that it has, and without them."""

    def __init__(self, daemon: OwnDaemon) -> None:
        self._daemon = daemon
        self._resident_bytes: dict[bool, list[int]] = {True: [], False: []}

    @property
    def text_bytes(self) -> float:
        """What the process takes more with the texts than without, in the median."""
        with_texts, without = (statistics.median(self._resident_bytes[it]) for it in (True, False))
        return max(0.0, with_texts - without)

    def with_texts(self) -> list[float]:
        """The seconds of one."""
        self._daemon.stop()
        return self._start(with_texts=True)

    def without(self) -> list[float]:
        """The same, of the blobs alone."""
        self._daemon.stop()
        texts, away = self._daemon.data / DIRECTORY, self._daemon.data.parent / "texts-away"
        texts.rename(away)
        try:
            return self._start(with_texts=False)
        finally:
            self._daemon.stop()
            away.rename(texts)
            self._daemon.start()

    def _start(self, *, with_texts: bool) -> list[float]:
        took_s = self._daemon.start()
        with self._daemon.client() as kv:
            kv.ping()
        resident = sum(self._daemon.memory_bytes(field) for field in ("RssAnon", "RssFile"))
        self._resident_bytes[with_texts].append(resident)
        return [took_s]


def _ids(number: int) -> array[int]:
    rng = random.Random(number)  # noqa: S311 (tokens of a context)
    # Words as they come: few often, most seldom.
    most = [int(VOCABULARY ** rng.random()) for _ in range(CHAIN * BLOB_TOKENS - 1)]
    return array("I", [VOCABULARY + number, *most])


def _put(kv: Client, ns: BoundNamespace, number: int) -> None:
    ids = _ids(number)
    payloads = [number.to_bytes(BLOB_BYTES, "little")] * CHAIN
    results = kv.put_from(ns, ns.keys(ids), payloads, token_ids=ids, retention="durable")
    require(list(results) == ["stored"] * CHAIN, "every blob was stored")


def _forget(kv: Client, ns: BoundNamespace, number: int) -> float:
    keys = ns.keys(_ids(number))
    started_s = time.perf_counter()
    forgotten = kv.forget(ns, keys[:1])
    took_s = time.perf_counter() - started_s
    require(forgotten == CHAIN, f"{CHAIN} blobs were forgotten, found {forgotten}")
    return took_s


def _at_rest(kv: Client) -> dict[str, float]:
    deadline_s = time.monotonic() + REST_S
    while True:
        texts: dict[str, float] = kv.stats()["texts"]
        if not texts["pending"]:
            return texts
        require(time.monotonic() < deadline_s, f"texts come to rest in {REST_S:g} s")
        time.sleep(0.05)
