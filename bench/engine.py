"""An inference engine in small: a process that answers questions with SmolLM2.

It does what a real engine does with the store. Before it computes, it asks how
much of the prompt is known and takes that; afterwards it puts what was new. One
job per line on standard input, one turn per line on standard output, both JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blobstore.bench.chat import Chat
from blobstore.bench.kv_cache import KVCache
from blobstore.bench.model_file import MODEL, ModelFile, ModelSizes
from blobstore.bench.smollm2 import SmolLM2
from blobstore.clients import Client, KVLayout, LayerGroup, Namespace
from blobstore.digest import payload_digest, piece_digests

CHUNK_TOKENS = 64
"""Tokens per blob: 1.4 MiB of bf16, and a short wait for the chunk that a question fills."""

CONTEXT_TOKENS = 2560
RESTORE_TIMEOUT_S = 300.0
"""Long, because what is rebuilt takes as long as to compute it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to be answered."""

    ids: list[int]
    max_tokens: int
    restore: bool
    """Take from the store what it has of the prompt; if not, compute all of it."""
    store: str
    """Put what was computed, with this retention; "" puts nothing."""
    prefix_tokens: int = 0
    """Of a prompt that is computed: the head whose time is `restore_s`, in full chunks."""


@dataclass(slots=True)
class Turn:
    """An answer, and what it took."""

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    restored_blobs: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    served: dict[str, int] = field(default_factory=dict)
    """Blobs restored, by where they came from."""
    restore_s: float = 0.0
    """From the prompt's ids until the state of its head is here."""
    first_token_s: float = 0.0
    """From the prompt's ids to the first token, the restore included."""
    total_s: float = 0.0
    store_s: float = 0.0
    puts: dict[str, int] = field(default_factory=dict)
    """Blobs put, by result."""
    state: str = ""
    """A digest of all full chunks: of equal contexts, however they came about, it is equal."""


def namespace(sizes: ModelSizes, weights_digest: str) -> Namespace:
    """The identity of this engine's KV."""
    group = LayerGroup.attention(
        layers=sizes.layers, heads=sizes.kv_heads, head_size=sizes.head_size, dtype="bf16"
    )
    return Namespace(
        model=MODEL,
        weights_digest=weights_digest,
        layout=KVLayout((group,), order="layer,kv,head,token"),
        dtype="fp32",
        tokens_per_blob=CHUNK_TOKENS,
    )


def warm(model: SmolLM2, capacity_tokens: int) -> KVCache:
    """A cache whose memory is taken, of a model that has run once: as before a first request."""
    cache = KVCache(
        model.sizes, chunk_tokens=CHUNK_TOKENS, capacity_tokens=capacity_tokens, dtype="bf16"
    )
    model.prefill([0] * CHUNK_TOKENS, cache)
    model.decode(0, cache)
    return cache


class Engine:
    """The model and a client of the store."""

    def __init__(self, file: ModelFile, store: Client, capacity_tokens: int) -> None:
        self._chat = Chat(file)
        self._model = SmolLM2(file)
        self._store = store
        self._ns = store.namespace(namespace(file.sizes, file.digest))
        self._cache = warm(self._model, capacity_tokens)

    def answer(self, job: Job) -> Turn:
        """Do one job. The cache of the job before is not used: only the store carries state."""
        turn, cache = Turn(prompt_tokens=len(job.ids)), self._cache
        cache.truncate(0)
        started_s = time.perf_counter()
        if job.restore:
            self._restore(job.ids, turn)
        else:
            self._model.read(job.ids[: job.prefix_tokens], cache)
        turn.restore_s = time.perf_counter() - started_s
        for token in self._model.generate(job.ids, cache, job.max_tokens):
            if not turn.tokens:
                turn.first_token_s = time.perf_counter() - started_s
            turn.tokens.append(token)
        turn.total_s = time.perf_counter() - started_s
        if job.store:
            self._put(job.ids + turn.tokens, job.store, turn)
            turn.store_s = time.perf_counter() - started_s - turn.total_s
        turn.text = self._chat.text(turn.tokens)
        turn.state = _state(cache)
        return turn

    def _restore(self, ids: Sequence[int], turn: Turn) -> None:
        """Fill the cache with the leading blobs of `ids` that the store has."""
        # The logits come out of the last token, so at least its chunk is computed.
        keys = self._ns.keys(ids)[: (len(ids) - 1) // CHUNK_TOKENS]
        if not keys:
            return
        with self._store.get(self._ns, keys, timeout_s=RESTORE_TIMEOUT_S) as lease:
            for chunk in range(len(lease)):
                self._cache.import_chunk(chunk, lease[chunk])
            self._cache.settle(len(lease))
            turn.restored_blobs, turn.served = len(lease), dict(lease.served)
        turn.restored_tokens = turn.restored_blobs * CHUNK_TOKENS
        turn.restored_bytes = turn.restored_blobs * self._cache.chunk_nbytes

    def _put(self, ids: Sequence[int], retention: str, turn: Turn) -> None:
        """Store the settled chunks that did not come from the store."""
        cache, first = self._cache, turn.restored_blobs
        context = ids[: cache.chunks * CHUNK_TOKENS]
        keys = self._ns.keys(context)
        fresh = keys[first:]
        if not fresh:
            return
        with self._store.put(
            self._ns,
            fresh,
            token_ids=context[first * CHUNK_TOKENS :],
            parent=keys[first - 1] if first else None,
            retention=retention,
        ) as writer:
            for number in range(len(fresh)):
                cache.export_chunk(first + number, writer[number])
        for result in writer.results:
            turn.puts[result] = turn.puts.get(result, 0) + 1


def _state(cache: KVCache) -> str:
    payload = memoryview(bytearray(cache.chunk_nbytes))
    digests = []
    for chunk in range(cache.chunks):
        cache.export_chunk(chunk, payload)
        digests.append(payload_digest(payload.nbytes, piece_digests(payload)))
    joined = memoryview(b"".join(digests))
    return payload_digest(joined.nbytes, piece_digests(joined)).hex()


def main(address: str, capacity_tokens: int, layers: int) -> None:
    """Answer the jobs on standard input with a client of `address`."""
    with Client(address, timeout_s=60.0) as store:
        engine = Engine(ModelFile(layers=layers), store, capacity_tokens)
        say({"ready": True})
        for line in sys.stdin:
            body: dict[str, Any] = json.loads(line)
            say(asdict(engine.answer(Job(**body))))


def say(body: object) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
