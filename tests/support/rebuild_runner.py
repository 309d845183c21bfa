"""A model runner as a process of its own: what it computes is a function of the tokens.

    python -m tests.support.rebuild_runner ADDRESS WAY

It says {"job": blobs} when a job comes, then does it in its WAY: "make" at once, "gate" once
told to, "raise" never, "skip" leaves the second blob out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from blobstore.clients import BoundNamespace, Client, KVLayout, Namespace, RebuildJob
from tests.support.program import Program, say

NBYTES = 64 << 10
TOKENS = 16
NAMESPACE = Namespace("rebuilt", KVLayout.opaque(NBYTES), tokens_per_blob=TOKENS)
WAYS = ("make", "gate", "raise", "skip")

_gate = threading.Semaphore(0)


def payload_of(context: np.ndarray, tokens: np.ndarray) -> bytes:
    """The payload of a blob: of its tokens and all before, as a model's."""
    rng = np.random.default_rng([int(context.sum()), *map(int, tokens)])
    return rng.bytes(NBYTES)


def ids_of(n_blobs: int, seed: int = 0) -> np.ndarray:
    """The token ids of a context."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, n_blobs * TOKENS, dtype=np.uint32)


def payloads_of(ids: np.ndarray) -> list[bytes]:
    """Those of all blobs of a context."""
    starts = range(0, len(ids), TOKENS)
    return [payload_of(ids[:start], ids[start : start + TOKENS]) for start in starts]


def read(kv: Client, ns: BoundNamespace, ids: np.ndarray) -> tuple[list[bytes], str]:
    """What comes of a context, and why no more."""
    with kv.get(ns, ns.keys(ids)) as lease:
        return [bytes(view) for view in lease], lease.reason


def rebuilds(kv: Client) -> dict[str, Any]:
    """What the daemon says of its rebuilds."""
    stats: dict[str, Any] = kv.stats()["rebuild"]
    return stats


def put_and_drop(kv: Client, ns: BoundNamespace, ids: np.ndarray, *, keep: int = 0) -> list[bytes]:
    """Put a context and drop all but its first blobs: what has to come back."""
    keys, payloads = ns.keys(ids), payloads_of(ids)
    assert set(kv.put_from(ns, keys, payloads, token_ids=ids)) == {"stored"}
    assert kv.drop(ns, keys[keep:]) == len(keys) - keep
    return payloads


@contextmanager
def runner(address: str, way: str = "make") -> Iterator[Program]:
    """A runner that is registered."""
    with Program("tests.support.rebuild_runner", address, way) as program:
        assert program.hear() == "ready"
        yield program


def make(job: RebuildJob) -> None:
    """Compute all that is wanted."""
    assert job.context is not None
    ids = np.concatenate([job.context, job.tokens])
    for index in range(len(job)):
        if index >= job.wanted:
            return
        start = job.position + index * TOKENS
        job[index][:] = payload_of(ids[:start], job.blob_tokens(index))
        job.seal(index)


def _handler(way: str) -> object:
    def handle(job: RebuildJob) -> None:
        say({"job": len(job), "position": job.position})
        if way == "raise":
            raise RuntimeError("this runner cannot")
        if way == "skip":
            for index in (0, *range(2, len(job))):
                job[index][:] = bytes(NBYTES)
            return
        if way == "gate":
            _gate.acquire()
        make(job)

    return handle


def _main(address: str, way: str) -> None:
    assert way in WAYS
    with Client(address, timeout_s=20.0) as kv:
        ns = kv.namespace(NAMESPACE)
        with kv.serve_rebuilds([ns], _handler(way)) as server:  # type: ignore[arg-type]
            say("ready")
            for line in sys.stdin:
                if line.strip() == '"stats"':
                    say(server.stats())
                else:
                    _gate.release()


if __name__ == "__main__":
    _main(*sys.argv[1:])
