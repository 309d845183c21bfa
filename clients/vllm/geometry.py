"""How the blocks of vLLM's caches lie in blobs: which layers, in which order, of which rank.

A blob holds a fixed number of tokens of all layers, ordered by layer, then KV head,
then token, so that each tensor-parallel rank owns one run of bytes per layer. All of it
follows from the configuration, in either role of a connector. How blocks are packed
inside does not: see `packing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.layers import Shape, layer_groups, shape_of
from blobstore.errors import InvalidRequest
from blobstore.layout import KVLayout, Part, Shard

NULL_BLOCK = 0
"""vLLM's block that stands for those that slid out of a window; nothing is kept in it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table: number `id` of the cache's groups.

    `window` is 0 for full attention, else over how many tokens it slides.
    """

    id: int
    block_tokens: int
    window: int


def blocks_of(
    groups: Sequence[Group], blob_tokens: int, tables: Sequence[Sequence[int]], blobs: range
) -> list[list[int]]:
    """The block ids of a run of blobs, for each of `groups`, of whose tokens `tables` tell.

    Shorter where a table does not reach so far.
    """
    found = []
    for group, table in zip(groups, tables, strict=True):
        per_blob = blob_tokens // group.block_tokens
        found.append(list(table[blobs.start * per_blob : blobs.stop * per_blob]))
    return found


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: of group number `group` of those that are stored."""

    name: str
    group: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything is. `layers` are in the payload's order."""

    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    layout: KVLayout
    shard: Shard | None
    """This rank's, None if it is the only one."""
    blob_tokens: int
    hash_tokens: int
    """Tokens per block hash of a request."""

    def parts(self) -> tuple[Part, ...]:
        """This rank's bytes of a payload: one run for each of `layers`."""
        numbers = self.layout.shard_parts(self.shard)
        parts = self.layout.parts(self.blob_tokens)
        return tuple(parts[number] for number in numbers)

    def written(self) -> tuple[bool, ...]:
        """Which layers this rank writes. Others hold the same bytes, and take turns with it."""
        numbers = set(self.layout.shard_writes(self.shard))
        return tuple(part.index in numbers for part in self.parts())


def geometry_of(vllm_config: Any, kv_cache_config: Any, tokens_per_blob: int) -> Geometry:
    """The geometry of the engine's caches, with blobs of `tokens_per_blob` tokens.

    Or of as many as the largest block takes, if that is more. Raises InvalidRequest naming
    what cannot be stored.
    """
    _check_engine(vllm_config)
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    groups: list[Group] = []
    layers: list[Layer] = []
    for id, names, spec in _stored_groups(kv_cache_config):
        heads = vllm_config.model_config.get_total_num_kv_heads
        shape = shape_of(_listed(names), spec, ranks, heads)
        layers += [Layer(name, len(groups), shape) for name in names]
        groups.append(Group(id, shape.block_tokens, shape.window))
    if not layers:
        raise InvalidRequest("the model keeps no keys and values: there is nothing to store")
    layers.sort(key=lambda layer: _natural(layer.name))
    layout = KVLayout(
        layer_groups(layer.shape for layer in layers),
        head_groups=ranks,
        order="layer,head,token",
    )
    shard = Shard(int(vllm_config.parallel_config.rank) % ranks, ranks) if ranks > 1 else None
    hash_tokens = _hash_tokens(kv_cache_config, groups)
    blob_tokens = _blob_tokens(tokens_per_blob, groups, hash_tokens)
    return Geometry(tuple(groups), tuple(layers), layout, shard, blob_tokens, hash_tokens)


def _check_engine(vllm_config: Any) -> None:
    """InvalidRequest for engines whose caches are no function of tokens and one rank's heads."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name, meaning in (
        ("pipeline_parallel_size", "pipeline stages"),
        ("decode_context_parallel_size", "ranks that share a context"),
        ("prefill_context_parallel_size", "ranks that share a prefill"),
    ):
        size = int(getattr(parallel, name, 1))
        if size > 1:
            raise InvalidRequest(f"{name}={size}: {meaning} are not stored yet")
    if int(parallel.tensor_parallel_size) > 1 and _machines(parallel) > 1:
        raise InvalidRequest(
            f"tensor_parallel_size={parallel.tensor_parallel_size} on {_machines(parallel)} "
            "machines: ranks fill blobs together in the memory of one daemon, so all of them have "
            "to be on one machine"
        )
    if getattr(model, "is_encoder_decoder", False):
        raise InvalidRequest(f"{model.model} is an encoder-decoder: only decoders are stored")
    if getattr(model, "is_diffusion", False):
        raise InvalidRequest(
            f"{model.model} is a diffusion model: its keys and values depend on what follows them"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise InvalidRequest(
            f"speculative decoding by {speculative.method!r} keeps a draft model's state in the "
            "cache, which is not stored: 'ngram' and 'suffix' do not"
        )


def _machines(parallel: Any) -> int:
    """On how many machines the ranks of an engine are, as far as its configuration tells."""
    machines = int(getattr(parallel, "nnodes_within_dp", 1))
    group = getattr(parallel, "placement_group", None)  # Ray's, once its executor runs
    if group is None:
        return machines
    table = libraries.load("ray.util").placement_group_table(group)
    # Bundles of nothing but CPUs are not for ranks.
    ranks = [at for at, bundle in table["bundles"].items() if bundle.keys() - {"CPU"}]
    return max(machines, len({table["bundles_to_node_id"][at] for at in ranks}))


def _stored_groups(kv_cache_config: Any) -> Iterator[tuple[int, list[str], Any]]:
    """Number, layer names and spec of each group whose blocks may leave the engine."""
    for id, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue  # copies of another group's, which vLLM makes again after a load
        if getattr(group, "host_resident", False) or getattr(group, "is_eagle_group", False):
            raise InvalidRequest(
                f"{_listed(group.layer_names)} keep what is not stored: blocks of the host or of "
                "a draft model"
            )
        yield id, list(group.layer_names), _one_spec(group)


def _one_spec(group: Any) -> Any:
    """The spec of all layers of a group, which vLLM may tell one by one."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if each is None:
        return group.kv_cache_spec
    (first, spec), *others = each.items()
    for name, other in others:
        if other != spec:
            raise InvalidRequest(
                f"{name} keeps its tokens otherwise than {first}, with which it shares a block "
                "table: such layers are not stored yet"
            )
    return spec


def _hash_tokens(kv_cache_config: Any, groups: Sequence[Group]) -> int:
    told = getattr(kv_cache_config, "hash_block_size", None)
    return int(told) if told else gcd(*(group.block_tokens for group in groups))


def _blob_tokens(wanted: int, groups: Sequence[Group], hash_tokens: int) -> int:
    step = lcm(hash_tokens, *(group.block_tokens for group in groups))
    if step > wanted:
        return step
    if wanted % step:
        lower = wanted - wanted % step
        raise InvalidRequest(
            f"tokens_per_blob={wanted} is no multiple of the {step} tokens of the engine's blocks: "
            f"{lower} or {lower + step} are"
        )
    return wanted


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(int(digits or -1), text) for digits, text in re.findall(r"(\d+)|(\D+)", name)]


def _listed(names: Iterable[str]) -> str:
    first, *others = names
    return f"layers {first} … ({1 + len(others)})" if others else f"layer {first}"
