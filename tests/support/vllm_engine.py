"""Stand-ins of what a connector is given by vLLM: configurations, cache specs and tensors.

Named and laid out as in vLLM 0.32, so that unit tests need no vLLM. `installed` puts
modules of its name in place for what the identity asks of vLLM itself.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blobstore.clients.vllm.identity import Identity

torch = pytest.importorskip("torch")

LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Physical orders of layers, blocks, heads, tokens and content."""


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 8
    head_size_v: int | None = None
    dtype: Any = torch.bfloat16
    tokens_per_state: int = 1
    kv_quant_mode: str = "NONE"
    max_tp_shards: int | None = None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def state_content_size_bytes(self) -> int:
        values = self.head_size if self.head_size_v is None else self.head_size_v
        return int((self.head_size + values) * self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 32
    extra_retained_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 24
    head_size_v: int | None = 0
    max_tp_shards: int | None = 1


@dataclass(frozen=True, kw_only=True)
class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class CacheGroup:
    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True


@dataclass
class CacheConfig:
    """A KVCacheConfig."""

    kv_cache_groups: list[CacheGroup]
    num_blocks: int = 12
    hash_block_size: int | None = None


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def caches(
    *specs: Any, layers: int = 2, num_blocks: int = 12, hash_block_size: int | None = None
) -> CacheConfig:
    """A cache with a group for each of `specs`, whose layers take turns."""
    groups = [
        CacheGroup([layer_name(n * len(specs) + at) for n in range(layers)], spec)
        for at, spec in enumerate(specs)
    ]
    return CacheConfig(groups, num_blocks, hash_block_size)


@dataclass
class HfConfig:
    facts: dict[str, Any] = field(default_factory=lambda: {"hidden_size": 64, "rope_theta": 1e4})
    _commit_hash: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.facts)


class AttentionLayers(dict[str, Any]):
    """An engine's attention layers, whatever their names are: all have one backend.

    `isa` is what the backend of CPUs writes down of its kernels.
    """

    def __init__(self, backend: str = "CPU_ATTN", module: str = "vllm.fake", isa: str = "") -> None:
        super().__init__()
        names = {"get_name": staticmethod(lambda: backend), "__module__": module}
        kind = type("Backend", (), names)
        self._layer = SimpleNamespace(get_attn_backend=lambda: kind, isa=isa)

    def __missing__(self, name: str) -> Any:
        return self._layer


def agreed(identity: Identity, config: CacheConfig, ranks: int = 1, ratio: int = 1) -> Identity:
    """`identity`, to which all ranks have said that they pack blocks as its own does."""
    (packing,) = identity.packing(tensors(config, ratio=ratio)).values()
    identity.hear(dict.fromkeys(range(ranks), packing))
    return identity


def engine(model: str, *, rank: int = 0, ranks: int = 1, heads: int = 2, **changes: Any) -> Any:
    """A VllmConfig; `changes` by dotted names with "__", such as model_config__dtype."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, dtype=torch.bfloat16, seed=0, quantization=None,
            quantization_config=None, hf_config=HfConfig(), is_encoder_decoder=False,
            get_total_num_kv_heads=lambda: heads,
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            rank=rank, tensor_parallel_size=ranks, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(static_forward_context=AttentionLayers()),
        kv_transfer_config=SimpleNamespace(engine_id="an engine"),
        speculative_config=None,
        lora_config=None,
        instance_id="abcde",
    )  # fmt: skip
    for name, value in changes.items():
        *path, last = name.split("__")
        place = config
        for step in path:
            place = getattr(place, step)
        setattr(place, last, value)
    return config


def installed(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> ModuleType:
    """Modules called vllm with what the identity uses; returns that of the hashes."""
    utils = ModuleType("vllm.v1.core.kv_cache_utils")
    hashing = ModuleType("vllm.utils.hashing")
    platforms = ModuleType("vllm.platforms")
    envs = ModuleType("vllm.envs")
    package = ModuleType("vllm")
    package.__version__ = version  # type: ignore[attr-defined]

    def hashed(value: Any) -> bytes:
        return sha256(repr(value).encode()).digest()

    def xxhash(value: Any) -> bytes:
        return hashed(value)[:16]

    def resolve_none_hash_seed(hash_of: Any) -> str:
        seed = os.environ.get("PYTHONHASHSEED")
        if seed is None:
            seed = os.urandom(8).hex() if hash_of is xxhash else "vllm-none-hash"
        return seed

    algorithms = {"sha256": hashed, "sha256_cbor": hashed, "xxhash": xxhash, "xxhash_cbor": xxhash}
    hashing.get_hash_fn_by_name = algorithms.__getitem__  # type: ignore[attr-defined]
    utils.resolve_none_hash_seed = resolve_none_hash_seed  # type: ignore[attr-defined]
    utils.NONE_HASH = hashed("vllm-none-hash")  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        get_device_name=lambda: "a GPU"
    )
    for module in (package, utils, hashing, platforms, envs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return utils


def tensors(config: CacheConfig, layout: str = "LBHNC", *, ratio: int = 1) -> dict[str, Any]:
    """Zeroed cache tensors, physically ordered as `layout`; blocks in `ratio` kernel blocks.

    All layers of a group share one allocation, as in vLLM.
    """
    found: dict[str, Any] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        shape = (
            len(group.layer_names), config.num_blocks * ratio, spec.num_heads,
            spec.block_size // ratio, spec.state_content_size_bytes,
        )  # fmt: skip
        order = LAYOUTS[layout]
        raw = torch.zeros([shape[axis] for axis in order], dtype=torch.uint8)
        logical = raw.permute([order.index(axis) for axis in range(5)])
        for name, tensor in zip(group.layer_names, logical, strict=True):
            found[name] = tensor.view(spec.dtype)
    return found


def random_bytes(shape: tuple[int, ...], seed: int) -> Any:
    """A u8 tensor of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return torch.from_numpy(noise)
