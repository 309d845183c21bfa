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
BoolArray = npt.NDArray[np.bool_]

N_AGES = 36
_AGE_STEP = 1.6
AGE_EDGES_S: FloatArray = np.concatenate([[0.0], 0.05 * _AGE_STEP ** np.arange(N_AGES)])
"""Ages are told apart by a factor of 1.6, from 50 ms to 8 days; the last bin is open."""

_AGE_STARTS_S = AGE_EDGES_S[:-1]

_PERIODS_AT = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_N_BINS = 32
_WHOLE = 1 / 3
"""Of the trees, that are to tell most about uses at any age."""

_CLIP = 6.0
"""Of the logarithm of a hazard against the pooled one: beyond, it is no estimate."""


def age_bins(ages_s: FloatArray) -> IntArray:
    """Which bin of AGE_EDGES_S each age falls into; below 0, the first."""
    bins: IntArray = _AGE_STARTS_S[1:].searchsorted(ages_s, "right")
    return bins


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """How the trees are grown; regularisation counts in events.

    Each tree sees a share of the rows, and no more than `rows_per_tree_max`: many
    samples make a better forest at the price of few.
    """

    n_trees: int = 40
    depth: int = 4
    rate: float = 0.18
    l2_events: float = 2.0
    l2_period_events: float = 10.0
    features_per_tree: int = 12
    rows_per_tree: float = 0.6
    rows_per_tree_max: int = 12_000


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
        return np.clip(sums, -_CLIP, _CLIP, out=sums)

    def hazards(self, log_ratios: npt.NDArray[np.floating]) -> FloatArray:
        """Per second: rows by age bins."""
        curve: FloatArray = self.pooled * np.exp(log_ratios[:, self.period_of])
        return curve


def bin_features(features: Float32Array, cuts: FloatArray) -> ByteArray:
    """Each feature as the number of its thresholds below it."""
    binned = np.empty(features.shape, np.uint8)
    for j, edges in enumerate(cuts):
        binned[:, j] = np.searchsorted(edges, features[:, j], "left")
    return binned


def fit_hazard_trees(
    features: Float32Array,
    watched_s: FloatArray,
    reused: BoolArray,
    weight: FloatArray,
    settings: TreeSettings,
    seed: int,
) -> HazardTrees:
    """The model of samples that were watched so long and then `reused`, or not yet."""
    # A use at the very same time has taken some: no time would leave nothing to divide by.
    watched_s = np.maximum(watched_s, AGE_EDGES_S[1] / 2)
    pooled = _pooled_hazard(watched_s, reused, weight)
    period_of = _periods(watched_s[reused])
    cuts = _cuts(features)
    growth = _Growth(features, watched_s, reused, weight, pooled, period_of, cuts)
    return growth.grow(settings, np.random.default_rng(seed))


def _pooled_hazard(watched_s: FloatArray, reused: BoolArray, weight: FloatArray) -> FloatArray:
    """Events over exposure, after a third of an event at a hazard of 0.1/age, which has no scale.

    At ages that nothing has been watched to, that is all that is known: little enough
    that nothing is kept for uses that nobody has ever seen.
    """
    last = age_bins(watched_s)
    events = np.bincount(last, weight * reused, N_AGES)
    ended = np.bincount(last, weight, N_AGES)
    part = np.bincount(last, weight * (watched_s - AGE_EDGES_S[last]), N_AGES)
    beyond = ended.sum() - np.cumsum(ended)
    exposure = beyond * np.diff(AGE_EDGES_S) + part
    prior = 0.3
    pooled: FloatArray = (events + prior) / (exposure + prior * 10 * AGE_EDGES_S[1:])
    return pooled


def _periods(times_s: FloatArray) -> IntArray:
    """Bins of ages in groups that hold fair shares of the events."""
    if not len(times_s):
        return np.zeros(N_AGES, np.int64)
    at = age_bins(np.quantile(times_s, _PERIODS_AT))
    firsts = np.unique(np.maximum(at, 1))
    return np.searchsorted(firsts, np.arange(N_AGES), "right").astype(np.int64)


