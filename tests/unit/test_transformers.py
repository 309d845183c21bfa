"""A model that goes on from the store says what it would have said without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import Client
from blobstore.clients.transformers import StoredCache
from blobstore.errors import InvalidRequest, SizeMismatch
from tests.support.served_store import ServedStore, served_store
from tests.support.tiny_models import KINDS, WINDOW, answer, prompt, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEP = 8
ANSWER = 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "socket") as store:
        yield store


@pytest.fixture
def kv(store: ServedStore) -> Iterator[Client]:
    with Client(store.address, timeout_s=20.0) as kv:
        yield kv


def stored(kv: Client, model: Any, **options: Any) -> StoredCache:
    return StoredCache(kv, model, tokens_per_blob=STEP, **options)


def turn(cache: StoredCache, model: Any, ids: Any) -> tuple[Any, int, int]:
    """The answer, the tokens restored and the blobs stored."""
    past, n = cache.restore(ids)
    assert past.get_seq_length() == n
    out = answer(model, ids, ANSWER, past)
    return out, n, cache.store(out, past)


def states(past: Any) -> list[Any]:
    return [held for layer in past.layers for held in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_and_branches_are_as_without_a_store(kv: Client, kind: str) -> None:
    model = tiny(kind)
    cache = stored(kv, model)
    ids = prompt(61, 1)
    contexts = []
    held = 0
    for number in range(3):
        out, n, new = turn(cache, model, ids)
        assert n == held
        assert torch.equal(out, answer(model, ids, ANSWER))
        held = (out.shape[1] - 1) // STEP * STEP
        assert new == (held - n) // STEP
        contexts.append(out)
        ids = torch.cat([out, prompt(9, 10 + number)], 1)
    branch = torch.cat([contexts[0][:, :45], prompt(20, 3)], 1)
    out, n, new = turn(cache, model, branch)
    assert (n, new) == (40, (out.shape[1] - 1) // STEP - 5)
    assert torch.equal(out, answer(model, branch, ANSWER))


@pytest.mark.parametrize("kind", ["grouped", "sliding", "sliding and full", "latent"])
def test_in_bf16(kv: Client, kind: str) -> None:
    model = tiny(kind).to(torch.bfloat16)
    cache = stored(kv, model)
    ids = prompt(61, 1)
    past, _ = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids[:, :56], cache=past)
    unstored = copy.deepcopy(past)
    assert cache.store(ids[:, :56], past) == 7
    restored, n = cache.restore(ids)
    assert n == 56
    assert cache.namespace.dtype == "bf16"
    for own, other in zip(states(restored), states(unstored), strict=True):
        assert own.dtype == torch.bfloat16
        assert torch.equal(own, other)
    assert torch.equal(answer(model, ids, ANSWER, restored), answer(model, ids, ANSWER, unstored))


@pytest.mark.parametrize("n_tokens", [STEP, WINDOW - 8, WINDOW, WINDOW + 8, 2 * WINDOW, 96])
@pytest.mark.parametrize("kind", ["sliding", "sliding and full"])
def test_a_window_is_restored_wherever_the_prefix_ends(
    kv: Client, kind: str, n_tokens: int
) -> None:
    model = tiny(kind)
    cache = stored(kv, model)
    whole, _ = cache.restore(prompt(STEP, 0))
    ids = prompt(120, 2)
    with torch.no_grad():
        model(input_ids=ids, cache=whole)  # the window has passed most of it at once
    assert cache.store(ids, whole) == 15
    start = ids[:, : n_tokens + 1]
    past, n = cache.restore(start)
    assert n == n_tokens
    for layer, native in zip(past.layers, native_cache(model, start[:, :n]).layers, strict=True):
        assert layer.keys.shape == native.keys.shape
        torch.testing.assert_close(layer.keys, native.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.values, native.values, rtol=1e-3, atol=1e-4)
    assert torch.equal(answer(model, start, ANSWER, past), answer(model, start, ANSWER))


def native_cache(model: Any, ids: Any) -> Any:
    past = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, cache=past)
    return past


def test_every_token_of_a_window_may_come_one_by_one(kv: Client) -> None:
    model = tiny("sliding")
    cache = stored(kv, model)
    ids = prompt(10, 4)
    past, _ = cache.restore(ids)
    out = answer(model, ids, 70, past)
    assert cache.store(out, past) == 9
    longer = torch.cat([out, prompt(5, 5)], 1)
    out, n, _ = turn(cache, model, longer)
    assert n == 72
    assert torch.equal(out, answer(model, longer, ANSWER))


def test_a_cache_that_was_cut_back_is_stored_as_it_is_then(kv: Client) -> None:
    model = tiny("sliding and full")
    cache = stored(kv, model)
    ids = prompt(20, 6)
    past, _ = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=torch.cat([ids, prompt(3, 7)], 1), cache=past)
    past.crop(-5)
    other = torch.cat([ids[:, :18], prompt(30, 8)], 1)
    out = answer(model, other, ANSWER, past)
    assert torch.equal(out, answer(model, other, ANSWER))
    assert cache.store(out, past) == 7
    assert torch.equal(turn(cache, model, out)[0], answer(model, out, ANSWER))


def test_what_was_stored_is_not_remembered(kv: Client) -> None:
    model = tiny("sliding")
    cache = stored(kv, model)
    ids = prompt(100, 4)
    past, _ = cache.restore(ids)
    out = answer(model, ids, 30, past)
    layer = past.layers[0]
    assert sum(keys.shape[-2] for keys, _ in layer.pieces) == 129
    assert cache.store(out, past) == 16
    assert sum(keys.shape[-2] for keys, _ in layer.pieces) == 1


def test_a_plain_cache_that_lost_tokens_is_not_stored(
    kv: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("sliding")
    cache = stored(kv, model)
    ids = prompt(60, 4)
    assert cache.store(ids, native_cache(model, ids)) == 0
    assert cache.store(ids, native_cache(model, ids)) == 0
    assert [record.message for record in caplog.records] == [
        "MistralForCausalLM: store is a miss: the cache has forgotten tokens that are not stored: "
        "begin with restore"
    ]
    short = ids[:, : WINDOW - 1]
    assert cache.store(short, native_cache(model, short)) == 2
    everything = transformers.DynamicCache()  # without a configuration it forgets nothing
    with torch.no_grad():
        model(input_ids=ids, cache=everything)
    assert cache.store(ids, everything) == 5
    assert torch.equal(turn(cache, model, ids)[0], answer(model, ids, ANSWER))


@pytest.mark.parametrize("kind", ["grouped", "sliding and full", "latent"])
def test_rebuilt_blobs_are_what_was_stored(kv: Client, kind: str) -> None:
    model = tiny(kind)
    cache = stored(kv, model)
    ids = prompt(65, 1)
    turn(cache, model, ids)
    keys = cache.ns.keys(ids[0])
    with kv.get(cache.ns, keys) as lease:
        rebuilt = cache.rebuild(ids[0, 40:64], lease[:5])
        for old, new in zip(lease[5:], rebuilt, strict=True):
            np.testing.assert_allclose(
                np.frombuffer(new, np.float32), np.frombuffer(old, np.float32), 1e-3, 1e-4
            )
        assert cache.rebuild([], lease[:5]) == []
        with pytest.raises(InvalidRequest, match="3 tokens after 5 blobs"):
            cache.rebuild([1, 2, 3], lease[:5])
        with pytest.raises(SizeMismatch):
            cache.rebuild(ids[0, 40:64], lease[:5], rebuilt[:2])
        with pytest.raises(SizeMismatch, match="blob 1 has 3 bytes"):
            cache.rebuild(ids[0, 40:64], [lease[0], memoryview(b"abc")])


@pytest.mark.parametrize("kind", ["grouped", "sliding"])
def test_a_context_rebuilt_into_the_store_gives_the_same_tokens(kv: Client, kind: str) -> None:
    model = tiny(kind)
    cache = stored(kv, model)
    ids = prompt(65, 1)
    keys = cache.ns.keys(ids[0])
    for start, end in ((0, 3), (3, 8)):
        parent = keys[start - 1] if start else None
        with (
            kv.get(cache.ns, keys[:start]) as lease,
            kv.put(cache.ns, keys[start:end], parent=parent) as writer,
        ):
            payloads = [writer[number] for number in range(len(writer))]
            cache.rebuild(ids[0, start * STEP : end * STEP], lease, payloads)
        assert writer.results == ["stored"] * (end - start)
    out, n, _ = turn(cache, model, ids)
    assert n == 64
    assert torch.equal(out, answer(model, ids, ANSWER))


def test_another_process_with_the_same_model_finds_what_this_one_stored(kv: Client) -> None:
    ids = prompt(40, 1)
    turn(stored(kv, tiny("grouped")), tiny("grouped"), ids)
    assert stored(kv, tiny("grouped")).restore(ids)[1] == 32


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"sliding_window": WINDOW + 8},
    ],
    ids=str,
)
def test_another_model_of_the_same_shape_finds_nothing(kv: Client, other: dict[str, Any]) -> None:
    kind = "sliding" if "sliding_window" in other else "grouped"
    ids = prompt(40, 1)
    turn(stored(kv, tiny(kind)), tiny(kind), ids)
    assert stored(kv, tiny(kind, **other)).restore(ids)[1] == 0


def test_other_names_find_nothing(kv: Client) -> None:
    model = tiny("grouped")
    ids = prompt(40, 1)
    turn(stored(kv, model, revision="a", adapter="b", salt="c", name="d"), model, ids)
    named = {"revision": "a", "adapter": "b", "salt": "c", "name": "d"}
    assert stored(kv, model, **named).restore(ids)[1] == 32
    for field in named:
        assert stored(kv, model, **(named | {field: "x"})).restore(ids)[1] == 0
    half = tiny("grouped").to(torch.bfloat16)
    assert stored(kv, half, **named).restore(ids)[1] == 0


def test_one_changed_weight_is_another_model(kv: Client) -> None:
    ids = prompt(40, 1)
    model = tiny("grouped")
    turn(stored(kv, model), model, ids)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 5] += 1
    assert stored(kv, model).restore(ids)[1] == 0


def test_settings_that_change_nothing_are_no_other_model(kv: Client) -> None:
    ids = prompt(40, 1)
    model = tiny("grouped")
    turn(stored(kv, model), model, ids)
    model.config.pad_token_id = 3
    model.config.use_cache = False
    assert stored(kv, model).restore(ids)[1] == 32


def test_nothing_is_stored_from_padding_on(kv: Client) -> None:
    model = tiny("grouped")
    model.generation_config.pad_token_id = 7
    cache = stored(kv, model)
    ids = prompt(40, 1)
    ids[ids == 7] = 8
    ids[0, 20] = 7
    past, _ = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids, cache=past)
    assert cache.store(ids, past) == 2
    assert cache.restore(ids)[1] == 16
    ids[0, 0] = 7
    assert cache.store(ids, past) == 0
    model.generation_config.eos_token_id = [1, 7]  # then generate masks nothing
    assert stored(kv, model).store(ids, past) == 5


def test_ids_may_come_in_any_form(kv: Client) -> None:
    model = tiny("grouped")
    cache = stored(kv, model)
    ids = prompt(40, 1)
    turn(cache, model, ids)
    forms = (ids, ids[0], ids[0].tolist(), ids[0].numpy(), ids.int(), {"input_ids": ids})
    assert [cache.restore(form)[1] for form in forms] == [32] * len(forms)


def test_short_prompts_are_misses(kv: Client) -> None:
    cache = stored(kv, tiny("grouped"))
    for n_tokens in (0, 1, STEP):
        past, n = cache.restore(list(range(n_tokens)))
        assert (past.get_seq_length(), n) == (0, 0)
    assert cache.store([1, 2, 3], transformers.DynamicCache()) == 0


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], [1.5], [[[1]]]], ids=str)
def test_ids_that_are_no_single_sequence_are_refused(kv: Client, ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        stored(kv, tiny("grouped")).restore(ids)


def test_a_context_may_exceed_the_arena(store: ServedStore, kv: Client) -> None:
    model = tiny("grouped", num_key_value_heads=4, head_dim=256, num_hidden_layers=8)
    cache = StoredCache(kv, model, tokens_per_blob=16)
    ids = prompt(401, 1)
    past = native_cache(model, ids)
    nbytes = 25 * cache.namespace.nbytes
    assert nbytes > store.call(lambda store: store.stats())["tiers"]["dram"]["capacity_bytes"]
    assert cache.store(ids, past) == 25
    restored, n = cache.restore(ids)
    assert n == 400
    for own, other in zip(states(restored), states(past), strict=True):
        assert torch.equal(own, other[:, :, :400])
