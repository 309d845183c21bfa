"""Models and caches that are not known are refused by name, and nothing of theirs is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blobstore.clients import Client, KVLayout, LayerGroup
from blobstore.clients.transformers import StoredCache, layers
from blobstore.clients.transformers.identity import padding, tokens_max
from blobstore.clients.transformers.layers import Layer, Shape
from blobstore.errors import InvalidRequest
from tests.support.served_store import served_store
from tests.support.tiny_models import answer, made, prompt, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def kv(tmp_path: Path) -> Iterator[Client]:
    with (
        served_store(tmp_path / "socket") as store,
        Client(store.address, timeout_s=20.0) as kv,
    ):
        yield kv


def stored(kv: Client, model: Any, **options: Any) -> StoredCache:
    return StoredCache(kv, model, tokens_per_blob=8, **options)


@pytest.mark.parametrize(
    ("family", "special", "why"),
    [
        ("RecurrentGemma", {}, "RecurrentGemmaForCausalLM keeps a state"),
        ("Jamba", {}, "JambaForCausalLM keeps a state"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "0 is a LinearAttentionLayer"),
        ("GlmMoeDsa", {}, "cache layer 0 is a DynamicIndexedLayer"),
        ("Bart", {"is_decoder": True}, "BartForCausalLM does not run on one token"),
    ],
)
def test_other_kinds_of_memory(kv: Client, family: str, special: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        stored(kv, made(family, **special))


def test_encoder_decoders(kv: Client) -> None:
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(InvalidRequest, match="T5ForConditionalGeneration is an encoder-decoder"):
        stored(kv, transformers.T5ForConditionalGeneration(config))


def test_models_that_see(kv: Client) -> None:
    text = tiny("two ropes").config
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    )
    with pytest.raises(InvalidRequest, match="Gemma3ForConditionalGeneration reads more than text"):
        stored(kv, transformers.Gemma3ForConditionalGeneration(config))


def test_models_in_training(kv: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"call model\.eval\(\) first"):
        stored(kv, tiny("grouped").train())


def test_adapters_without_a_name(kv: Client) -> None:
    model = tiny("grouped")
    model.peft_config = {"default": object()}
    with pytest.raises(InvalidRequest, match="LlamaForCausalLM has an adapter: name it"):
        stored(kv, model)
    assert stored(kv, model, adapter="mine-3").namespace.adapter == "mine-3"


def test_models_cut_across_ranks(kv: Client) -> None:
    model = tiny("grouped")
    model._tp_size = 2
    with pytest.raises(InvalidRequest, match="cut across 2 ranks"):
        stored(kv, model)


def test_weights_that_are_no_bytes(kv: Client) -> None:
    model = tiny("grouped")
    model.lm_head.to("meta")
    with pytest.raises(InvalidRequest, match=r"weights lm_head\.weight cannot be read as bytes"):
        stored(kv, model, name="meta")


def test_models_that_take_no_cache(kv: Client) -> None:
    model = tiny("grouped")
    model.forward = lambda input_ids: None
    with pytest.raises(InvalidRequest, match="LlamaForCausalLM takes no cache"):
        stored(kv, model)


def test_dtypes_that_are_not_stored(kv: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"torch\.float64 cannot be stored"):
        stored(kv, tiny("grouped").to(torch.float64))


def test_other_caches(kv: Client) -> None:
    model = tiny("grouped")
    cache = stored(kv, model)
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(InvalidRequest, match="a StaticCache cannot be stored"):
        cache.store(prompt(20, 1), static)
    with pytest.raises(InvalidRequest, match="a NoneType cannot be stored"):
        cache.store(prompt(20, 1), None)
    quantised = transformers.DynamicCache(config=model.config)
    quantised.layers[1] = transformers.cache_utils.Fp8QuantizedLayer()
    with pytest.raises(InvalidRequest, match="cache layer 1 is a Fp8QuantizedLayer"):
        cache.store(prompt(20, 1), quantised)


def test_caches_of_other_models(kv: Client) -> None:
    cache = stored(kv, tiny("grouped"))
    ids = prompt(20, 1)
    for other, why in (
        (tiny("all heads"), "layer 0 of the cache holds heads"),
        (tiny("grouped", num_hidden_layers=2), "has 2 layers, this model at least 3"),
        (tiny("grouped").to(torch.bfloat16), "bf16"),
    ):
        past = transformers.DynamicCache(config=other.config)
        answer(other, ids, 2, past)
        with pytest.raises(InvalidRequest, match=why):
            cache.store(ids, past)


def test_batches(kv: Client) -> None:
    model = tiny("grouped")
    cache = stored(kv, model)
    ids = prompt(20, 1)
    past = transformers.DynamicCache(config=model.config)
    answer(model, torch.cat([ids, ids]), 2, past)
    with pytest.raises(InvalidRequest, match="a batch of 2: contexts are stored one by one"):
        cache.store(ids, past)
    beams, _ = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids, cache=beams)
    beams.layers[0].crop(-1)
    with pytest.raises(InvalidRequest, match=r"\[19, 20\] tokens: not alike"):
        cache.store(ids, beams)


def test_windows_of_a_reordered_batch_are_not_stored(kv: Client) -> None:
    model = tiny("sliding")
    cache = stored(kv, model)
    ids = prompt(60, 1)
    past, _ = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids, cache=past)
    past.batch_repeat_interleave(2)
    past.reorder_cache(torch.tensor([1, 0]))
    past.batch_select_indices(torch.tensor([0]))
    assert cache.store(ids, past) == 0
    past.reset()
    assert cache.store(ids, past) == 0


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 63),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            },
            32,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_contexts_whose_length_changes_their_keys(
    kv: Client, rope: dict[str, Any], most: int | None
) -> None:
    model = tiny("grouped", rope_parameters=rope, max_position_embeddings=64)
    assert tokens_max(model.config) == most
    if most is None:
        return
    cache = stored(kv, model)
    ids = prompt(most + 2, 1)
    past, _ = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids[:, :most], cache=past)
    assert cache.store(ids, past) == most // 8
    assert cache.restore(ids[:, :most])[1] == (most - 1) // 8 * 8
    assert cache.restore(ids)[1] == 0
    with torch.no_grad():
        model(input_ids=ids[:, most:], cache=past)
    assert cache.store(ids, past) == 0
    with pytest.raises(InvalidRequest, match="are no blobs"):
        cache.rebuild(prompt(most // 8 * 8 + 8, 1))


def test_padding_is_what_generate_masks() -> None:
    def pads(pad: int | None, end: Any) -> int | None:
        config = SimpleNamespace(pad_token_id=pad, eos_token_id=end)
        return padding(SimpleNamespace(config=config))

    assert [pads(3, 2), pads(3, 3), pads(3, [1, 3]), pads(None, 2)] == [3, None, None, None]


def of(*shapes: Shape) -> KVLayout:
    return layers.layout([Layer(number, shape, "cpu") for number, shape in enumerate(shapes)])


def test_layouts_say_what_a_model_keeps() -> None:
    full, sliding = Shape(2, 16, 16, "bf16"), Shape(2, 16, 16, "bf16", 24)
    assert of(full, full, sliding).groups == (
        LayerGroup.attention(layers=2, heads=2, head_size=16),
        LayerGroup.sliding(layers=1, heads=2, head_size=16, window=24),
    )
    latent, expanded = Shape(1, 512, 64, "bf16"), Shape(4, 192, 128, "bf16")
    assert of(latent).groups == (LayerGroup.latent(layers=1, width=576),)
    layout = of(latent, expanded, expanded)
    assert layout.order == "layer,kv,head,token;512+64x1,192+128x2"
    assert layout.nbytes(3) == 3 * 2 * (576 + 2 * 4 * 320)
    with pytest.raises(InvalidRequest, match="their sum is odd"):
        of(Shape(2, 16, 15, "bf16"))
