"""What a fit makes of watched uses: classes of items, each with its hazard at every age."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blobstore.tiering.hazard_trees import (
    AGE_EDGES_S,
    N_AGES,
    FloatArray,
    HazardTrees,
    IntArray,
    age_bins,
)
from blobstore.tiering.reuse_features import ITEM_FEATURES, N_FEATURES, N_REQUEST, Float32Array
from blobstore.tiering.reuse_samples import WatchedUses
from blobstore.tiering.tree_growth import Belief, TreeSettings, fit_hazard_trees
from blobstore.tiering.worth import by_steps, worth_table

MODEL_VERSION = 2
"""Of what the arrays of a model mean: features, ages, classes."""

_USED_AGAIN = Belief(N_REQUEST + ITEM_FEATURES.index("uses_before"), threshold=0.5, log_ratio=1.0)
"""What was used again once is likely to be used again, as LRU-2 has it: on chats few samples say so
soon enough. (On agents nearly everything was; they soon say otherwise.)"""

_CLASSES = 400
_CENTRE_ROUNDS = 6
_ROWS = 64
"""Compared with all classes at a time: for more the library of NumPy would wake threads."""

_CENTRE_SAMPLES = 5000

Arrays = dict[str, npt.NDArray[np.generic]]
Values = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a fit needs, owned by nobody else; `words` are the codes of hints."""

    uses: WatchedUses
    trees: TreeSettings
    seed: int
    words: tuple[str, ...] = ()


class Fitted:
    """Trees that find an item's class, and what holds for each class at each age.

    The last class is of items of which nothing is known.
    """

    def __init__(
        self, trees: HazardTrees, centres: FloatArray, n_samples: int, words: tuple[str, ...]
    ) -> None:
        self.trees = trees
        self.centres = centres
        self.n_samples = n_samples
        self.words = words
        self._nearest = (-2 * centres.T).astype(np.float32)
        self._levels = centres.mean(1).astype(np.float32)
        self._norms = (centres**2).sum(1).astype(np.float32)
        self._mean = np.full(centres.shape[1], 1 / centres.shape[1], np.float32)
        self.hazards = trees.hazards(np.concatenate([centres, np.zeros((1, centres.shape[1]))]))
        self.worth_per_s = by_steps(worth_table(self.hazards))
        steps = self.hazards * np.diff(AGE_EDGES_S)
        self._until = np.cumsum(steps, 1) - steps

    @property
    def unknown_class(self) -> int:
        """Of items of which nothing is known."""
        return len(self.centres)

    def classes(self, features: Float32Array) -> tuple[IntArray, Float32Array]:
        """The class of each row of features, and by what factor the row's hazards are higher."""
        ratios = self.trees.log_ratios(features)
        nearest = np.empty(len(ratios), np.int64)
        for start in range(0, len(ratios), _ROWS):
            distances = ratios[start : start + _ROWS] @ self._nearest
            distances += self._norms
            distances.argmin(1, out=nearest[start : start + _ROWS])
        levels: Float32Array = np.exp(ratios @ self._mean - self._levels[nearest])
        return nearest, levels

    def expected_uses(self, classes: IntArray, ages_s: FloatArray) -> FloatArray:
        """Accumulated hazard up to each age."""
        bins = age_bins(ages_s)
        within_s = np.minimum(ages_s, AGE_EDGES_S[-1]) - AGE_EDGES_S[bins]
        total: FloatArray = self._until[classes, bins] + self.hazards[classes, bins] * within_s
        return total

    def p_reuse(self, classes: IntArray, ages_s: FloatArray, within_s: float) -> FloatArray:
        """The chance of a use in the time from now on."""
        later = self.expected_uses(classes, ages_s + within_s)
        return -np.expm1(self.expected_uses(classes, ages_s) - later)

    def to_parts(self) -> tuple[Arrays, Values]:
        """The model as arrays and values, for a file."""
        trees = self.trees
        arrays: Arrays = {
            "pooled": trees.pooled,
            "period_of": trees.period_of,
            "cuts": trees.cuts,
            "feature": trees.feature,
            "cut": trees.cut,
            "values": trees.values,
            "centres": self.centres,
        }
        return arrays, {"n_samples": self.n_samples, "words": "\n".join(self.words)}

    @classmethod
    def from_parts(cls, arrays: Arrays, values: Values) -> Fitted:
        """Undo `to_parts`. Raises ValueError if the parts do not fit together."""
        try:
            floats = {
                name: np.asarray(arrays[name], np.float64)
                for name in ("pooled", "cuts", "values", "centres")
            }
            period_of = np.asarray(arrays["period_of"], np.int64)
            feature = np.asarray(arrays["feature"], np.int64)
            cut = np.asarray(arrays["cut"], np.uint8)
            n_samples, words = int(values["n_samples"]), str(values["words"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"a part of the model is missing: {error}") from error
        n_periods = int(period_of.max(initial=0)) + 1
        fits = (
            floats["pooled"].shape == period_of.shape == (N_AGES,)
            and period_of[0] == 0
            and np.isin(np.diff(period_of), (0, 1)).all()
            and floats["cuts"].ndim == 2
            and len(floats["cuts"]) == N_FEATURES
            and feature.ndim == 2
            and feature.shape == cut.shape
            and 0 <= feature.min(initial=0) <= feature.max(initial=0) < N_FEATURES
            and len(feature) > 0
            and 0 < feature.shape[1] <= 8
            and floats["values"].shape == (len(feature), 1 << feature.shape[1], n_periods)
            and floats["centres"].ndim == 2
            and floats["centres"].shape[1] == n_periods
            and len(floats["centres"]) > 0
            and all(not np.isnan(part).any() for part in floats.values())
            and all(np.isfinite(floats[name]).all() for name in ("pooled", "values", "centres"))
            and (floats["pooled"] >= 0).all()
        )
        if not fits:
            raise ValueError("the parts of the model do not fit together")
        trees = HazardTrees(
            floats["pooled"], period_of, floats["cuts"], feature, cut, floats["values"]
        )
        return cls(trees, floats["centres"], n_samples, tuple(words.split("\n")))


def fit(snapshot: Snapshot) -> Fitted:
    """The model of a snapshot: the same for the same. Takes one core for a second or three."""
    uses = snapshot.uses
    features = uses.features
    trees = fit_hazard_trees(
        features,
        uses.watched_s,
        uses.reused,
        uses.weight,
        snapshot.trees,
        snapshot.seed,
        _USED_AGAIN,
    )
    rng = np.random.default_rng(snapshot.seed)
    some = features[rng.permutation(len(features))[:_CENTRE_SAMPLES]]
    centres = _centres(trees.log_ratios(some))
    return Fitted(trees, centres, len(features), snapshot.words)


def _centres(ratios: Float32Array) -> FloatArray:
    """Classes of like curves: k means of samples in no order."""
    centres = ratios[:_CLASSES].copy()
    n_centres = len(centres)
    for _ in range(_CENTRE_ROUNDS):
        nearest = ((centres**2).sum(1) - 2 * ratios @ centres.T).argmin(1)
        counts = np.bincount(nearest, minlength=n_centres)
        for j in range(ratios.shape[1]):
            sums = np.bincount(nearest, ratios[:, j], n_centres)
            centres[:, j] = np.where(counts > 0, sums / np.maximum(counts, 1), centres[:, j])
    return centres[np.argsort(centres.mean(1), kind="stable")].astype(np.float64)
