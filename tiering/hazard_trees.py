"""How likely an item is used again at each age: boosted trees over a pooled hazard.

The hazard of an item of features x at age a is `pooled(a) * exp(f(x, period of a))`.
f is a sum of oblivious trees (one question per level, asked of all) whose leaves hold a
value per period, so that one pass gives the whole curve. Items that have not been used
again until now count for as long as they have been watched.

Plain NumPy: the trees are asked for a handful of items at a time on the event loop,
where a call into a library of its own costs more than the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

N_AGES = 36
_AGE_STEP = 1.6
AGE_EDGES_S: FloatArray = np.concatenate([[0.0], 0.05 * _AGE_STEP ** np.arange(N_AGES)])
"""Ages are told apart by a factor of 1.6, from 50 ms to 8 days; the last bin is open."""

_AGE_STARTS_S = AGE_EDGES_S[:-1]

_CLIP = 6.0
"""Of the logarithm of a hazard against the pooled one: beyond, it is no estimate."""


def age_bins(ages_s: FloatArray) -> IntArray:
    """Which bin of AGE_EDGES_S each age falls into; below 0, the first."""
    bins: IntArray = _AGE_STARTS_S[1:].searchsorted(ages_s, "right")
    return bins


@dataclass(frozen=True)
class HazardTrees:
    """A fitted model: plain arrays. Trees are at most eight levels deep.

    Args:
        pooled: hazard per second and age bin of all items together.
        period_of: the period of each age bin.
        cuts: ascending thresholds of each feature, padded with infinity.
        feature, cut: what each level of each tree asks: is the feature's bin above `cut`?
        values: per tree, leaf and period.
    """

    pooled: FloatArray
    period_of: IntArray
    cuts: FloatArray
    feature: IntArray
    cut: ByteArray
    values: FloatArray

    @cached_property
    def _questions(self) -> tuple[IntArray, Float32Array]:
        """The feature and threshold of each question: eight for each byte of answers.

        Being above the threshold is being in a bin above `cut`. Bytes are filled up with
        questions to which the answer is no.
        """
        n_trees, depth = self.feature.shape
        padded = np.pad(self.cuts, ((0, 0), (0, 1)), constant_values=np.inf)
        at = np.minimum(self.cut, padded.shape[1] - 1)
        n_bytes = -(-n_trees // self._trees_per_byte)
        feature = np.zeros((n_bytes * self._trees_per_byte, depth), np.int64)
        threshold = np.full(feature.shape, np.inf, np.float32)
        feature[:n_trees], threshold[:n_trees] = self.feature, padded[self.feature, at]
        spare = ((0, 0), (0, 8 - self._trees_per_byte * depth))
        features = np.pad(feature.reshape(n_bytes, -1), spare)
        thresholds = np.pad(threshold.reshape(n_bytes, -1), spare, constant_values=np.inf)
        return features.ravel(), thresholds.ravel()

    @cached_property
    def _trees_per_byte(self) -> int:
        return int(8 // self.feature.shape[1])

    @cached_property
    def _sums(self) -> Float32Array:
        """What the trees of one byte of answers say together: a row for each of its values."""
        n_trees, depth = self.feature.shape
        sums = []
        for first in range(0, n_trees, self._trees_per_byte):
            of_byte = np.zeros((256, self.values.shape[2]))
            for at, values in enumerate(self.values[first : first + self._trees_per_byte]):
                of_byte += values[(np.arange(256) >> at * depth) & ((1 << depth) - 1)]
            sums.append(of_byte)
        return np.concatenate(sums).astype(np.float32)

    @cached_property
    def _first_sums(self) -> IntArray:
        n_bytes = len(self._sums) // 256
        return np.arange(0, n_bytes << 8, 256, dtype=np.int64)[:, None]

    def log_ratios(self, features: Float32Array) -> Float32Array:
        """f: rows by periods."""
        asked, thresholds = self._questions
        answers = np.packbits(features.take(asked, 1) > thresholds, 1, "little")
        # By tree first: the sum goes through whole rows of memory.
        terms = self._sums.take(answers.T + self._first_sums, 0)
        sums: Float32Array = np.add.reduce(terms, 0)
        np.minimum(sums, _CLIP, out=sums)
        return np.maximum(sums, -_CLIP, out=sums)

    def hazards(self, log_ratios: npt.NDArray[np.floating]) -> FloatArray:
        """Per second: rows by age bins.

        Ratios go evenly from the middle of one period to that of the next: what a tree says of
        a period is no more true of its last bin than of the first one after it.
        """
        curve: FloatArray = self.pooled * np.exp(log_ratios @ self._shares)
        return curve

    @cached_property
    def _shares(self) -> FloatArray:
        """How much each period has to say of each age bin: periods by bins."""
        bins = np.arange(N_AGES)
        each = np.eye(int(self.period_of[-1]) + 1)
        middles = [bins[self.period_of == period].mean() for period in range(len(each))]
        return np.stack([np.interp(bins, middles, one) for one in each])