def _cuts(features: Float32Array) -> FloatArray:
    cuts = np.full((features.shape[1], _N_BINS - 1), np.inf)
    # Half by how many samples lie between, half by how many different values do: rare
    # values matter too (a block that hundreds of chains go through).
    shares = np.arange(1, _N_BINS // 2) / (_N_BINS // 2)
    for j in range(features.shape[1]):
        column, values = features[:, j], np.unique(features[:, j])
        found = values
        if len(values) >= _N_BINS:
            of_samples = np.quantile(column, shares, method="lower")
            of_values = np.quantile(values, shares, method="lower")
            found = np.unique(np.concatenate([of_samples, of_values]))
        found = found[found < values[-1]]
        cuts[j, : len(found)] = found
    return cuts


class _Growth:
    """The samples' events and expected events by period, and the trees so far."""

    def __init__(
        self,
        features: Float32Array,
        watched_s: FloatArray,
        reused: BoolArray,
        weight: FloatArray,
        pooled: FloatArray,
        period_of: IntArray,
        cuts: FloatArray,
    ) -> None:
        self.pooled, self.period_of, self.cuts = pooled, period_of, cuts
        self.n_periods = int(period_of[-1]) + 1
        self.binned = bin_features(features, cuts)
        last = age_bins(watched_s)
        # Expected events up to the start of each bin, and of each period, at the pooled hazard.
        before = np.concatenate([[0.0], np.cumsum(pooled * np.diff(AGE_EDGES_S))])
        total = before[last] + pooled[last] * (watched_s - AGE_EDGES_S[last])
        starts = before[np.searchsorted(period_of, np.arange(self.n_periods + 1))]
        expected = np.clip(total[:, None] - starts[:-1], 0.0, np.diff(starts))
        # A row per period: each is read and written as a whole.
        self.expected = np.ascontiguousarray((expected * weight[:, None]).T, np.float32)
        self.events = np.zeros_like(self.expected)
        self.events[period_of[last], np.arange(len(last))] = reused * weight

    def grow(self, settings: TreeSettings, rng: np.random.Generator) -> HazardTrees:
        """All trees, each on some of the samples, features and periods."""
        n_trees, depth = settings.n_trees, settings.depth
        feature = np.zeros((n_trees, depth), np.int64)
        cut = np.full((n_trees, depth), 255, np.uint8)
        values = np.zeros((n_trees, 1 << depth, self.n_periods))
        n_samples = len(self.binned)
        ratio = np.zeros_like(self.expected)
        columns = np.ascontiguousarray(self.binned.T)
        n_kept = min(int(np.ceil(n_samples * settings.rows_per_tree)), settings.rows_per_tree_max)
        for k in range(n_trees):
            chosen = rng.permutation(len(columns))[: settings.features_per_tree]
            kept = rng.choice(n_samples, n_kept, replace=False, shuffle=False)
            hazard = self.expected[:, kept] * np.exp(np.clip(ratio[:, kept], -_CLIP, _CLIP))
            tree = _Tree(settings, self.events[:, kept] - hazard, hazard)
            periods = self._window(rng)
            tree.grow(columns, kept, chosen, periods)
            feature[k], cut[k], values[k] = tree.feature, tree.cut, tree.values(periods)
            leaves = np.zeros(n_samples, np.uint8)
            for level in range(depth):
                leaves |= (columns[feature[k, level]] > cut[k, level]).view(np.uint8) << level
            for period in range(periods.start, periods.stop):
                ratio[period] += values[k, :, period].astype(np.float32)[leaves]
        return HazardTrees(self.pooled, self.period_of, self.cuts, feature, cut, values)

    def _window(self, rng: np.random.Generator) -> slice:
        """Periods of which a tree is to tell most: a third of the time all."""
        if rng.random() < _WHOLE:
            return slice(0, self.n_periods)
        first, end = np.sort(rng.permutation(self.n_periods + 1)[:2]).tolist()
        return slice(first, end)


class _Tree:
    """One oblivious tree: at each level the question that gains most over all leaves."""

    def __init__(
        self, settings: TreeSettings, gradient: Float32Array, hazard: Float32Array
    ) -> None:
        self._settings = settings
        self._gradient, self._hazard = gradient, hazard
        self.feature = np.zeros(settings.depth, np.int64)
        self.cut = np.full(settings.depth, 255, np.uint8)
        self._leaf = np.zeros(gradient.shape[1], np.int64)

    def grow(self, columns: ByteArray, kept: IntArray, chosen: IntArray, periods: slice) -> None:
        """Ask about the chosen features what tells most about the events of `periods`."""
        g, h = (a[periods].sum(0, dtype=np.float64) for a in (self._gradient, self._hazard))
        asked = [columns[j][kept].astype(np.int64) for j in chosen]
        for level in range(self._settings.depth):
            best = 0.0
            for j, column in zip(chosen, asked, strict=True):
                gain, cut = self._best_cut(self._leaf * _N_BINS + column, g, h, 1 << level)
                if gain > best:
                    best, winner = gain, column
                    self.feature[level], self.cut[level] = j, cut
            if best <= 0:
                return
            self._leaf += (winner > self.cut[level]).astype(np.int64) << level

    def values(self, periods: slice) -> FloatArray:
        """Of each leaf, by period: drawn to what the leaf says of all `periods`, and that to 0."""
        n_leaves, l2 = 1 << self._settings.depth, self._settings
        g, h = (
            np.stack([np.bincount(self._leaf, c, n_leaves) for c in a[periods]], 1)
            for a in (self._gradient, self._hazard)
        )
        shared = g.sum(1, keepdims=True) / (h.sum(1, keepdims=True) + l2.l2_events)
        apart = (g - h * shared) / (h + l2.l2_period_events)
        values = np.zeros((n_leaves, len(self._gradient)))
        values[:, periods] = l2.rate * np.clip(shared + apart, -2.0, 2.0)
        return values

    def _best_cut(
        self, at: IntArray, g: FloatArray, h: FloatArray, n_leaves: int
    ) -> tuple[float, int]:
        below_g = np.bincount(at, g, n_leaves * _N_BINS).reshape(n_leaves, _N_BINS).cumsum(1)
        below_h = np.bincount(at, h, n_leaves * _N_BINS).reshape(n_leaves, _N_BINS).cumsum(1)
        all_g, all_h = below_g[:, -1:], below_h[:, -1:]
        l2 = self._settings.l2_events
        gains = below_g**2 / (below_h + l2) + (all_g - below_g) ** 2 / (all_h - below_h + l2)
        over = (gains - all_g**2 / (all_h + l2)).sum(0)[:-1]
        cut = int(over.argmax())
        return float(over[cut]), cut
