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
    """Which bin of AGE_EDGES_S each age, from 0 on, falls into."""
    bins: IntArray = _AGE_STARTS_S.searchsorted(ages_s, "right") - 1
    return bins


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """How the trees are grown; regularisation counts in events."""

    n_trees: int = 40
    depth: int = 4
    rate: float = 0.18
    l2_events: float = 2.0
    l2_period_events: float = 10.0
    features_per_tree: int = 12
    rows_per_tree: float = 0.6


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
    def _thresholds(self) -> Float32Array:
        """What each question compares with: being above it is being in a bin above `cut`."""
        padded = np.pad(self.cuts, ((0, 0), (0, 1)), constant_values=np.inf)
        at = np.minimum(self.cut, padded.shape[1] - 1)
        thresholds: FloatArray = padded[self.feature, at].ravel()
        return thresholds.astype(np.float32)

    @cached_property
    def _first_leaf(self) -> IntArray:
        n_trees, depth = self.feature.shape
        first_leaf: IntArray = np.arange(n_trees, dtype=np.int64) << depth
        return first_leaf

    @cached_property
    def _leaf_values(self) -> Float32Array:
        n_trees, depth = self.feature.shape
        return self.values.reshape(n_trees << depth, -1).astype(np.float32)

    @cached_property
    def _asked(self) -> IntArray:
        return self.feature.ravel()

    def log_ratios(self, features: Float32Array) -> Float32Array:
        """f: rows by periods."""
        n_trees, depth = self.feature.shape
        asked = features[:, self._asked] > self._thresholds
        leaves = np.packbits(asked.reshape(-1, n_trees, depth), 2, "little")[:, :, 0]
        places = leaves + self._first_leaf
        sums: Float32Array = self._leaf_values[places].sum(1)
        return np.clip(sums, -_CLIP, _CLIP)

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
        self.expected = expected * weight[:, None]
        self.events = (period_of[last][:, None] == np.arange(self.n_periods)) * (reused * weight)[
            :, None
        ]

    def grow(self, settings: TreeSettings, rng: np.random.Generator) -> HazardTrees:
        """All trees, each on some of the samples, features and periods."""
        n_trees, depth = settings.n_trees, settings.depth
        feature = np.zeros((n_trees, depth), np.int64)
        cut = np.full((n_trees, depth), 255, np.uint8)
        values = np.zeros((n_trees, 1 << depth, self.n_periods))
        ratio = np.zeros((len(self.binned), self.n_periods))
        columns = np.ascontiguousarray(self.binned.T).astype(np.int64)
        for k in range(n_trees):
            chosen = rng.permutation(len(columns))[: settings.features_per_tree]
            hazard = self.expected * np.exp(ratio)
            kept = np.flatnonzero(rng.random(len(self.binned)) < settings.rows_per_tree)
            tree = _Tree(settings, (self.events - hazard)[kept], hazard[kept])
            periods = self._window(rng)
            tree.grow(columns, kept, chosen, periods)
            feature[k], cut[k], values[k] = tree.feature, tree.cut, tree.values(periods)
            leaves = (self.binned[:, feature[k]] > cut[k]) @ (1 << np.arange(depth))
            ratio += values[k][leaves]
            np.clip(ratio, -_CLIP, _CLIP, out=ratio)
        return HazardTrees(self.pooled, self.period_of, self.cuts, feature, cut, values)

    def _window(self, rng: np.random.Generator) -> slice:
        """Periods of which a tree is to tell most: a third of the time all."""
        if rng.random() < _WHOLE:
            return slice(0, self.n_periods)
        first, end = np.sort(rng.permutation(self.n_periods + 1)[:2]).tolist()
        return slice(first, end)


class _Tree:
    """One oblivious tree: at each level the question that gains most over all leaves."""

    def __init__(self, settings: TreeSettings, gradient: FloatArray, hazard: FloatArray) -> None:
        self._settings = settings
        self._gradient, self._hazard = gradient, hazard
        self.feature = np.zeros(settings.depth, np.int64)
        self.cut = np.full(settings.depth, 255, np.uint8)
        self._leaf = np.zeros(len(gradient), np.int64)

    def grow(self, columns: IntArray, kept: IntArray, chosen: IntArray, periods: slice) -> None:
        """Ask about the chosen features what tells most about the events of `periods`."""
        g, h = self._gradient[:, periods].sum(1), self._hazard[:, periods].sum(1)
        asked = [columns[j][kept] for j in chosen]
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
            np.stack([np.bincount(self._leaf, c, n_leaves) for c in a.T[periods]], 1)
            for a in (self._gradient, self._hazard)
        )
        shared = g.sum(1, keepdims=True) / (h.sum(1, keepdims=True) + l2.l2_events)
        apart = (g - h * shared) / (h + l2.l2_period_events)
        values = np.zeros((n_leaves, self._gradient.shape[1]))
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
