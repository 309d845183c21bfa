"""Conversations of an agent: which context each request goes on from, and what it adds.

Tool outputs of all lengths, branches, a pause in which the daemon restarts, and one
compaction, after which a short context takes the place of a long one. Texts are drawn
from a book, so that the model reads language; all of it follows from the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from blobstore.bench.chat import Chat

SYSTEM = "You work in the harbour office with tools. Answer in one short sentence."
RULES_TOKENS = 120
"""Of what else every context begins with: a full blob that a compaction leaves alone."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a conversation. Others are named by their number in it."""

    name: str
    role: str
    n_tokens: int
    """Of the text that it adds."""
    after: int | None = None
    """The request that it goes on from; None begins a context, from the system's turn on."""
    pause: bool = False
    """The daemon restarts before it."""
    compacts: int | None = None
    """The request whose context it takes the place of."""
    ways: Sequence[str] = ()
    """In which it is measured; () is all of them."""


AGENT = (
    Request("task", "user", 650),
    Request("small tool output", "tool", 50, after=0),
    Request("tool output", "tool", 900, after=1),
    Request("follow-up", "user", 60, after=2),
    Request("branch", "tool", 300, after=2),
    Request("after a restart", "user", 60, after=3, pause=True),
    Request("large tool output", "tool", 5000, after=5, ways=("cold", "dram")),
    Request("long context", "user", 60, after=6),
    Request("compaction", "user", 250, compacts=7),
    Request("after compaction", "user", 60, after=8),
)
"""The conversation that `bench engine` measures."""

TINY = (
    Request("task", "user", 120),
    Request("tool output", "tool", 80, after=0),
    Request("branch", "tool", 50, after=0),
    Request("after a restart", "user", 20, after=1, pause=True),
    Request("compaction", "user", 90, compacts=3),
    Request("after compaction", "user", 20, after=4),
)
"""As AGENT, small."""


class Conversation:
    """The contexts of the requests of a script, as token ids."""

    def __init__(self, chat: Chat, script: Sequence[Request], seed: int) -> None:
        self._chat = chat
        self._script = script
        self._rng = random.Random(seed)  # noqa: S311 (texts to be read by a model)
        self._opening = chat.turn("system", f"{SYSTEM} {self._text(RULES_TOKENS)}")
        self._contexts: dict[int, list[int]] = {}

    def prompt(self, number: int) -> list[int]:
        """What the model reads for a request; the one that it goes on from is answered."""
        request = self._script[number]
        context = self._opening if request.after is None else self._contexts[request.after]
        prompt = context + self._chat.ask(self._text(request.n_tokens), request.role)
        self._contexts[number] = prompt
        return prompt

    def answered(self, number: int, tokens: Sequence[int]) -> list[int]:
        """Add the answer to a request; its whole context, as later ones continue it."""
        self._contexts[number] = self._contexts[number] + self._chat.answered(tokens)
        return self._contexts[number]

    def _text(self, n_tokens: int) -> str:
        text = ""
        while len(self._chat.encode(text)) < n_tokens:
            text += self._rng.choice(_sentences()) + " "
        return self._chat.text(self._chat.encode(text)[:n_tokens])


@cache
def _sentences() -> tuple[str, ...]:
    book = (resources.files("blobstore.bench") / "demo_document.txt").read_text("utf-8")
    return tuple(re.findall(r"[A-Z][^.\n]+\.", book))
