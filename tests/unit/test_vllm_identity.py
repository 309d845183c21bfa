"""The namespaces of vLLM engines: equal for equal engines, another for any difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blobstore.clients import Shard, WriterGroup
from blobstore.clients.vllm import agreement
from blobstore.clients.vllm.geometry import blocks_of
from blobstore.clients.vllm.identity import Identity, identify
from blobstore.clients.vllm.options import Options
from blobstore.errors import InvalidRequest
from blobstore.namespace import Namespace
from tests.support.vllm_engine import (
    AttentionLayers,
    FullAttentionSpec,
    HfConfig,
    SlidingWindowSpec,
    agreed,
    caches,
    engine,
    installed,
    tensors,
    torch,
)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return installed(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "SmolLM2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    return folder


def identity_of(
    model: object, spec: Any = None, *, hashed: int | None = None, ratio: int = 1, **changes: Any
) -> Identity:
    """Of a rank to which all have said how they pack blocks."""
    options = {
        name: changes.pop(name)
        for name in ("tokens_per_blob", "revision", "salt", "weights_digest")
        if name in changes
    }
    config = caches(spec or FullAttentionSpec(), hash_block_size=hashed)
    identity = identify(engine(str(model), **changes), config, Options(**options))
    return agreed(identity, config, changes.get("ranks", 1), ratio)


def namespace_of(model: object, spec: Any = None, **changes: Any) -> Namespace:
    adapter = changes.pop("adapter", "")
    return identity_of(model, spec, **changes).bound(adapter).namespace


def test_what_a_namespace_says(model: Path) -> None:
    found = namespace_of(model)
    assert found.model == "SmolLM2"
    assert found.weights_digest.startswith("files ")
    assert found.dtype == "bf16 cache=auto weights=plain ranks=1"
    assert found.hash_scheme.startswith("vllm/sha256/")
    assert found.hash_scheme.endswith(f"/16/py3.{sys.version_info.minor}")
    assert found.layout.order.startswith("layer,head,token;vllm 0.32,cpu,")
    assert found.layout.order.endswith(",CPU_ATTN/16")
    assert found.tokens_per_blob == 256


BACKEND = "compilation_config__static_forward_context"

CHANGES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "v2"},
    "the engine's revision": {"model_config__revision": "v3"},
    "given weights": {"weights_digest": "w2"},
    "config": {"model_config__hf_config": HfConfig({"hidden_size": 64, "rope_theta": 1e6})},
    "dtype": {"model_config__dtype": torch.float16},
    "cache dtype": {"cache_config__cache_dtype": "fp8"},
    "stored dtype": {"spec": FullAttentionSpec(dtype=torch.float16)},
    "quantisation": {"model_config__quantization": "fp8"},
    "how it is quantised": {"model_config__quantization_config": {"bits": 4}},
    "heads": {"spec": FullAttentionSpec(num_kv_heads=4)},
    "head size": {"spec": FullAttentionSpec(head_size=16)},
    "window": {"spec": SlidingWindowSpec()},
    "another window": {"spec": SlidingWindowSpec(sliding_window=64)},
    "block size": {"spec": FullAttentionSpec(block_size=32)},
    "block size alone": {"spec": FullAttentionSpec(block_size=32), "hashed": 16},
    "block size of the kernel": {"ratio": 2},
    "hash block size": {"hashed": 8},
    "tokens per blob": {"tokens_per_blob": 512},
    "salt": {"salt": "tenant"},
    "ranks": {"ranks": 2, "heads": 4},
    "fewer heads per rank": {"ranks": 2, "spec": FullAttentionSpec(num_kv_heads=1)},
    "hash algorithm": {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
    "backend": {BACKEND: AttentionLayers("FLASHINFER")},
    "backend of a plug-in": {BACKEND: AttentionLayers(module="plug_in.attention")},
    "the backend's kernel": {BACKEND: AttentionLayers(isa="amx")},
    "device": {"device_config__device_type": "cuda"},
    "dummy weights": {"load_config__load_format": "dummy"},
    "seed of dummy weights": {"load_config__load_format": "dummy", "model_config__seed": 1},
    "adapter": {"adapter": "sql abc"},
    "another adapter": {"adapter": "sql def"},
}  # fmt: skip


def test_every_difference_is_another_namespace(model: Path) -> None:
    ids = {name: namespace_of(model, **changes).id for name, changes in CHANGES.items()}
    ids["none"] = namespace_of(model).id
    assert len(set(ids.values())) == len(ids)
    assert namespace_of(model).id == ids["none"]


def test_weights_tell_models_of_one_name_apart(model: Path, tmp_path: Path) -> None:
    before = namespace_of(model).id
    moved = tmp_path / "elsewhere" / "SmolLM2"
    moved.parent.mkdir()
    model.rename(moved)
    assert namespace_of(moved).id == before
    (moved / "model.safetensors").write_bytes(b"weightz" * 100)
    assert namespace_of(moved).id != before


def test_the_seed_of_the_hashes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {namespace_of(model).id}
    for seed in "0", "1":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        ids.add(namespace_of(model).id)
    assert len(ids) == 3


def test_another_release(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespace_of(model).id
    installed(monkeypatch, "0.32.5")
    assert namespace_of(model).id == before
    installed(monkeypatch, "0.33.0")
    assert namespace_of(model).id != before


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_random_hashes_are_refused(
    model: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random: dict[str, Any] = {"cache_config__prefix_caching_hash_algo": algorithm}
    with pytest.raises(InvalidRequest, match="export PYTHONHASHSEED=0 for every engine"):
        identity_of(model, **random)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    identity_of(model, **random)


def test_releases_that_are_always_random(
    model: Path, vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm.resolve_none_hash_seed
    with pytest.raises(InvalidRequest, match="begin with random bytes in every process"):
        identity_of(model)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    identity_of(model)


def test_hashes_that_began_otherwise(model: Path, vllm: ModuleType) -> None:
    identity = identity_of(model)
    identity.check_hashes()
    vllm.NONE_HASH = b"another"  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="begin with 616e6f746865"):
        identity.check_hashes()
    del vllm.NONE_HASH
    with pytest.raises(InvalidRequest, match="begin with nothing"):
        identity.check_hashes()


def test_scales_of_the_first_request_are_refused(model: Path) -> None:
    with pytest.raises(InvalidRequest, match="calculate_kv_scales"):
        identity_of(model, cache_config__calculate_kv_scales=True)


def test_keys_are_the_last_hashes_of_whole_blobs(model: Path) -> None:
    identity = identity_of(model, tokens_per_blob=64)
    hashes = [bytes([n]) * 32 for n in range(11)]
    assert list(identity.keys(hashes)) == [hashes[3], hashes[7]]
    assert list(identity.keys(hashes[:3])) == []


def test_blocks_of_a_blob(model: Path) -> None:
    config = caches(FullAttentionSpec(), SlidingWindowSpec(block_size=32))
    identity = identify(engine(str(model)), config, Options(tokens_per_blob=64))
    tables = ([1, 2, 3, 4, 5, 6, 7], [8, 9, 10])
    groups, tokens = identity.groups, identity.blob_tokens
    assert blocks_of(groups, tokens, tables, range(1)) == [[1, 2, 3, 4], [8, 9]]
    assert blocks_of(groups, tokens, tables, range(1, 2)) == [[5, 6, 7], [10]]


def test_ranks_share_a_namespace_and_a_group(model: Path) -> None:
    each = [identity_of(model, rank=rank, ranks=2, heads=4) for rank in range(2)]
    one, other = each
    assert one.shard == Shard(0, 2)
    assert one.bound().namespace == other.bound().namespace
    assert one.writer_group == other.writer_group == WriterGroup("an engine/abcde")
    assert other.bound_of(one.bound().namespace.encode()) == other.bound()
    assert identity_of(model).writer_group is None


def test_nothing_has_a_name_before_all_ranks_say_how_they_pack_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "WAIT_S", 0.0)
    config = caches(FullAttentionSpec())
    scheduler, *workers = (
        identify(engine(str(model), rank=rank, ranks=2, heads=4), config, Options())
        for rank in (0, 0, 1)
    )
    with pytest.raises(InvalidRequest, match="0 of 2 ranks"):
        scheduler.bound()
    scheduler.hear(workers[0].packing(tensors(config)))
    with pytest.raises(InvalidRequest, match="1 of 2 ranks"):
        scheduler.bound()
    scheduler.hear(workers[1].packing(tensors(config)))
    ns = scheduler.bound()
    assert workers[1].bound_of(ns.namespace.encode()).id == ns.id


def test_ranks_that_pack_blocks_differently_are_refused(model: Path) -> None:
    config = caches(FullAttentionSpec())
    others: dict[str, Any] = {BACKEND: AttentionLayers("FLASHINFER")}
    scheduler, *workers = (
        identify(engine(str(model), rank=rank, ranks=2, heads=4, **changes), config, Options())
        for rank, changes in ((0, {}), (0, {}), (1, others))
    )
    for worker in workers:
        scheduler.hear(worker.packing(tensors(config)))
    with pytest.raises(InvalidRequest, match=r"different ways: .*CPU_ATTN.*FLASHINFER"):
        scheduler.bound()


def test_weights_are_read_once(model: Path) -> None:
    identity = identity_of(model)
    before = identity.bound()
    (model / "model.safetensors").unlink()
    assert identity.bound() == before
    assert identity.bound("adapter").namespace.weights_digest == before.namespace.weights_digest


PROGRAM = """
import sys
from types import ModuleType, SimpleNamespace
torch = ModuleType("torch")  # importing the real one takes seconds
for name in ("bfloat16", "float16"):
    kind = type(name, (), {"itemsize": 2, "__str__": lambda dtype: "torch." + type(dtype).__name__})
    setattr(torch, name, kind())
torch.cpu = SimpleNamespace()
sys.modules["torch"] = torch
import pytest
from tests.support.vllm_engine import FullAttentionSpec, caches, engine, installed
from blobstore.clients.vllm.identity import identify
from blobstore.clients.vllm.options import Options
with pytest.MonkeyPatch.context() as patch:
    installed(patch)
    identity = identify(engine(sys.argv[1]), caches(FullAttentionSpec()), Options())
    shaped = SimpleNamespace(shape=(12, 2, 16, 16))
    identity.hear(identity.packing({each.name: shaped for each in identity.geometry.layers}))
    print(identity.bound().id.hex())
"""


def test_fresh_interpreters_agree(model: Path) -> None:
    """Whatever seeds Python's own hashes: it is in the environment for other reasons, too."""
    ids = set()
    for seed in "random", "0", "1", "2":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM, str(model)]
        done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=60)
        ids.add(done.stdout.decode())
    assert len(ids) == 1
    assert len(ids.pop().split()[-1]) == 64
