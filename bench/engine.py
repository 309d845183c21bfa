"""An inference engine in small: a process that answers questions with SmolLM2.

It does what a real engine does with the store. Before it computes, it asks how
much of the prompt is known and takes that; afterwards it puts what was new. One
job per line on standard input, one turn per line on standard output, both JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blobstore.bench.chat import Chat
from blobstore.bench.kv_cache import KVCache
from blobstore.bench.model_file import MODEL, ModelFile, ModelSizes
from blobstore.bench.smollm2 import SmolLM2
from blobstore.clients import Client, KVLayout, LayerGroup, Namespace

CHUNK_TOKENS = 64
"""Tokens per blob: 1.4 MiB of bf16, and a short wait for the chunk that a question fills."""

CONTEXT_TOKENS = 2560


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to continue. `messages` are pairs of a role and a text or token ids."""

    messages: list[tuple[str, str | list[int]]]
    max_tokens: int
    restore: bool
    """Take from the store what it has of the prompt; if not, compute all of it."""
    store: bool
    """Put what was computed; `durable`, so that it survives a crash."""


@dataclass(slots=True)
class Turn:
    """An answer, and what it took."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    restored_blobs: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    first_token_s: float = 0.0
    """From the prompt's ids to the first token, the restore included."""
    total_s: float = 0.0
    puts: dict[str, int] = field(default_factory=dict)
    """Blobs put, by result."""

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt_ids)


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


class Engine:
    """The model and a client of the store."""

    def __init__(self, file: ModelFile, store: Client) -> None:
        self._chat = Chat(file)
        self._model = SmolLM2(file)
        self._store = store
        self._ns = store.namespace(namespace(file.sizes, file.digest))
        # As engines do: memory is taken, and everything has run once, before the first request.
        self._cache = KVCache(
            file.sizes, chunk_tokens=CHUNK_TOKENS, capacity_tokens=CONTEXT_TOKENS, dtype="bf16"
        )
        self._model.prefill([0] * CHUNK_TOKENS, self._cache)
        self._model.decode(0, self._cache)

    def answer(self, job: Job) -> Turn:
        """Do one job. The cache of the job before is not used: only the store carries state."""
        ids = list(self._prompt(job.messages))
        turn, cache = Turn(prompt_ids=ids), self._cache
        cache.truncate(0)
        started_s = time.perf_counter()
        if job.restore:
            self._restore(ids, turn)
            turn.restore_s = time.perf_counter() - started_s
        for token in self._model.generate(ids, cache, job.max_tokens):
            if not turn.tokens:
                turn.first_token_s = time.perf_counter() - started_s
            turn.tokens.append(token)
        turn.total_s = time.perf_counter() - started_s
        turn.text = self._chat.text(turn.tokens)
        if job.store:
            self._put(ids + turn.tokens, turn)
        return turn

    def _prompt(self, messages: Sequence[tuple[str, str | list[int]]]) -> Iterator[int]:
        for number, (role, content) in enumerate(messages):
            if not isinstance(content, str):
                yield from self._chat.answered(content)
            elif number + 1 == len(messages):
                yield from self._chat.ask(content)
            elif role == "user":
                yield from self._chat.ask(content)  # its answer follows
            else:
                yield from self._chat.turn(role, content)

    def _restore(self, ids: Sequence[int], turn: Turn) -> None:
        """Fill the cache with the leading blobs of `ids` that the store has."""
        # The logits come out of the last token, so at least its chunk is computed.
        keys = self._ns.keys(ids)[: (len(ids) - 1) // CHUNK_TOKENS]
        if not keys:
            return
        with self._store.get(self._ns, keys, timeout_s=30.0) as lease:
            for chunk in range(len(lease)):
                self._cache.import_chunk(chunk, lease[chunk])
            self._cache.settle(len(lease))
            turn.restored_blobs = len(lease)
        turn.restored_tokens = turn.restored_blobs * CHUNK_TOKENS
        turn.restored_bytes = turn.restored_blobs * self._cache.chunk_nbytes

    def _put(self, ids: Sequence[int], turn: Turn) -> None:
        """Store the settled chunks that did not come from the store."""
        cache, first = self._cache, turn.restored_blobs
        keys = self._ns.keys(ids[: cache.chunks * CHUNK_TOKENS])
        fresh = keys[first:]
        if not fresh:
            return
        parent = keys[first - 1] if first else None
        with self._store.put(self._ns, fresh, parent=parent, retention="durable") as writer:
            for number in range(len(fresh)):
                cache.export_chunk(first + number, writer[number])
        for result in writer.results:
            turn.puts[result] = turn.puts.get(result, 0) + 1


def main(address: str) -> None:
    """Answer the jobs on standard input with a client of `address`."""
    with Client(address, timeout_s=60.0) as store:
        engine = Engine(ModelFile(), store)
        _say({"ready": True})
        for line in sys.stdin:
            body: dict[str, Any] = json.loads(line)
            _say(asdict(engine.answer(Job(**body))))


def _say(body: object) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
