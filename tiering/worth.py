"""What holding an item is worth: the best rate of hits for the room and time it takes.

An index in the manner of Gittins: of all the times that one could hold an item from
now on before giving up on it, that with the most hits per second held.
"""

from __future__ import annotations

import numpy as np

from blobstore.tiering.hazard_trees import AGE_EDGES_S, FloatArray


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
