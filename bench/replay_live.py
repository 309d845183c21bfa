"""`bench replay --live`: the head of a trace against a daemon of our own, with real bytes.

What a replay in virtual time leaves out is in here: leases and writers, the mover, the
clock. Every block is a blob of `BLOB_BYTES` whatever its tokens. Times are scaled, so that
a replay takes `LIVE_S`, or as long as the daemon needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blobstore.bench.blobs import opaque, require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.replay import MIN, ORACLE, ReplayRow, ReplaySettings, Score
from blobstore.bench.trace import Request, Trace
from blobstore.clients import BoundNamespace, Client
from blobstore.hint import Hint
from blobstore.keys import Keys

BLOB_BYTES = 64 << 10
BLOCKS_MAX = 4_000
"""Distinct blocks of the head that is replayed: a quarter of a gigabyte."""

LIVE_S = 30.0

_STAGING_BLOBS = 8
"""Room for loads beside what may be filled, which is all that counts as the size."""

_KEY_BYTES = 8
_PUT_S = 1.0
"""A chain longer than all of DRAM is refused from where it no longer fits; not at once."""


def live_head(trace: Trace, blocks_max: int = BLOCKS_MAX) -> Trace:
    """Its first requests, for as long as they have no more than `blocks_max` distinct blocks."""
    n_requests = 0
    for request in trace.requests:
        if max(request.blocks, default=0) >= blocks_max:
            break
        n_requests += 1
    return trace.head(n_requests)


def live_rows(
    trace: Trace,
    policies: Sequence[str],
    sizes: Sequence[float],
    settings: ReplaySettings,
    directory: Path,
    *,
    seconds: float = LIVE_S,
) -> Iterator[ReplayRow]:
    """A row for each policy that a daemon can have; its data goes under `directory`."""
    for size in sizes:
        for policy in policies:
            if policy not in (MIN, ORACLE):
                yield _row(trace, policy, size, settings, directory, seconds)


def _row(
    trace: Trace,
    policy: str,
    size: float,
    settings: ReplaySettings,
    directory: Path,
    seconds: float,
) -> ReplayRow:
    dram_bytes, ssd_bytes = (
        max(1, int(share * trace.n_blocks)) * BLOB_BYTES if share else 0
        for share in (size, settings.ssd_size)
    )
    staging_bytes = _STAGING_BLOBS * BLOB_BYTES
    options = {
        "tiering.policy": policy,
        "tiering.objective": settings.objective,
        "dram.staging": str(staging_bytes),
    }
    sizes = {"dram_bytes": dram_bytes + staging_bytes, "ssd_bytes": ssd_bytes}
    with (
        OwnDaemon(directory, **sizes, options=options) as daemon,
        daemon.client() as kv,
    ):
        live = _Live(kv, trace, hints=settings.hints)
        score = live.replay(seconds)
        written, train_s = _told_by(kv)
    return ReplayRow(
        f"{policy} (live)",
        size,
        score.token_hit_ratio,
        score.cost_saved,
        written // BLOB_BYTES * trace.block_tokens,
        us_per_decision=None,
        train_s=train_s,
    )


class _Live:
    """One engine's calls: get what is held, check it, put the rest."""

    def __init__(self, kv: Client, trace: Trace, *, hints: bool) -> None:
        self._kv, self._trace, self._hints = kv, trace, hints
        self._ns: BoundNamespace = kv.namespace(opaque("replay", BLOB_BYTES))
        lengths = [len(request.blocks) for request in trace.requests]
        self._payloads = np.zeros((max(lengths, default=0), BLOB_BYTES), np.uint8)

    def replay(self, seconds: float) -> Score:
        requests = self._trace.requests
        score = Score(self._trace.block_tokens)
        if not requests:
            return score
        first_s, last_s = requests[0].time_s, requests[-1].time_s
        pace = seconds / max(last_s - first_s, 1e-9)
        begun = time.monotonic()
        for request in requests:
            early_s = begun + (request.time_s - first_s) * pace - time.monotonic()
            time.sleep(max(0.0, early_s))
            score.add(self._serve(request), request.prompt_tokens)
        return score

    def _serve(self, request: Request) -> int:
        blocks = np.asarray(request.blocks, "<u8")
        keys = Keys(blocks.tobytes(), _KEY_BYTES)
        hint = self._hint(request)
        with self._kv.get(self._ns, keys, hint=hint) as lease:
            n_held = len(lease)
            found = [int(np.frombuffer(view, "<u8", 1)[0]) for view in lease]
        require(found == request.blocks[:n_held], "a blob holds what was put under its key")
        if n_held < len(keys):
            self._put(keys, n_held, blocks, hint)
        return n_held

    def _put(
        self, keys: Keys, n_held: int, blocks: npt.NDArray[np.uint64], hint: Hint | None
    ) -> None:
        payloads = self._payloads[: len(keys) - n_held]
        payloads[:, :8] = blocks[n_held:].view(np.uint8).reshape(-1, 8)
        self._kv.put_from(
            self._ns,
            keys[n_held:],
            list(payloads),
            parent=keys[n_held - 1] if n_held else None,
            hint=hint,
            timeout_s=_PUT_S,
        )

    def _hint(self, request: Request) -> Hint | None:
        if not self._hints:
            return None
        turn = request.turn if request.turn >= 0 else None
        return Hint(request.session, turn, request.kind, request.finish)


def _told_by(kv: Client) -> tuple[int, float]:
    """Bytes written to SSD, and seconds spent on learning."""
    stats = kv.stats()
    require("counters" in stats, f"the daemon gave no counters: {stats.get('reason')}")
    return int(stats["counters"]["saved_bytes"]), float(stats["plan"].get("train_s", 0.0))
