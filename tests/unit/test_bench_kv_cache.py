"""The stored form of a context's state."""

from __future__ import annotations

import numpy as np
import pytest

from blobstore.bench.kv_cache import KVCache, StoredDtype, round_to_bf16
from blobstore.bench.model_file import Array, ModelSizes
from blobstore.errors import InvalidRequest, SizeMismatch

SIZES = ModelSizes(
    layers=3,
    heads=4,
    kv_heads=2,
    head_size=8,
    width=32,
    context_tokens=64,
    rope_base=1e4,
    norm_epsilon=1e-5,
    end_token=0,
)


def filled(dtype: StoredDtype, chunks: int = 2) -> KVCache:
    cache = KVCache(SIZES, chunk_tokens=4, dtype=dtype)
    random = np.random.default_rng(7)
    for layer in range(SIZES.layers):
        state = random.standard_normal((2, chunks * 4, SIZES.kv_heads, SIZES.head_size))
        cache.write(layer, 0, *state.astype(np.float32))
    cache.settle(chunks)
    return cache


def exported(cache: KVCache, chunk: int) -> bytes:
    payload = bytearray(cache.chunk_nbytes)
    cache.export_chunk(chunk, memoryview(payload))
    return bytes(payload)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (1.0 + 2**-8, 1.0),  # half way: to the even neighbour, down
        (1.0 + 3 * 2**-8, 1.0 + 2**-6),  # half way: to the even neighbour, up
        (1.0 + 2**-8 + 2**-20, 1.0 + 2**-7),
        (-(1.0 + 2**-8), -1.0),
        (0.0, 0.0),
    ],
)
def test_bf16_rounds_to_nearest_and_ties_to_even(value: float, rounded: float) -> None:
    assert round_to_bf16(np.array([value], np.float32))[0] == rounded


def test_rounding_leaves_its_argument_alone() -> None:
    values = np.array([1.0 + 2**-20], np.float32)
    round_to_bf16(values)
    assert values[0] == np.float32(1.0 + 2**-20)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_restored_chunk_is_the_computed_one(dtype: StoredDtype) -> None:
    computed, restored = filled(dtype), KVCache(SIZES, chunk_tokens=4, dtype=dtype)
    for chunk in range(2):
        restored.import_chunk(chunk, memoryview(exported(computed, chunk)))
    restored.settle(2)
    for layer in range(SIZES.layers):
        for head in range(SIZES.kv_heads):
            assert np.array_equal(computed.keys(layer, head, 8), restored.keys(layer, head, 8))
            assert np.array_equal(computed.values(layer, head, 8), restored.values(layer, head, 8))


def test_layers_may_arrive_one_by_one() -> None:
    computed, restored = filled("bf16"), KVCache(SIZES, chunk_tokens=4)
    payload = exported(computed, 1)
    size = len(payload) // SIZES.layers
    for layer in reversed(range(SIZES.layers)):
        part = memoryview(payload)[layer * size : (layer + 1) * size]
        restored.import_layers(1, (layer, layer + 1), part)
    restored.settle(2)
    assert exported(restored, 1) == payload


def test_the_payload_is_layer_major_with_keys_before_values() -> None:
    cache = KVCache(SIZES, chunk_tokens=4)
    for layer in range(SIZES.layers):
        shape = (4, SIZES.kv_heads, SIZES.head_size)
        keys: Array = np.full(shape, layer + 0.25, np.float32)
        cache.write(layer, 0, keys, -keys)
    cache.settle(1)
    halves = np.frombuffer(exported(cache, 0), np.uint16).astype(np.uint32) << 16
    per_run = SIZES.kv_heads * 4 * SIZES.head_size
    expected = [sign * (layer + 0.25) for layer in range(SIZES.layers) for sign in (1, -1)]
    assert np.array_equal(
        halves.view(np.float32), np.repeat(np.array(expected, np.float32), per_run)
    )


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bf16", 2), ("fp32", 4)])
def test_a_payload_of_another_size_is_refused_with_both_numbers(
    dtype: StoredDtype, item_bytes: int
) -> None:
    cache = KVCache(SIZES, chunk_tokens=4, dtype=dtype)
    expected = SIZES.layers * 2 * SIZES.kv_heads * 4 * SIZES.head_size * item_bytes
    assert cache.chunk_nbytes == expected
    with pytest.raises(SizeMismatch, match=rf"{expected} bytes.*{expected - 1}"):
        cache.import_chunk(0, memoryview(bytes(expected - 1)))


def test_an_open_chunk_is_never_exported() -> None:
    cache = filled("bf16", chunks=1)
    with pytest.raises(InvalidRequest, match="not settled"):
        cache.export_chunk(1, memoryview(bytearray(cache.chunk_nbytes)))


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="context of 64"):
        KVCache(SIZES, chunk_tokens=4, capacity_tokens=65)
