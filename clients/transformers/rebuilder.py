"""Serving rebuilds with a model of transformers: the store gives tokens, and gets payloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from blobstore.clients.rebuild_job import RebuildJob
from blobstore.clients.transformers.recompute import Portion


class Portions(Protocol):
    """As StoredCache.portions."""

    def __call__(
        self, token_ids: object, parent: Sequence[memoryview], tokens_at_once: int
    ) -> Iterator[Portion]:
        """Compute blobs again, some at a time."""


class Rebuilder:
    """The handler of a model's jobs: `kv.serve_rebuilds([cache.ns], Rebuilder(…))`.

    Hands each portion over as soon as it is computed, and stops when the rest is not
    wanted any more. InvalidRequest, which fails the job, for tokens that are no full blobs.
    """

    def __init__(self, portions: Portions, tokens_at_once: int) -> None:
        self._portions = portions
        self._tokens_at_once = tokens_at_once

    def __call__(self, job: RebuildJob) -> None:
        """Compute the blobs of `job`, on from the leased ones before it."""
        parent = job.parent if job.parent is not None else ()
        for portion in self._portions(job.tokens, parent, self._tokens_at_once):
            for blob in portion.blobs:
                portion.write(blob, job[blob])
            job.seal(portion.blobs[-1])
            if portion.blobs.stop >= job.wanted:
                return
