"""Chunks between rows of the engine's host memory and the store. Blocks: for background threads.

A fault is never raised: what could not be had is missing, what could not be saved is not
saved, and it is counted why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.sync import Client
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.reasons import (
    ABSENT,
    DEADLINE,
    REFUSED,
    STOPPED,
    UNAVAILABLE,
    UNNAMED,
)
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.request_params import RequestParams
from blobstore.clients.vllm.tier_chunks import Chunk, runs
from blobstore.errors import BlobStoreError

PORTION_BYTES = 128 << 20
"""Moved under one deadline."""

HOLES_MAX = 4
"""Chunks missing in the middle of a load, after which the rest is not tried."""

Rows = Callable[[int], memoryview]
"""The bytes of a row, by its number."""


class TierStore:
    """The store's side of a tier.

    Args:
        daemon: where the store is.
        namespace: of the engine's chunks; None as long as it is not known, or if it never will be.
        rows: the engine's host memory.
        recorder: is told of misses and of what is not saved.
        timeout_s: of each portion that is moved.
        lookup_timeout_s: of each question.
    """

    def __init__(
        self,
        daemon: Daemon,
        namespace: Callable[[], BoundNamespace | None],
        rows: Rows,
        recorder: Recorder,
        timeout_s: float,
        lookup_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon = daemon
        self._namespace = namespace
        self._rows = rows
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._lookup_timeout_s = lookup_timeout_s
        self._clock = clock
        self.stopping = False
        """Loads and saves end after what they have begun to move."""

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the store; none after a fault."""
        client, ns, why = self._reach()
        if client is not None and ns is not None:
            held, why = self._exists(client, ns, keys, self._lookup_timeout_s)
            if not why:
                return held
        self._recorder.missed(why, len(keys))
        return [False] * len(keys)

    def load(self, chunks: Sequence[Chunk], params: RequestParams) -> list[bytes]:
        """Fill the rows of `chunks`; the keys of those that are complete."""
        client, ns, why = self._reach()
        loaded: list[bytes] = []
        if client is not None and ns is not None:
            why = self._load(client, ns, chunks, params, loaded)
        if len(loaded) < len(chunks):
            self._recorder.missed(why or ABSENT, len(chunks) - len(loaded))
        return loaded

    def save(self, chunks: Sequence[Chunk], params: RequestParams) -> list[bytes]:
        """Store what is in the rows of `chunks`, unless it is held; the keys that are, then."""
        client, ns, why = self._reach()
        kept: set[bytes] = set()
        if client is not None and ns is not None:
            try:
                why = self._save(client, ns, chunks, params, kept)
            except BlobStoreError as error:  # a durable put that failed
                why = error.code
        if len(kept) < len(chunks):
            self._recorder.unsaved(why or REFUSED, len(chunks) - len(kept))
        return [chunk.key for chunk in chunks if chunk.key in kept]

    def _reach(self) -> tuple[Client | None, BoundNamespace | None, str]:
        ns = self._namespace()
        if ns is None:
            return None, None, UNNAMED
        return self._daemon.reach(), ns, UNAVAILABLE

    def _load(
        self,
        client: Client,
        ns: BoundNamespace,
        chunks: Sequence[Chunk],
        params: RequestParams,
        loaded: list[bytes],
    ) -> str:
        portion = max(1, PORTION_BYTES // max(1, ns.namespace.nbytes))
        at = holes = 0
        while at < len(chunks) and holes <= HOLES_MAX:
            if self.stopping:
                return STOPPED
            some = chunks[at : at + portion]
            began_s = self._clock()
            n = client.get_into(
                ns,
                [chunk.key for chunk in some],
                [self._rows(chunk.row) for chunk in some],
                hint=params.hint,
                timeout_s=self._timeout_s,
            )
            loaded += [chunk.key for chunk in some[:n]]
            why = self._noted(began_s, self._timeout_s) if n < len(some) else self._noted(None)
            if why:
                return why
            holes += n < len(some)
            at += n + (n < len(some))
        return ""

    def _save(
        self,
        client: Client,
        ns: BoundNamespace,
        chunks: Sequence[Chunk],
        params: RequestParams,
        kept: set[bytes],
    ) -> str:
        parents = {chunk.parent for chunk in chunks if chunk.parent is not None}
        asked = list(dict.fromkeys([*(chunk.key for chunk in chunks), *parents]))
        answers, why = self._exists(client, ns, asked, self._timeout_s)
        if why:
            return why
        held = {key for key, is_held in zip(asked, answers, strict=True) if is_held}
        kept.update(held.intersection(chunk.key for chunk in chunks))
        for run in runs([chunk for chunk in chunks if chunk.key not in held]):
            if self.stopping:
                return STOPPED
            # What continues nothing that is held is a root: it would be refused otherwise.
            parent = run[0].parent if run[0].parent in held | kept else None
            keys, began_s = [chunk.key for chunk in run], self._clock()
            results = client.put_from(
                ns,
                keys,
                [self._rows(chunk.row) for chunk in run],
                parent=parent,
                retention=params.retention,
                hint=params.hint,
                timeout_s=self._timeout_s,
            )
            kept.update(key for key, what in zip(keys, results, strict=True) if what != REFUSED)
            if REFUSED in results:
                return self._noted(began_s, self._timeout_s) or REFUSED
            self._noted(None)
        if params.ttl_s:
            client.pin(ns, [chunk.key for chunk in chunks], params.ttl_s, timeout_s=self._timeout_s)
        return ""

    def _exists(
        self, client: Client, ns: BoundNamespace, keys: Sequence[bytes], timeout_s: float
    ) -> tuple[list[bool], str]:
        """Which are held, and why it is not known if so."""
        began_s = self._clock()
        held = client.exists(ns, keys, timeout_s=timeout_s)
        return held, self._noted(None if any(held) else began_s, timeout_s)

    def _noted(self, began_s: float | None, timeout_s: float = 0.0) -> str:
        """Tell the daemon's breaker how a call went that gave something (None), or nothing.

        These calls do not say why they gave nothing; one that took all of its time got no answer.
        """
        in_vain = began_s is not None and self._clock() - began_s >= timeout_s
        why = DEADLINE if in_vain else ""
        self._daemon.note(why)
        return why
