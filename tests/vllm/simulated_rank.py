"""A worker of a simulated engine: its caches, our connector beside them, and a model's formula.

Each token's keys and values follow from all tokens up to it, so that whatever lies in a
block can be checked against what its tokens dictate; that is done before every use of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.vllm.of_vllm import (
    BlobStoreConnector,
    KVCacheConfig,
    KVConnectorOutput,
    KVConnectorRole,
    SchedulerOutput,
    SlidingWindowSpec,
)

HEADS, HEAD_SIZE = 2, 8
"""KV heads of the model, and numbers in a key."""
CONTENT = 2 * HEAD_SIZE * 2
WINDOW = 40
_MASK = (1 << 64) - 1

Bytes = NDArray[np.uint8]


def dictated(tokens: Sequence[int], layers: int) -> Bytes:
    """What `tokens` leave in the caches: tokens x layers x heads x content."""
    chain, state = np.empty(len(tokens), np.uint64), 0x9E3779B97F4A7C15
    for at, token in enumerate(tokens):
        state = ((state ^ token) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        state ^= state >> 29
        chain[at] = state
    odd = np.arange(1, 2 * layers * HEADS * CONTENT, 2, dtype=np.uint64)
    odd *= np.uint64(0x2545F4914F6CDD1D)
    return (
        ((chain[:, None] * odd) >> np.uint64(53))
        .astype(np.uint8)
        .reshape(-1, layers, HEADS, CONTENT)
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the model answers."""
    return int(dictated(tokens, 1)[-1, 0, 0, 0]) + 7


@dataclass
class Running:
    """A request as a model runner keeps it."""

    tokens: list[int]
    blocks: tuple[list[int], ...]
    computed: int

    def moved_on(self, n: int) -> list[int]:
        """`n` more tokens are computed; the answer, once that were all."""
        self.computed += n
        if self.computed < len(self.tokens):
            return []
        self.tokens.append(next_token(self.tokens))
        return self.tokens[-1:]


@dataclass
class Turn:
    """What a step does for one request: `n` tokens more, which leave `facts`."""

    name: str
    running: Running
    n: int
    facts: Bytes


class Rank:
    """One worker, with its share of the heads."""

    def __init__(self, config: Any, caches: KVCacheConfig, rank: int, ranks: int) -> None:
        config = copy.deepcopy(config)
        config.parallel_config.rank = rank
        share = HEADS // ranks
        self._heads = slice(rank * share, (rank + 1) * share)
        self._tensors = _tensors(caches)
        self._layers = _layers(caches, self._tensors)
        self.connector = BlobStoreConnector(config, KVConnectorRole.WORKER, caches)
        self.connector.register_kv_caches(self._tensors)

    @property
    def n_layers(self) -> int:
        """Of the model."""
        return len(self._layers)

    def begin(self, plan: Any) -> None:
        """A step begins."""
        self.connector.handle_preemptions(plan)
        self.connector.bind_connector_metadata(plan)

    def forward(self, batch: Sequence[Turn]) -> None:
        """Read what requests have, check it, and add tokens, layer by layer."""
        for layer in self._layers:
            self.connector.wait_for_layer_load(layer.name)
            for turn in batch:
                facts = turn.facts[:, layer.number, self._heads]
                _attend(turn, layer, facts)
                _compute(turn, layer, facts)
            self.connector.save_kv_layer(layer.name, self._tensors[layer.name], object())

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        """A step ends: what the connector tells the scheduler."""
        connector = self.connector
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return told


@dataclass(frozen=True)
class _Layer:
    """Its bytes are blocks x heads x tokens x content."""

    name: str
    number: int
    group: int
    spec: Any
    memory: Bytes

    def where(self, running: Running, positions: NDArray[np.int64]) -> tuple[Any, Any, Any]:
        """Where in `memory` a request's tokens are."""
        table = np.array(running.blocks[self.group], np.int64)
        blocks = table[positions // self.spec.block_size]
        return blocks, slice(None), positions % self.spec.block_size


def _attend(turn: Turn, layer: _Layer, facts: Bytes) -> None:
    """All that attention reads of earlier tokens is what they dictate."""
    end = turn.running.computed
    first = max(0, end - WINDOW + 1) if isinstance(layer.spec, SlidingWindowSpec) else 0
    where = layer.where(turn.running, np.arange(first, end))
    wrong = np.flatnonzero((layer.memory[where] != facts[first:end]).any(axis=(1, 2)))
    assert not wrong.size, (
        f"{turn.name}: layer {layer.number} holds wrong bytes of tokens {first + wrong[0]} to "
        f"{first + wrong[-1]} of {end}, in block {where[0][wrong[0]]}"
    )


def _compute(turn: Turn, layer: _Layer, facts: Bytes) -> None:
    first, end = turn.running.computed, turn.running.computed + turn.n
    where = layer.where(turn.running, np.arange(first, end))
    assert where[0].all(), f"{turn.name} computes tokens {first} to {end} into the null block"
    layer.memory[where] = facts[first:end]


def _tensors(caches: KVCacheConfig) -> dict[str, torch.Tensor]:
    found = {}
    for group in caches.kv_cache_groups:
        spec = group.kv_cache_spec
        shape = (caches.num_blocks, spec.num_kv_heads, spec.block_size, 2 * HEAD_SIZE)
        for name in group.layer_names:
            found[name] = torch.zeros(shape, dtype=torch.bfloat16)
    return found


def _layers(caches: KVCacheConfig, tensors: Mapping[str, torch.Tensor]) -> list[_Layer]:
    """All layers, in the order in which they are computed."""
    layers = [
        _Layer(
            name, int(name.split(".")[2]), at, group.kv_cache_spec,
            tensors[name].view(torch.uint8).numpy(),
        )
        for at, group in enumerate(caches.kv_cache_groups)
        for name in group.layer_names
    ]  # fmt: skip
    return sorted(layers, key=lambda layer: layer.number)
