"""What became of items after a use: a bounded sample of uses, watched until the next.

Half of the room is for the latest samples, half for a fair choice of all earlier ones,
so that a fit follows what changes and still knows what is slow. A sample that has not
been used again yet counts for as long as it has been watched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blobstore.tiering.reuse_features import N_FEATURES, Float32Array

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WatchedUses:
    """A copy of all samples: features, how long each was watched, and whether a use ended that."""

    features: Float32Array
    watched_s: FloatArray
    reused: npt.NDArray[np.bool_]
    weight: FloatArray


class ReuseSamples:
    """At most `n_max` samples. Each has a token, which is void once the sample is gone."""

    def __init__(self, n_max: int, rng: np.random.Generator) -> None:
        self._n_max = n_max
        self._rng = rng
        self._features = np.zeros((n_max, N_FEATURES), np.float32)
        self._began_s = np.zeros(n_max)
        self._ended_s = np.full(n_max, np.nan)
        self._token = np.full(n_max, -1, np.int64)
        self._latest: list[int] = []
        self._at = 0
        self._older: list[int] = []
        self.n_taken = 0

    def __len__(self) -> int:
        return len(self._latest) + len(self._older)

    def watch(self, features: Float32Array, now_s: float) -> IntArray:
        """Begin a sample for each row; returns their tokens."""
        n = len(features)
        chances = self._rng.random(n).tolist()
        places = np.array([self._place(chance) for chance in chances], np.int64)
        tokens = np.arange(self.n_taken, self.n_taken + n) * self._n_max + places
        self.n_taken += n
        self._features[places] = features
        self._began_s[places] = now_s
        self._ended_s[places] = np.nan
        self._token[places] = tokens
        return tokens

    def end(self, tokens: IntArray, now_s: float) -> None:
        """The items of these samples have been used again."""
        places = tokens % self._n_max
        valid = places[self._token[places] == tokens]
        self._ended_s[valid] = now_s

    def copy(self, now_s: float) -> WatchedUses:
        """What is known now."""
        kept = self._token >= 0
        ended_s = self._ended_s[kept]
        reused = ~np.isnan(ended_s)
        watched_s = np.where(reused, ended_s, now_s) - self._began_s[kept]
        return WatchedUses(
            self._features[kept], np.maximum(watched_s, 0.0), reused, np.ones(len(ended_s))
        )

    def _place(self, chance: float) -> int:
        """Room for one more: unused, or that of a sample that is given up, by `chance`."""
        n_latest = self._n_max - self._n_max // 2
        if len(self._latest) < n_latest:
            place = len(self)
            self._latest.append(place)
            return place
        oldest = self._latest[self._at]
        place = self._retire(oldest, chance)
        self._latest[self._at] = place
        self._at = (self._at + 1) % n_latest
        return place

    def _retire(self, oldest: int, chance: float) -> int:
        """Move the oldest of the latest among the older, or give it up; returns a free place."""
        n_older = self._n_max // 2
        if len(self._older) < n_older:
            self._older.append(oldest)
            return len(self) - 1
        at = int(chance * max(self.n_taken - n_older, n_older))
        if at >= n_older:
            return oldest
        place, self._older[at] = self._older[at], oldest
        return place
