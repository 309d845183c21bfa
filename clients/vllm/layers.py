"""What one attention layer keeps of a token, read from the spec by which vLLM allocates it.

A spec is known by its class's name, exactly: a new kind of memory is refused by name
until somebody has looked at what its bytes depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from blobstore.errors import InvalidRequest
from blobstore.layer_group import DTYPE_BITS, LayerGroup

_KINDS = {
    "FullAttentionSpec": "attention",
    "MLAAttentionSpec": "latent",
    "SlidingWindowSpec": "sliding",
}

DTYPES = {
    "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8_e4m3", "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8", "torch.uint8": "uint8",
}  # fmt: skip
"""What the store calls torch's types of numbers."""

_QUANTISATIONS = ("NONE", "FP8_PER_TENSOR")
"""Those whose scales belong to the weights, or to the bytes themselves."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer keeps: per token and KV head `content` bytes, keys and values together.

    `heads` are this rank's and `all_heads` the whole model's. Attention reads back `window`
    tokens (0: all). `block_tokens` are in a block of vLLM's manager.
    """

    kind: str
    heads: int
    all_heads: int
    content: int
    dtype: str
    window: int
    block_tokens: int


def shape_of(names: str, spec: Any, ranks: int, model_heads: Callable[[], int]) -> Shape:
    """The shape that `spec` describes, of the layers called `names`, on one of `ranks` ranks.

    `model_heads` tells the KV heads of the whole model where the spec does not. Raises
    InvalidRequest naming what is not known.
    """
    name = type(spec).__name__
    if name not in _KINDS:
        raise InvalidRequest(
            f"{names} keep a {name}, which is not stored: known are {', '.join(_KINDS)}"
        )
    _check(names, spec)
    dtype = _dtype(names, spec)
    window = 0
    if name == "SlidingWindowSpec":
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    heads = int(spec.num_heads)
    return Shape(
        kind=_KINDS[name],
        heads=heads,
        all_heads=heads * _shards(names, spec, heads, ranks, model_heads),
        content=int(spec.state_content_size_bytes),
        dtype=dtype,
        window=window,
        block_tokens=int(spec.block_size),
    )


def layer_groups(shapes: Iterable[Shape]) -> tuple[LayerGroup, ...]:
    """The runs of equal layers, as a KVLayout takes them."""
    kinds = ((s.kind, s.all_heads, s.content, s.dtype, s.window) for s in shapes)
    return tuple(_layer_group(*kind, len(list(run))) for kind, run in groupby(kinds))


def _layer_group(
    kind: str, heads: int, content: int, dtype: str, window: int, layers: int
) -> LayerGroup:
    numbers = content * 8 // DTYPE_BITS[dtype]
    if kind == "latent":
        return LayerGroup.latent(layers=layers, width=numbers, dtype=dtype)
    if numbers % 2:  # such as keys and values with one scale for both
        numbers, dtype = content, "uint8"
    if numbers % 2:
        raise InvalidRequest(f"{content} bytes per token and head cannot be halved")
    size = numbers // 2
    if kind == "sliding":
        return LayerGroup.sliding(
            layers=layers, heads=heads, head_size=size, window=window, dtype=dtype
        )
    return LayerGroup.attention(layers=layers, heads=heads, head_size=size, dtype=dtype)


def _check(names: str, spec: Any) -> None:
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise InvalidRequest(
            f"{names} keep one state for {spec.tokens_per_state} tokens, which is not stored"
        )
    mode = getattr(spec, "kv_quant_mode", "NONE")
    if getattr(mode, "name", mode) not in _QUANTISATIONS:
        raise InvalidRequest(
            f"{names} are quantised as {getattr(mode, 'name', mode)}, which is not stored: known "
            f"are {', '.join(_QUANTISATIONS)}"
        )
    if type(spec).__name__ == "MLAAttentionSpec" and int(spec.num_heads) != 1:
        raise InvalidRequest(f"{names} keep {spec.num_heads} latent vectors per token, not one")


def _dtype(names: str, spec: Any) -> str:
    dtype = DTYPES.get(str(spec.dtype))
    if dtype is None:
        raise InvalidRequest(
            f"{names} keep numbers of {spec.dtype}, which are not stored: known are "
            f"{', '.join(DTYPES)}"
        )
    return dtype


def _shards(names: str, spec: Any, heads: int, ranks: int, model_heads: Callable[[], int]) -> int:
    """How many ranks hold other heads than this one, with it."""
    if ranks == 1:
        return 1
    told = getattr(spec, "max_tp_shards", None)
    shards = min(ranks, int(told)) if told is not None else _shards_of(model_heads(), heads, ranks)
    if not shards or ranks % shards:
        raise InvalidRequest(
            f"{names} keep {heads} KV heads on each of {ranks} ranks, and the model has "
            f"{model_heads()}: how they are shared is not known"
        )
    return shards


def _shards_of(all_heads: int, heads: int, ranks: int) -> int:
    """0 if the numbers do not go together."""
    if heads * ranks == all_heads:
        return ranks
    return all_heads if heads == 1 and ranks % all_heads == 0 else 0
