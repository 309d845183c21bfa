"""Keys and values between a DynamicCache and payloads: one copy each way.

Reads and writes leased memory in place. A cache holds plain layers whole and
sliding-window layers from the window's start on, as transformers keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blobstore.clients.transformers import libraries
from blobstore.clients.transformers.layers import Layer, check_kind, dtype_of
from blobstore.clients.transformers.libraries import Tensor
from blobstore.clients.transformers.window import remembering_window
from blobstore.errors import InvalidRequest, SizeMismatch
from blobstore.layout import KVLayout

Pair = tuple[Tensor, Tensor]
"""Keys and values, each heads x tokens x head size."""


class States:
    """The keys and values of one model, in caches and in payloads of `tokens_per_blob` tokens."""

    def __init__(self, model: Any, layers: Sequence[Layer], layout: KVLayout, tokens: int) -> None:
        self._config = model.config
        self._layers = layers
        self.tokens = tokens
        self._parts = layout.parts(tokens)
        self.nbytes = layout.nbytes(tokens)
        self.slides = any(layer.shape.window for layer in layers)

    def empty(self) -> Any:
        """A DynamicCache that holds nothing yet, and forgets nothing before it is stored."""
        cache = libraries.cache_utils().DynamicCache(config=self._config)
        for layer in self._layers:
            if layer.shape.window:
                cache.layers[layer.number] = remembering_window()(layer.shape.window)
        return cache

    def length(self, cache: Any) -> int:
        """How many tokens `cache` holds. InvalidRequest unless it is one of this model's."""
        kind = type(cache).__name__
        if kind != "DynamicCache":
            raise InvalidRequest(f"a {kind} cannot be stored: use a DynamicCache, as of restore")
        lengths = set()
        for layer in self._layers:
            if layer.number >= len(cache.layers):
                if len(cache.layers) == 0:
                    return 0
                raise InvalidRequest(
                    f"the cache has {len(cache.layers)} layers, this model at least "
                    f"{layer.number + 1}"
                )
            held = cache.layers[layer.number]
            check_kind(held, layer.number)
            lengths.add(held.get_seq_length())
            if held.get_seq_length():
                self._check(layer, held)
        if len(lengths) != 1:
            raise InvalidRequest(f"layers of the cache hold {sorted(lengths)} tokens: not alike")
        return int(lengths.pop())

    def earliest(self, cache: Any) -> int:
        """From which position on `cache` still holds all layers."""
        return max(_first(cache.layers[layer.number]) for layer in self._layers)

    def forget(self, cache: Any, end: int) -> None:
        """Positions before `end` are stored: what left the windows there may go."""
        for layer in self._layers:
            held = cache.layers[layer.number]
            if hasattr(held, "forget"):
                held.forget(end)

    def write(self, cache: Any, blob: int, payload: memoryview) -> None:
        """Copy the tokens of blob number `blob` out of `cache` to `payload`."""
        torch = libraries.torch()
        start = blob * self.tokens
        with torch.no_grad():
            memory = torch.frombuffer(payload, dtype=torch.uint8)
            for layer, pair in zip(self._layers, self._pairs(memory), strict=True):
                _copy_out(cache.layers[layer.number], start, pair)

    def filling(self, blobs: int) -> Filling:
        """A cache to be filled with the first `blobs` blobs of a context."""
        return Filling(self, blobs)

    def _check(self, layer: Layer, held: Any) -> None:
        keys, shape = held.keys, layer.shape
        if keys.shape[0] != 1:
            raise InvalidRequest(
                f"the cache holds a batch of {keys.shape[0]}: contexts are stored one by one"
            )
        found = (keys.shape[1], keys.shape[3], held.values.shape[3], dtype_of(keys))
        if found != (shape.heads, shape.key_size, shape.value_size, shape.dtype):
            raise InvalidRequest(
                f"layer {layer.number} of the cache holds heads, key size, value size and dtype "
                f"{found}, this model {shape}: it is another model's"
            )

    def _pairs(self, memory: Tensor) -> list[Pair]:
        """Keys and values of each layer in the bytes of a payload."""
        pairs = []
        for layer, part in zip(self._layers, self._parts, strict=True):
            shape = layer.shape
            dtype = _torch_dtype(shape.dtype)
            numbers = memory[part.offset : part.offset + part.nbytes].view(dtype)
            border = shape.heads * self.tokens * shape.key_size
            pairs.append(
                (
                    numbers[:border].view(shape.heads, self.tokens, shape.key_size),
                    numbers[border:].view(shape.heads, self.tokens, shape.value_size),
                )
            )
        return pairs


class Filling:
    """A cache that takes the payloads of a context's first blobs, in order."""

    def __init__(self, states: States, blobs: int) -> None:
        self._states = states
        self._end = blobs * states.tokens
        self._targets = [self._allocated(layer) for layer in states._layers]

    def read(self, blob: int, payload: memoryview) -> None:
        """Copy what a reader needs of blob number `blob`. The payload is not kept."""
        states = self._states
        if payload.nbytes != states.nbytes:
            raise SizeMismatch(
                f"blob {blob} has {payload.nbytes} bytes, this model's have {states.nbytes}"
            )
        torch = libraries.torch()
        # DLPack, because the other ways from read-only memory warn.
        memory = torch.from_dlpack(np.frombuffer(payload, np.uint8))
        at, n = blob * states.tokens, states.tokens
        for layer, target, source in zip(
            states._layers, self._targets, states._pairs(memory), strict=True
        ):
            first = layer.shape.start(self._end)
            skipped = max(0, first - at)
            if skipped < n:
                where = slice(at + skipped - first, at + n - first)
                for to, of in zip(target, source, strict=True):
                    to[0, :, where].copy_(of[:, skipped:])

    def cache(self) -> Any:
        """The DynamicCache, with all its blobs read."""
        past = self._states.empty()
        for layer, (keys, values) in zip(self._states._layers, self._targets, strict=True):
            held = past.layers[layer.number]
            held.lazy_initialization(keys, values)
            held.keys, held.values = keys, values
            if layer.shape.window:
                held.cumulative_length = held.first = self._end
        return past

    def _allocated(self, layer: Layer) -> Pair:
        torch, shape = libraries.torch(), layer.shape
        length = self._end - shape.start(self._end)
        keys, values = (
            torch.empty(
                (1, shape.heads, length, size),
                dtype=_torch_dtype(shape.dtype),
                device=layer.device,
            )
            for size in (shape.key_size, shape.value_size)
        )
        return keys, values


def _torch_dtype(name: str) -> Any:
    torch = libraries.torch()
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _first(held: Any) -> int:
    """The position from which on a layer of a cache holds all."""
    if hasattr(held, "pieces"):
        return min(int(held.first), _window_start(held))
    return _window_start(held)


def _window_start(held: Any) -> int:
    return int(held.get_seq_length()) - (held.keys.shape[-2] if held.get_seq_length() else 0)


def _copy_out(held: Any, start: int, pair: Pair) -> None:
    """Copy positions from `start` on, as many as `pair` takes."""
    pieces = [(held.keys, held.values)]
    at = _window_start(held)
    if at > start:
        pieces, at = held.pieces, held.first
    end = start + pair[0].shape[1]
    for piece in pieces:
        first, last = max(start, at), min(end, at + piece[0].shape[-2])
        if first < last:
            for to, of in zip(pair, piece, strict=True):
                to[:, first - start : last - start].copy_(of[0, :, first - at : last - at])
        at += piece[0].shape[-2]
