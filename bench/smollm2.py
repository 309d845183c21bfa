"""SmolLM2-135M in NumPy: a small stand-in for the engine that owns the kernels.

A matrix product may give other bits when its shapes differ, so that equal
tokens after a restore would be luck. Here they follow from the shapes: every
settled chunk is computed whole, with its past, in products of shapes that
depend on its position alone. A partial chunk is padded to the same shapes; a
decoded token attends to the chunk's full width, masked; and a chunk that
decoding completes is computed once more as a whole. The state of a settled
chunk is thereby a function of its ids and their past, however it came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blobstore.bench.kv_cache import KVCache
from blobstore.bench.model_file import Array, ModelFile, ModelSizes
from blobstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; products that share their input are one matrix."""

    attn_norm: Array
    qkv: Array
    attn_output: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


class SmolLM2:
    """The model: weights, rotary tables and the forward pass. One thread at a time."""

    def __init__(self, file: ModelFile) -> None:
        self.sizes: ModelSizes = file.sizes
        weights = file.weights()
        self._embedding = weights["token_embd.weight"]
        self._output_norm = weights["output_norm.weight"]
        self._output = weights.get("output.weight", self._embedding)
        self._layers = [_layer(weights, n) for n in range(self.sizes.layers)]
        self._cos, self._sin = _rotary_tables(self.sizes)

    def read(self, ids: Sequence[int], cache: KVCache) -> None:
        """Add whole chunks to the settled ones of `cache`: their state alone, no logits."""
        size = cache.chunk_tokens
        if len(ids) % size or cache.chunks * size + len(ids) > cache.capacity_tokens:
            raise InvalidRequest(
                f"{len(ids)} tokens after {cache.chunks} chunks of {size}: the cache takes whole "
                f"chunks, and {cache.capacity_tokens} tokens"
            )
        for start in range(0, len(ids), size):
            self._chunk(ids[start : start + size], cache.chunks, cache)
            cache.settle(cache.chunks + 1)

    def prefill(self, ids: Sequence[int], cache: KVCache) -> Array:
        """Bring `cache`, which holds leading chunks of `ids`, to all of `ids`.

        Returns the logits of the next token. At least the last chunk is
        computed, since the logits come out of it.
        """
        if not 0 < len(ids) <= cache.capacity_tokens:
            raise InvalidRequest(
                f"{len(ids)} tokens given; the cache takes 1 to {cache.capacity_tokens}"
            )
        size = cache.chunk_tokens
        last = (len(ids) - 1) // size
        cache.truncate(last)
        for chunk in range(cache.chunks, last + 1):
            here = ids[chunk * size : (chunk + 1) * size]
            hidden = self._chunk(here, chunk, cache)
            full = len(here) == size
            cache.settle(chunk + full, () if full else here)
        return self._logits(hidden[len(here) - 1])

    def decode(self, token: int, cache: KVCache) -> Array:
        """Add one token to the context and return the logits of the next."""
        position, size = cache.n_tokens, cache.chunk_tokens
        if position >= cache.capacity_tokens:
            raise InvalidRequest(f"the cache is full: {cache.capacity_tokens} tokens")
        ids = [*cache.open_ids, token]
        if len(ids) == size:
            hidden = self._chunk(ids, cache.chunks, cache)[-1]
            cache.settle(cache.chunks + 1)
        else:
            end = (cache.chunks + 1) * size
            hidden = self._forward(np.array([token]), position, end, cache)[0]
            cache.settle(cache.chunks, ids)
        return self._logits(hidden)

    def generate(self, ids: Sequence[int], cache: KVCache, max_tokens: int) -> Iterator[int]:
        """Continue `ids` greedily, until the end token (which is given too) or `max_tokens`."""
        logits = self.prefill(ids, cache)
        for n in range(1, max_tokens + 1):
            token = int(logits.argmax())
            yield token
            if token == self.sizes.end_token or n == max_tokens:
                return
            logits = self.decode(token, cache)

    def _chunk(self, ids: Sequence[int], chunk: int, cache: KVCache) -> Array:
        padded = np.zeros(cache.chunk_tokens, np.int64)
        padded[: len(ids)] = ids
        start = chunk * cache.chunk_tokens
        return self._forward(padded, start, start + cache.chunk_tokens, cache)

    def _forward(self, ids: np.ndarray, start: int, end: int, cache: KVCache) -> Array:
        """Hidden states of `ids` at positions from `start`, attending to all before `end`."""
        rows = len(ids)
        first = start % cache.chunk_tokens
        mask = _causal_mask(cache.chunk_tokens)[first : first + rows]
        hidden: Array = self._embedding[ids]
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attention(number, layer, hidden, start, end, mask, cache)
            gate, up = np.split(self._norm(hidden, layer.ffn_norm) @ layer.gate_up.T, 2, axis=1)
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        return hidden

    def _attention(
        self,
        number: int,
        layer: _Layer,
        hidden: Array,
        start: int,
        end: int,
        mask: Array,
        cache: KVCache,
    ) -> Array:
        sizes, rows = self.sizes, len(hidden)
        group = sizes.heads // sizes.kv_heads
        qkv = (self._norm(hidden, layer.attn_norm) @ layer.qkv.T).reshape(rows, -1, sizes.head_size)
        rotated = self._rotate(qkv[:, : sizes.heads + sizes.kv_heads], start)
        values = qkv[:, sizes.heads + sizes.kv_heads :]
        cache.write(number, start, rotated[:, sizes.heads :], values)
        # One row of queries per (head, token); 1/sqrt(64) is a power of two, so exact.
        queries: Array = rotated[:, : sizes.heads].transpose(1, 0, 2) * np.float32(
            sizes.head_size**-0.5
        )
        mixed = np.empty((sizes.heads, rows, sizes.head_size), np.float32)
        for head in range(sizes.kv_heads):
            own = slice(head * group, (head + 1) * group)
            flat = queries[own].reshape(group * rows, sizes.head_size)
            scores: Array = (flat @ cache.keys(number, head, end).T).reshape(group, rows, end)
            scores[..., end - len(mask[0]) :] += mask
            weights = _softmax(scores).reshape(group * rows, end)
            mixed[own] = (weights @ cache.values(number, head, end)).reshape(mixed[own].shape)
        return mixed.transpose(1, 0, 2).reshape(rows, -1) @ layer.attn_output.T

    def _rotate(self, heads: Array, start: int) -> Array:
        """Rotary embedding of neighbouring pairs (the GGUF's weights are permuted for it)."""
        end = start + len(heads)
        cos, sin = self._cos[start:end, None], self._sin[start:end, None]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        rotated = np.empty_like(heads)
        rotated[..., 0::2] = even * cos - odd * sin
        rotated[..., 1::2] = even * sin + odd * cos
        return rotated

    def _norm(self, hidden: Array, weight: Array) -> Array:
        mean = (hidden * hidden).mean(-1, keepdims=True)
        normed: Array = hidden / np.sqrt(mean + np.float32(self.sizes.norm_epsilon)) * weight
        return normed

    def _logits(self, hidden: Array) -> Array:
        logits: Array = self._output @ self._norm(hidden, self._output_norm)
        return logits


def _layer(weights: dict[str, Array], number: int) -> _Layer:
    def take(*names: str) -> Array:
        return np.concatenate([weights.pop(f"blk.{number}.{name}.weight") for name in names])

    return _Layer(
        attn_norm=take("attn_norm"),
        qkv=take("attn_q", "attn_k", "attn_v"),
        attn_output=take("attn_output"),
        ffn_norm=take("ffn_norm"),
        gate_up=take("ffn_gate", "ffn_up"),
        down=take("ffn_down"),
    )


def _rotary_tables(sizes: ModelSizes) -> tuple[Array, Array]:
    """Cosines and sines of every position: positions x half a head."""
    rates = sizes.rope_base ** (-np.arange(0, sizes.head_size, 2) / sizes.head_size)
    angles = np.arange(sizes.context_tokens)[:, None] * rates
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _causal_mask(tokens: int) -> Array:
    """0 where a row may attend, minus infinity where the column comes after it."""
    return np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)


def _softmax(scores: Array) -> Array:
    """Softmax over the last axis, in place."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores
