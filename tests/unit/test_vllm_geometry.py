"""Which layers are stored, in which order, for which rank; and what is refused by name."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blobstore.clients import LayerGroup, Shard
from blobstore.clients.vllm.geometry import Geometry, Group, geometry_of
from blobstore.errors import InvalidRequest
from tests.support.vllm_engine import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    caches,
    engine,
    torch,
)

BLOB = 64


def geometry(*specs: Any, layers: int = 2, tokens: int = BLOB, **options: Any) -> Geometry:
    hashed = options.pop("hash_block_size", None)
    config = caches(*specs, layers=layers, hash_block_size=hashed)
    return geometry_of(engine("model", **options), config, tokens)


def test_one_group_of_attention() -> None:
    found = geometry(FullAttentionSpec(), layers=3)
    assert found.groups == (Group(0, 16, 0),)
    assert found.layout.groups == (LayerGroup.attention(layers=3, heads=2, head_size=8),)
    assert found.layout.order == "layer,head,token"
    assert found.shard is None
    assert (found.blob_tokens, found.hash_tokens) == (64, 16)
    assert found.written() == (True, True, True)


def test_layers_go_by_number_and_kinds_alternate() -> None:
    found = geometry(FullAttentionSpec(), SlidingWindowSpec(extra_retained_tokens=3), layers=6)
    assert [layer.name.split(".")[2] for layer in found.layers] == [str(n) for n in range(12)]
    full = LayerGroup.attention(layers=1, heads=2, head_size=8)
    sliding = LayerGroup.sliding(layers=1, heads=2, head_size=8, window=35)
    assert found.layout.groups == (full, sliding) * 6
    assert found.groups == (Group(0, 16, 0), Group(1, 16, 35))


def test_latent_layers_and_values_of_another_size() -> None:
    found = geometry(MLAAttentionSpec(), FullAttentionSpec(head_size_v=4), layers=1)
    assert found.layout.groups == (
        LayerGroup.latent(layers=1, width=24),
        LayerGroup.attention(layers=1, heads=2, head_size=6),
    )


def test_an_odd_number_of_values_is_stored_as_bytes() -> None:
    found = geometry(FullAttentionSpec(head_size_v=7), layers=1)
    assert found.layout.groups == (
        LayerGroup.attention(layers=1, heads=2, head_size=15, dtype="uint8"),
    )
    assert found.layout.nbytes(1) == 2 * 15 * 2


@pytest.mark.parametrize(("rank", "columns"), [(0, (0, 2)), (1, (2, 4))])
def test_ranks_own_head_ranges(rank: int, columns: tuple[int, int]) -> None:
    found = geometry(FullAttentionSpec(), rank=rank, ranks=2, heads=4)
    assert found.shard == Shard(rank, 2)
    assert found.layout.groups[0].heads == 4
    assert [part.heads for part in found.parts()] == [columns] * 2
    assert found.written() == (True, True)


def test_ranks_with_the_same_head_take_turns() -> None:
    each = [
        geometry(FullAttentionSpec(num_kv_heads=1), layers=4, rank=rank, ranks=4, heads=2)
        for rank in range(4)
    ]
    assert [g.layout.groups[0].heads for g in each] == [2] * 4
    assert [g.parts()[0].heads for g in each] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert each[0].written() == (True, False, True, False)
    assert each[1].written() == (False, True, False, True)


def test_latent_ranks_take_turns() -> None:
    one, other = (geometry(MLAAttentionSpec(), rank=rank, ranks=2) for rank in range(2))
    assert one.layout == other.layout
    assert (one.written(), other.written()) == ((True, False), (False, True))


def test_heads_that_do_not_go_into_ranks() -> None:
    with pytest.raises(InvalidRequest, match="2 KV heads on each of 3 ranks, and the model has 4"):
        geometry(FullAttentionSpec(), ranks=3, heads=4)


@pytest.mark.parametrize(
    ("wanted", "blocks", "hashes", "expected"),
    [
        (64, (16,), None, 64),
        (64, (128,), None, 128),
        (64, (16, 32), 16, 64),
        (32, (48, 32), 16, 96),
    ],
)
def test_blobs_are_of_whole_blocks(
    wanted: int, blocks: tuple[int, ...], hashes: int | None, expected: int
) -> None:
    specs = [FullAttentionSpec(block_size=tokens) for tokens in blocks]
    found = geometry(*specs, tokens=wanted, hash_block_size=hashes)
    assert found.blob_tokens == expected
    assert found.hash_tokens == 16 if hashes else blocks[0]


def test_blobs_that_cut_blocks() -> None:
    with pytest.raises(InvalidRequest, match=r"no multiple of the 24 tokens.*: 48 or 72 are"):
        geometry(FullAttentionSpec(block_size=24))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (MambaSpec(), r"layers model.layers.0.self_attn.attn … \(2\) keep a MambaSpec"),
        (FullAttentionSpec(tokens_per_state=4), "one state for 4 tokens"),
        (FullAttentionSpec(kv_quant_mode="NVFP4"), "quantised as NVFP4"),
        (FullAttentionSpec(dtype=torch.float64), "numbers of torch.float64"),
        (MLAAttentionSpec(num_kv_heads=2), "2 latent vectors per token"),
    ],
)
def test_unknown_memory(spec: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        geometry(spec)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "share a context"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "share a prefill"),
        ({"model_config__is_encoder_decoder": True}, "model is an encoder-decoder"),
        ({"model_config__is_diffusion": True}, "model is a diffusion model"),
        (
            {"parallel_config__tensor_parallel_size": 2, "parallel_config__nnodes_within_dp": 2},
            "tensor_parallel_size=2 on 2 machines",
        ),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "decoding by 'eagle3'"),
    ],
)
def test_unknown_engines(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        geometry(FullAttentionSpec(), **changes)


@pytest.mark.parametrize("nodes", ["aab", "abb"])
def test_ranks_that_ray_has_placed(monkeypatch: pytest.MonkeyPatch, nodes: str) -> None:
    """The last of its bundles has no device, and so no rank."""
    ray = ModuleType("ray.util")
    bundles = {0: {"GPU": 1.0}, 1: {"GPU": 1.0}, 2: {"CPU": 1.0}}
    table = {"bundles": bundles, "bundles_to_node_id": dict(enumerate(nodes))}
    ray.placement_group_table = lambda group: table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", ray)
    placed: dict[str, Any] = {"parallel_config__placement_group": "a group", "heads": 2}
    geometry(FullAttentionSpec(), **placed)
    if nodes == "aab":
        geometry(FullAttentionSpec(num_kv_heads=1), ranks=2, **placed)
        return
    with pytest.raises(InvalidRequest, match="tensor_parallel_size=2 on 2 machines"):
        geometry(FullAttentionSpec(num_kv_heads=1), ranks=2, **placed)


def test_speculation_that_keeps_nothing() -> None:
    geometry(FullAttentionSpec(), speculative_config=SimpleNamespace(method="ngram"))


def test_groups_that_stay_are_left_out() -> None:
    config = caches(FullAttentionSpec(), MambaSpec())
    config.kv_cache_groups[1].enable_kv_transfer = False
    found = geometry_of(engine("model"), config, BLOB)
    assert [group.id for group in found.groups] == [0]


@pytest.mark.parametrize("kind", ["is_eagle_group", "host_resident"])
def test_groups_of_draft_models_and_of_the_host(kind: str) -> None:
    config = caches(FullAttentionSpec())
    setattr(config.kv_cache_groups[0], kind, True)
    with pytest.raises(InvalidRequest, match="blocks of the host or of a draft model"):
        geometry_of(engine("model"), config, BLOB)


def test_layers_told_one_by_one() -> None:
    spec, config = FullAttentionSpec(), caches(FullAttentionSpec())
    first, second = config.kv_cache_groups[0].layer_names
    together = SimpleNamespace(kv_cache_specs={first: spec, second: spec})
    config.kv_cache_groups[0].kv_cache_spec = together
    assert geometry_of(engine("model"), config, BLOB).layout.n_layers == 2
    together.kv_cache_specs[second] = dataclasses.replace(spec, head_size=16)
    with pytest.raises(InvalidRequest, match=f"{second} keeps its tokens otherwise than {first}"):
        geometry_of(engine("model"), config, BLOB)


def test_no_cache_at_all() -> None:
    with pytest.raises(InvalidRequest, match="nothing to store"):
        geometry()
