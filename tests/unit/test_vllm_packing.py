"""What engines say of how they pack blocks: equal only where blocks are interchangeable."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blobstore.clients.vllm.packing import packing_of, release
from blobstore.errors import InvalidRequest
from tests.support.vllm_engine import AttentionLayers, engine, installed, torch

NAMES = ["one", "two", "three"]
LABEL_MAX = 256
"""Bytes that a layout takes."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return installed(monkeypatch)


def packing(layers: Any = None, *, tokens: int = 16, device: str = "cpu") -> str:
    config = engine("model", device_config__device_type=device)
    if layers is not None:
        config.compilation_config.static_forward_context = layers
    tensor = SimpleNamespace(shape=(12, 2, tokens, 64))
    return packing_of(config, NAMES, dict.fromkeys(NAMES, tensor))


def mixed(**backends: str) -> dict[str, Any]:
    """Layers with a backend each."""
    return {name: AttentionLayers(backend)[name] for name, backend in backends.items()}


def test_a_label_names_what_can_be_seen() -> None:
    release, device, _, backend = packing().split(",")
    assert (release, device, backend) == ("vllm 0.32", "cpu", "CPU_ATTN/16")
    assert packing(device="cuda") == "vllm 0.32,cuda,a GPU,CPU_ATTN/16"


@pytest.mark.parametrize(
    ("feature", "asked"),
    [("amx", "_is_amx_tile_supported"), ("avx512", "_is_avx512_supported")],
)
def test_instruction_sets(feature: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for has in False, True:
        monkeypatch.setattr(torch.cpu, asked, lambda has=has: has, raising=False)
        assert (f"+{feature}" in packing()) == has


def test_the_backend_is_the_one_that_computes_whoever_chose_it() -> None:
    """Two machines with the same configuration, of which one has FlashInfer installed."""
    one, other = (packing(AttentionLayers(name), device="cuda") for name in ("A", "FLASHINFER"))
    assert one != other


def test_a_plug_in_is_no_backend_of_vllm() -> None:
    assert packing(AttentionLayers("CUSTOM", module="mine")).endswith(",mine.CUSTOM/16")


def test_the_blocks_of_the_kernel_and_the_kernels_of_cpus_count() -> None:
    assert packing(tokens=8).endswith("/8")
    assert packing(AttentionLayers(isa="vec16")).endswith(",CPU_ATTN.vec16/16")


def test_an_environment_that_packs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = packing(device="cuda")
    envs = sys.modules["vllm.envs"]
    monkeypatch.setattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", True, raising=False)
    assert packing(device="cuda") == before.replace("a GPU", "a GPU+shuffled")


def test_layers_that_differ_are_told_apart_by_their_order() -> None:
    one = packing(mixed(one="A", two="A", three="B"))
    other = packing(mixed(one="B", two="A", three="A"))
    assert one != other
    assert one == packing(mixed(one="A", two="A", three="B"))
    assert ",mixed " in one


def test_labels_are_short() -> None:
    long = packing(AttentionLayers("X" * 300), device="cuda")
    assert len(long) < LABEL_MAX - 100
    assert long != packing(AttentionLayers("X" * 301), device="cuda")


@pytest.mark.parametrize("layers", [{"one": object()}, {"other": None}])
def test_a_layer_that_does_not_say_its_backend_is_refused(layers: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="which attention backend computes one"):
        packing(layers)


@pytest.mark.parametrize(("version", "said"), [("0.32.5", "0.32"), ("0.33.0rc1", "0.33")])
def test_later_fixes_of_a_release_keep_the_layout(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    assert release() == said
