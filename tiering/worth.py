"""What holding an item is worth: the best rate of hits for the room and time it takes.

An index in the manner of Gittins: of all the times that one could hold an item from
now on before giving up on it, that with the most hits per second held. It is found for the
ages at which bins start, and by their logarithms for those between: items of one bin would
else be worth the same, whichever of them was used first.
"""

from __future__ import annotations

import numpy as np

from blobstore.tiering.hazard_trees import AGE_EDGES_S, FloatArray, IntArray

_STEPS = 4
"""In which worth goes from that at the start of one bin of ages to that of the next."""

_EVENLY = AGE_EDGES_S[1:-2, None] * (AGE_EDGES_S[2:-1] / AGE_EDGES_S[1:-2])[:, None] ** (
    np.arange(_STEPS) / _STEPS
)
WORTH_STARTS_S: FloatArray = np.concatenate([[0.0], _EVENLY.ravel(), AGE_EDGES_S[-2:-1]])
"""The ages from which each step of worth holds; the last one for good."""
N_WORTHS = len(WORTH_STARTS_S)


def worth_steps(ages_s: FloatArray) -> IntArray:
    """Which step of WORTH_STARTS_S each age falls into; below 0, the first."""
    steps: IntArray = WORTH_STARTS_S[1:].searchsorted(ages_s, "right")
    return steps


def by_steps(worth: FloatArray) -> FloatArray:
    """Of `worth_table`'s rows by age bins, rows by steps: what holds in the middle of each."""
    share = (np.arange(_STEPS) + 0.5) / _STEPS
    low, high = worth[:, 1:-1, None], worth[:, 2:, None]
    between = (low + (high - low) * share).reshape(len(worth), -1)
    return np.concatenate([worth[:, :1], between, worth[:, -1:]], 1)


def worth_table(hazards: FloatArray) -> FloatArray:
    """Hits per second held, of items of each row that have reached the start of each age bin."""
    width_s = np.diff(AGE_EDGES_S)
    expected = hazards * width_s
    used = -np.expm1(-expected)
    held_s = np.where(expected > 1e-6, used / np.maximum(hazards, 1e-300), width_s)
    before = np.cumsum(expected, 1) - expected
    worth = np.empty_like(hazards)
    for at in range(hazards.shape[1]):
        alive = np.exp(before[:, at : at + 1] - before[:, at:])
        hits = np.cumsum(alive * used[:, at:], 1)
        worth[:, at] = (hits / np.cumsum(alive * held_s[:, at:], 1)).max(1)
    return worth
