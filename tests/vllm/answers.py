"""What is to be true of an engine's answers."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.clients import Client
from tests.support.polling import poll_until
from tests.vllm.engines import Engine
from tests.vllm.prompts import Request

Answers = dict[str, Any]

NEAR = 1e-3
"""How far a log-probability may lie from another run's, whose sums were made in another order."""

WORKS_S = 120.0


def assert_right(answers: Answers, expected: Answers) -> None:
    """The tokens are those of a run without a connector, and as likely."""
    assert answers
    for name, answer in answers.items():
        assert answer["tokens"] == expected[name]["tokens"], name
        assert answer["logprobs"] == pytest.approx(expected[name]["logprobs"], abs=NEAR), name


def cached(answers: Answers) -> int:
    """Tokens of all prompts that were not computed."""
    return sum(answer["cached"] for answer in answers.values())


def wait_restored(engine: Engine, request: Request, expected: Answers) -> None:
    """Ask until the store works: the prompt comes from there."""

    def restored() -> bool:
        engine.forget()
        answers = engine.run([request])
        assert_right(answers, expected)
        return cached(answers) > 0

    poll_until(restored, WORKS_S, "the prompt is restored from the store")


def wait_saved(kv: Client) -> None:
    """Until all that was put is on SSD."""
    poll_until(lambda: kv.stats()["tiers"]["ssd"]["dirty_bytes"] == 0, WORKS_S, "all is saved")
