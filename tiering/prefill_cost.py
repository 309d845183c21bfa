"""What it costs to compute tokens again: more, the further back they look."""

from __future__ import annotations

COST_DOUBLES_AT_TOKEN = 53_900
"""A token at this position costs twice what the first one does: 1.41e11 operations, and 2.62e6
for each token before it, in a dense model of 70e9 parameters."""


def prefill_cost(n_tokens: float) -> float:
    """Of the first `n_tokens` of a prompt, where the very first one costs 1."""
    return n_tokens + n_tokens * (n_tokens - 1) / 2 / COST_DOUBLES_AT_TOKEN
