"""Requests as an engine meets them: conversations that share prefixes, and part ways."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from blobstore.bench.chat import Chat
from blobstore.bench.model_file import ModelFile

BLOB = 256
"""Tokens of a blob, unless the connector is told otherwise."""

SHARED = 1900
"""Tokens that the requests of a long conversation start with, unless they branch off before."""

ANSWER = 3


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to continue, and what the connector is told with them."""

    name: str
    tokens: list[int]
    max_tokens: int = ANSWER
    params: dict[str, Any] | None = None

    def wanted(self) -> dict[str, Any]:
        """As the engine's process takes it."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "max_tokens": self.max_tokens,
            "params": self.params,
        }


def fifty() -> list[Request]:
    """Five conversations of ten requests of about 2,000 tokens, taking turns."""
    conversations = [list(conversation(number, 10, SHARED)) for number in range(5)]
    return [one for turn in zip(*conversations, strict=True) for one in turn]


def few() -> list[Request]:
    """Six of about 1,000 tokens, of three conversations."""
    return [one for number in range(5, 8) for one in conversation(number, 2, SHARED // 2)]


def outgrowing() -> list[Request]:
    """Four that share nothing, and whose answers need further blocks."""
    return [
        Request(f"long {number}", read(101 * number + 50, 61 * 32 - 2), max_tokens=36)
        for number in range(4)
    ]


def conversation(number: int, requests: int, shared: int) -> Iterator[Request]:
    """They share the first `shared` tokens, every third but a part of these."""
    rng = random.Random(number)
    prefix = read(101 * number, shared)
    for index in range(requests):
        kept = shared if index % 3 or not index else rng.randrange(shared // 3, shared)
        rest = read(rng.randrange(1000), rng.randrange(40, 300))
        yield Request(f"{number}.{index}", prefix[:kept] + rest)


def read(start: int, n: int) -> list[int]:
    """`n` tokens of English text from `start` on; after its end it begins again."""
    ids = _book()
    return [ids[(start + i) % len(ids)] for i in range(n)]


@cache
def _book() -> list[int]:
    text = (resources.files("blobstore.bench") / "demo_document.txt").read_text("utf-8")
    return Chat(ModelFile()).encode(text)
