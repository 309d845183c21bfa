"""What a model keeps per token: found by running it on one token, and told as a KVLayout.

The configuration says which layers keep what, in as many ways as there are model
families; the tensors of a cache after one token say it in one way. Layers of a kind
that is not known here are refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from blobstore.clients.transformers import libraries
from blobstore.clients.transformers.libraries import Tensor
from blobstore.errors import InvalidRequest
from blobstore.layout import KVLayout, LayerGroup

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
"""Those of keys and values that can be stored, by torch's name."""

_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_HOLDS_NOTHING = "DummyLayer"
"""Of a layer that uses another one's keys and values, or has no attention."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one layer keeps of a token: `heads` keys and values.

    With a `window` (0: none) attention reads back `window - 1` tokens and no further.
    """

    heads: int
    key_size: int
    value_size: int
    dtype: str
    window: int = 0

    @property
    def values_per_token(self) -> int:
        """Numbers, of keys and values together."""
        return self.heads * (self.key_size + self.value_size)

    def start(self, end: int) -> int:
        """The first position that a reader needs of this layer to continue at `end`."""
        return max(0, end - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that keeps something: its number in the cache, its shape, and where it lives."""

    number: int
    shape: Shape
    device: Any


def probe(model: Any) -> tuple[Layer, ...]:
    """The layers of `model` that keep something. Runs it on one token.

    Raises InvalidRequest naming the layer if there is one of an unknown kind.
    """
    torch = libraries.torch()
    cache = libraries.cache_utils().DynamicCache(config=model.config)
    if not cache.layers:
        raise InvalidRequest(f"{name_of(model)}: its configuration does not tell its cache layers")
    for number, layer in enumerate(cache.layers):
        check_kind(layer, number)
    try:
        with torch.no_grad():
            run(model, torch.zeros((1, 1), dtype=torch.long, device=model.device), cache)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{name_of(model)} does not run on one token and a DynamicCache: {error}"
        ) from error
    return tuple(_observed(model, cache.layers))


def run(model: Any, ids: Tensor, cache: Any) -> None:
    """Let `model` read `ids` into `cache`."""
    takes = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in takes:
        options["logits_to_keep"] = 1
    model(input_ids=ids, **options)


def cache_argument(model: Any) -> str:
    """What the model calls the cache that it is given; InvalidRequest if it takes none."""
    takes = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in takes:
            return name
    raise InvalidRequest(f"{name_of(model)} takes no cache of keys and values")


def name_of(model: Any) -> str:
    """The class of the model, for messages."""
    return type(model).__name__


def check_kind(layer: Any, number: int) -> None:
    """InvalidRequest unless it is a plain or sliding-window layer, or an empty one."""
    kind = type(layer).__name__
    if kind not in (*_KNOWN, "RememberingWindow"):
        raise InvalidRequest(
            f"cache layer {number} is a {kind}: known are plain attention and sliding windows "
            f"({', '.join(_KNOWN)})"
        )


def _observed(model: Any, layers: Sequence[Any]) -> Iterator[Layer]:
    dtypes = set()
    for number, layer in enumerate(layers):
        if type(layer).__name__ == _HOLDS_NOTHING:
            continue
        if not layer.is_initialized or layer.get_seq_length() != 1:
            raise InvalidRequest(
                f"{name_of(model)} keeps nothing in its cache layer {number}: what it keeps "
                "elsewhere cannot be stored"
            )
        keys, values = layer.keys, layer.values
        dtypes.add(dtype_of(keys))
        dtypes.add(dtype_of(values))
        if len(dtypes) > 1:
            raise InvalidRequest(f"{name_of(model)} keeps several dtypes: {sorted(dtypes)}")
        window = int(layer.sliding_window) if layer.is_sliding else 0
        shape = Shape(keys.shape[1], keys.shape[3], values.shape[3], dtype_of(keys), window)
        if values.shape[:3] != keys.shape[:3]:
            raise InvalidRequest(
                f"cache layer {number} keeps {keys.shape[1]} keys, but {values.shape[1]} values"
            )
        yield Layer(number, shape, keys.device)
    if not dtypes:
        raise InvalidRequest(f"{name_of(model)} keeps nothing in its cache")


def dtype_of(tensor: Tensor) -> str:
    """Its dtype by the store's name; InvalidRequest for one that is not stored."""
    name = str(tensor.dtype)
    if name not in DTYPES:
        raise InvalidRequest(f"keys and values of {name} cannot be stored: {', '.join(DTYPES)} can")
    return DTYPES[name]


def layout(layers: Sequence[Layer]) -> KVLayout:
    """The payload: layer by layer keys, then values, each as heads x tokens x head size."""
    shapes = [layer.shape for layer in layers]
    groups = tuple(_group(shape, len(list(run))) for shape, run in groupby(shapes))
    return KVLayout(groups, order=_order(shapes))


def _group(shape: Shape, layers: int) -> LayerGroup:
    both = shape.key_size + shape.value_size
    if shape.heads == 1 and shape.key_size != shape.value_size and not shape.window:
        return LayerGroup.latent(layers=layers, width=both, dtype=shape.dtype)
    if both % 2:
        raise InvalidRequest(
            f"heads of {shape.key_size} key and {shape.value_size} value numbers: their sum is odd"
        )
    sizes = {"layers": layers, "heads": shape.heads, "head_size": both // 2}
    if shape.window:
        return LayerGroup.sliding(**sizes, window=shape.window, dtype=shape.dtype)
    return LayerGroup.attention(**sizes, dtype=shape.dtype)


def _order(shapes: Sequence[Shape]) -> str:
    """The label says how a head's bytes are divided where keys and values differ in size."""
    sizes = [(s.key_size, s.value_size) for s in shapes]
    if all(key == value for key, value in sizes):
        return "layer,kv,head,token"
    runs = (f"{key}+{value}x{len(list(run))}" for (key, value), run in groupby(sizes))
    return f"layer,kv,head,token;{','.join(runs)}"
