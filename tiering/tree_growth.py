"""Growing hazard trees of what became of samples: each tells what those before it left untold.

An item that was used again is an event at its age then; all count as expected events for
as long as they were watched. A tree asks what tells most of the events of some periods.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blobstore.tiering.hazard_trees import (
    AGE_EDGES_S,
    N_AGES,
    ByteArray,
    Float32Array,
    FloatArray,
    HazardTrees,
    IntArray,
    age_bins,
)

BoolArray = npt.NDArray[np.bool_]

_PERIODS_AT = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_N_BINS = 32
_CUT_SAMPLES = 12_000
"""Enough to tell where the samples lie."""

_NOWHERE = 255
"""Above every bin."""

_WHOLE = 1 / 3
"""Of the trees, that are to tell most about uses at any age."""


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """How the trees are grown; regularisation counts in events.

    There are as many trees as the events let hope that what one more finds is so, which
    `trees` gives for some numbers of events and between them: agents, nearly all of whose
    blocks are used again, tell twice as much as chats do in as many samples. The samples
    are dealt into as few shares as hold no more than `samples_per_tree` each, and the trees
    see one after the other: many small ones that see little tell more of what comes than few
    that see all. Each says `rate` of what it found, and less of it, down to `rate_of_few`,
    where there are fewer than `rate_samples`: few samples tell much that is not so.
    """

    trees: tuple[tuple[int, int], ...] = ((1_000, 75), (4_000, 100), (15_000, 100), (60_000, 400))
    depth: int = 4
    rate: float = 0.1
    rate_of_few: float = 0.05
    rate_samples: int = 60_000
    l2_events: float = 2.0
    l2_period_events: float = 10.0
    features_per_tree: int = 16
    samples_per_tree: int = 15_000

    def trees_for(self, n_events: float) -> int:
        """How many trees there are after so many events."""
        events, trees = zip(*self.trees, strict=True)
        return round(float(np.interp(n_events, events, trees)))

    def rate_for(self, n_samples: int) -> float:
        """What a tree says of what it found in so many samples, as a share."""
        return max(self.rate_of_few, self.rate * min(n_samples / self.rate_samples, 1.0))


@dataclass(frozen=True, slots=True)
class Belief:
    """What is taken for granted until samples say otherwise.

    Rows whose `feature` is above `threshold` have hazards that are higher by a factor of
    which `log_ratio` is the logarithm.
    """

    feature: int
    threshold: float
    log_ratio: float


def _binned(features: Float32Array, cuts: FloatArray) -> ByteArray:
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
    belief: Belief | None = None,
) -> HazardTrees:
    """The model of samples that were watched so long and then `reused`, or not yet.

    A `belief` takes the place of the first tree.
    """
    # A use at the very same time has taken some: no time would leave nothing to divide by.
    watched_s = np.maximum(watched_s, AGE_EDGES_S[1] / 2)
    rng = np.random.default_rng(seed)
    mixed = rng.permutation(len(features))
    features, watched_s = features[mixed], watched_s[mixed]
    reused, weight = reused[mixed], weight[mixed]
    pooled = _pooled_hazard(watched_s, reused, weight)
    period_of = _periods(watched_s[reused])
    cuts = _cuts(features[:_CUT_SAMPLES])
    growth = _Growth(features, watched_s, reused, weight, pooled, period_of, cuts)
    return growth.grow(settings, rng, belief)


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
    """The events of samples, which are in no order, and those expected by the trees so far.

    A row per period: each is read and written as a whole.
    """

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
        self.columns = np.ascontiguousarray(_binned(features, cuts).T)
        last = age_bins(watched_s)
        # Expected events up to the start of each bin, and of each period, at the pooled hazard.
        before = np.concatenate([[0.0], np.cumsum(pooled * np.diff(AGE_EDGES_S))])
        total = before[last] + pooled[last] * (watched_s - AGE_EDGES_S[last])
        starts = before[np.searchsorted(period_of, np.arange(self.n_periods + 1))]
        expected = np.clip(total[:, None] - starts[:-1], 0.0, np.diff(starts))
        self.expected = np.ascontiguousarray((expected * weight[:, None]).T, np.float32)
        self.events = np.zeros_like(self.expected)
        self.events[period_of[last], np.arange(len(last))] = reused * weight

    def grow(
        self, settings: TreeSettings, rng: np.random.Generator, belief: Belief | None
    ) -> HazardTrees:
        """All trees, each on some of the samples, features and periods."""
        n_trees, depth = settings.trees_for(float(self.events.sum())), settings.depth
        feature = np.zeros((n_trees, depth), np.int64)
        cut = np.full((n_trees, depth), _NOWHERE, np.uint8)
        values = np.zeros((n_trees, 1 << depth, self.n_periods))
        n_samples = self.events.shape[1]
        differing = np.flatnonzero(np.isfinite(self.cuts[:, 0]))
        if not len(differing):  # to be asked about, in vain
            differing = np.arange(1)
        n_shares = max(-(-n_samples // settings.samples_per_tree), 1)
        rate = settings.rate_for(n_samples)
        if belief is not None:
            feature[0], cut[0, 0] = belief.feature, self._cut_at(belief)
            values[0, 1::2] = belief.log_ratio
            self._expect(feature[0], cut[0], values[0], slice(0, self.n_periods))
        for k in range(belief is not None, n_trees):
            share = slice(*(n_samples * (k % n_shares + end) // n_shares for end in (0, 1)))
            chosen = rng.permutation(differing)[: settings.features_per_tree]
            expected = self.expected[:, share]
            tree = _Tree(settings, rate, self.events[:, share] - expected, expected)
            periods = self._window(rng)
            tree.grow(self.columns[chosen, share], periods)
            feature[k], cut[k], values[k] = chosen[tree.column], tree.cut, tree.values(periods)
            self._expect(feature[k], cut[k], values[k], periods)
        return HazardTrees(self.pooled, self.period_of, self.cuts, feature, cut, values)

    def _cut_at(self, belief: Belief) -> int:
        """The bin above which it holds; above none if no samples are told apart there."""
        at = int(np.searchsorted(self.cuts[belief.feature], belief.threshold, "right")) - 1
        return at if at >= 0 else _NOWHERE

    def _expect(
        self, feature: IntArray, cut: ByteArray, values: FloatArray, periods: slice
    ) -> None:
        """Expect as many more events as a new tree says."""
        leaves = np.zeros(self.events.shape[1], np.uint8)
        for level, (asked, above) in enumerate(zip(feature, cut, strict=True)):
            leaves |= (self.columns[asked] > above).view(np.uint8) << level
        at, factors = leaves.astype(np.intp), np.exp(values.T).astype(np.float32)
        for period in range(periods.start, periods.stop):
            self.expected[period] *= factors[period].take(at)

    def _window(self, rng: np.random.Generator) -> slice:
        """Periods of which a tree is to tell most: a third of the time all."""
        if rng.random() < _WHOLE:
            return slice(0, self.n_periods)
        first, end = np.sort(rng.permutation(self.n_periods + 1)[:2]).tolist()
        return slice(first, end)


class _Tree:
    """One oblivious tree: at each level the question that gains most over all leaves."""

    def __init__(
        self, settings: TreeSettings, rate: float, gradient: Float32Array, hazard: Float32Array
    ) -> None:
        self._settings, self._rate = settings, rate
        self._gradient, self._hazard = gradient, hazard
        self.column = np.zeros(settings.depth, np.int64)
        self.cut = np.full(settings.depth, _NOWHERE, np.uint8)
        self._leaf = np.zeros(gradient.shape[1], np.int64)

    def grow(self, columns: ByteArray, periods: slice) -> None:
        """Ask about `columns` of features what tells most about the events of `periods`."""
        weights = [a[periods].sum(0, dtype=np.float64) for a in (self._gradient, self._hazard)]
        sums = self._sums(columns, weights, 1)
        for level in range(self._settings.depth):
            gain, column, cut = self._best_cut(sums)
            if gain <= 0:
                return
            self.column[level], self.cut[level] = column, cut
            above = columns[column] > cut
            if level + 1 < self._settings.depth:
                sums = self._split(sums, columns, weights, above)
            self._leaf += above.astype(np.int64) << level

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
        values[:, periods] = self._rate * np.clip(shared + apart, -2.0, 2.0)
        return values

    def _split(
        self, sums: FloatArray, columns: ByteArray, weights: list[FloatArray], above: BoolArray
    ) -> FloatArray:
        """The sums of twice as many leaves: of the smaller half counted, the others are left."""
        few_above = 2 * np.count_nonzero(above) <= len(above)
        few = np.flatnonzero(above if few_above else ~above)
        counted = self._sums(columns[:, few], [w[few] for w in weights], sums.shape[2], few)
        halves = (sums - counted, counted) if few_above else (counted, sums - counted)
        return np.concatenate(halves, 2)

    def _sums(
        self,
        columns: ByteArray,
        weights: list[FloatArray],
        n_leaves: int,
        samples: IntArray | slice = slice(None),
    ) -> FloatArray:
        """What each of `weights` sums up to, by column, leaf and bin.

        One column at a time: all at once would hold the interpreter's lock for milliseconds.
        """
        n = n_leaves * _N_BINS
        sums = np.empty((len(weights), len(columns), n))
        starts = self._leaf[samples] * _N_BINS
        for column, binned in enumerate(columns):
            at = binned + starts
            for of_weight, weight in zip(sums, weights, strict=True):
                of_weight[column] = np.bincount(at, weight, n)
        return sums.reshape(*sums.shape[:2], n_leaves, _N_BINS)

    def _best_cut(self, sums: FloatArray) -> tuple[float, int, int]:
        """What is gained by asking which column whether its bin is above which."""
        below_g, below_h = sums.cumsum(3)
        all_g, all_h = below_g[..., -1:], below_h[..., -1:]
        l2 = self._settings.l2_events
        gains = below_g**2 / (below_h + l2) + (all_g - below_g) ** 2 / (all_h - below_h + l2)
        over = (gains - all_g**2 / (all_h + l2)).sum(1)[:, :-1]
        column, cut = divmod(int(over.argmax()), _N_BINS - 1)
        return float(over[column, cut]), column, cut
