"""A model runner that serves rebuilds: the same model as the engines', in a process of its own.

It also computes the ids of a line on standard input, for nobody, and says how long that took:
what a rebuild cannot be faster than. There must be no job meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from blobstore.bench.engine import CHUNK_TOKENS, namespace, say, warm
from blobstore.bench.model_file import ModelFile
from blobstore.bench.smollm2 import SmolLM2
from blobstore.clients import Client
from blobstore.clients.rebuild_job import RebuildJob


class Rebuilder:
    """The handler: computes the chunks of a job, each handed over as soon as it is there."""

    def __init__(self, file: ModelFile, capacity_tokens: int) -> None:
        self._model = SmolLM2(file)
        self._cache = warm(self._model, capacity_tokens)

    def __call__(self, job: RebuildJob) -> None:
        """Fill the payloads of `job`, on from the leased chunks before it."""
        cache, parent = self._cache, job.parent or ()
        cache.truncate(0)
        for chunk in range(len(parent)):
            cache.import_chunk(chunk, parent[chunk])
        cache.settle(len(parent))
        for number in range(len(job)):
            if number >= job.wanted:
                return
            start = number * CHUNK_TOKENS
            self._model.read(job.tokens[start : start + CHUNK_TOKENS].tolist(), cache)
            cache.export_chunk(len(parent) + number, job[number])
            job.seal(number)

    def cold_s(self, ids: Sequence[int]) -> float:
        """The seconds that it takes to compute whole chunks, from their first one on."""
        self._cache.truncate(0)
        started_s = time.perf_counter()
        self._model.read(ids, self._cache)
        return time.perf_counter() - started_s


def main(address: str, capacity_tokens: int, layers: int) -> None:
    """Serve until standard input ends."""
    file = ModelFile(layers=layers)
    handler = Rebuilder(file, capacity_tokens)
    with Client(address, timeout_s=60.0) as kv:
        ns = kv.namespace(namespace(file.sizes, file.digest))
        with kv.serve_rebuilds([ns], handler):
            say({"ready": True})
            for line in sys.stdin:
                say({"cold_s": handler.cold_s(json.loads(line))})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
