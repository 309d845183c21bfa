"""A real model in transformers goes on from the store: turns, a branch, restarts of the daemon."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.bench.chat import Chat
from blobstore.bench.kv_cache import KVCache
from blobstore.bench.model_file import ModelFile
from blobstore.bench.smollm2 import SmolLM2
from blobstore.clients import Client
from blobstore.clients.transformers import StoredCache
from tests.support.daemon import daemon
from tests.support.smollm2_torch import load
from tests.support.tiny_models import answer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

STEP = 16
ANSWER = 12
STORY = (
    "The lamp of the lighthouse was lit at dusk by the keeper's daughter, Mira, who was nine "
    "years old. Her father had gone to the mainland for oil and bread, and the storm kept him."
)


@pytest.fixture(scope="module")
def file() -> ModelFile:
    return ModelFile()


@pytest.fixture(scope="module")
def loaded(file: ModelFile) -> Any:
    return load(file)


@pytest.fixture(scope="module")
def chat(file: ModelFile) -> Chat:
    return Chat(file)


@pytest.fixture(params=[pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def model(request: pytest.FixtureRequest, loaded: Any) -> Iterator[Any]:
    if request.param == "fp32":
        yield loaded
    else:
        yield copy.deepcopy(loaded).to(torch.bfloat16)


def tensor(ids: list[int]) -> Any:
    return torch.tensor([ids])


def asked(chat: Chat, question: str) -> list[int]:
    return chat.turn("system", f"You answer briefly. {STORY}") + chat.ask(question)


def one_turn(cache: StoredCache, model: Any, ids: list[int]) -> tuple[list[int], int]:
    """The ids after the answer, which is as without a store; and the tokens restored."""
    prompt = tensor(ids)
    past, n = cache.restore(prompt)
    # Split alike: in bf16 two words may be equally likely, and another split may say the other.
    plain = cache.restore([])[0]
    with torch.no_grad():
        if n:
            model(input_ids=prompt[:, :n], cache=plain, logits_to_keep=1)
    out = answer(model, prompt, ANSWER, past)
    assert torch.equal(out, answer(model, prompt, ANSWER, plain))
    cache.store(out, past)
    return out[0].tolist(), n


def test_a_conversation_through_restarts(tmp_path: Path, model: Any, chat: Chat) -> None:
    first = asked(chat, "Who lit the lamp?")
    with daemon(tmp_path) as run, Client(run.address, timeout_s=30.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP, retention="durable")
        context, n = one_turn(cache, model, first)
        assert n == 0
        assert "Mira" in chat.text(context[len(first) :])
        held = (len(context) - 1) // STEP * STEP
        second = chat.answered(context[len(first) :])
        second = [*first, *second, *chat.ask("Why was her father away?")]
        _, n = one_turn(cache, model, second)
        assert n == held
        run.kill()
        with daemon(tmp_path):
            branch = asked(chat, "How old was she?")
            context, n = one_turn(cache, model, branch)
            assert n >= 3 * STEP  # the story, from SSD
            assert one_turn(cache, model, second)[1] > held
    with daemon(tmp_path) as run, Client(run.address, timeout_s=30.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP)  # as another process would
        assert cache.restore(tensor(second))[1] > held


def test_it_says_what_the_numpy_runner_says(loaded: Any, chat: Chat, file: ModelFile) -> None:
    ids = asked(chat, "Who lit the lamp?")
    own = SmolLM2(file).generate(
        ids, KVCache(file.sizes, capacity_tokens=128, dtype="fp32"), ANSWER
    )
    out = answer(loaded, tensor(ids), ANSWER)
    assert out[0, len(ids) :].tolist() == list(own)
