"""How long it takes to bring blobs back: learned from what it took of late.

Times are sums of a few costs (one per operation, one per byte or token, and for rebuilds
one that grows with the position). Fits minimise relative errors and trust no single
outlier, since disks and runners stall. Pure logic, used on the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

WINDOW = 64
"""Operations that a fit looks at."""

HALF_LIFE = 10
"""Operations after which one counts half."""

ERRORS_KEPT = 50

TOLERANCE = 0.2
"""Relative errors beyond this count less the larger they are."""

PRIOR_WEIGHT = 0.02
"""How much of one operation the expected proportions of the costs weigh."""

REWEIGHTINGS = 4

MODELS_MAX = 4096
"""Pairs of namespace and runner of which the speed is known; the longest unused is forgotten."""

FETCH_COSTS = (1e-4, 1e-9)
"""Seconds per load and per byte before anything was loaded: their proportion counts later."""

REBUILD_COSTS = (5e-3, 1e-3, 5e-8)
"""Seconds per job, per token, and per token and token before it; only their proportions count."""

Array = np.ndarray[Any, np.dtype[np.float64]]


class CostFit:
    """Seconds as the sum of costs per unit, none of them below 0."""

    def __init__(self, costs: Sequence[float]) -> None:
        self._prior = np.array(costs)
        self._costs = self._prior
        self._seen: deque[tuple[Sequence[float], float]] = deque(maxlen=WINDOW)
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)
        self._stale = False

    @property
    def n_seen(self) -> int:
        """Operations that the next estimate rests on."""
        return len(self._seen)

    @property
    def error(self) -> float | None:
        """Median of the last estimates' relative errors; None before the second operation."""
        return median(self._errors) if self._errors else None

    def estimate_s(self, amounts: Sequence[float]) -> float:
        """What so much of each unit takes."""
        if self._stale:
            self._costs, self._stale = self._fitted(), False
        return float(self._costs @ np.array(amounts))

    def note(self, amounts: Sequence[float], seconds: float) -> None:
        """So much took so long; what takes no time tells nothing."""
        if seconds <= 0:
            return
        if self._seen:
            self._errors.append(abs(self.estimate_s(amounts) - seconds) / seconds)
        self._seen.append((amounts, seconds))
        self._stale = True

    def _fitted(self) -> Array:
        """The costs: the prior's, brought to the level of what was seen, and bent towards it."""
        took_s = np.array([seconds for _, seconds in self._seen])
        shares = np.array([amounts for amounts, _ in self._seen]) * self._prior / took_s[:, None]
        ages = np.arange(len(took_s))[::-1]
        recency = 0.5 ** (ages / HALF_LIFE)
        level = 1 / _weighted_median(shares.sum(axis=1), recency)
        shares *= level
        bend = np.ones(len(self._prior))
        for _ in range(REWEIGHTINGS):
            told = np.maximum(shares @ bend, 1e-9)
            off = np.abs(np.log(told))  # twice as long is as wrong as half
            trust = np.minimum(1, TOLERANCE / (off + 1e-9)) / np.maximum(told, 1) ** 2
            bend = _least_squares(shares, recency * trust)
        return level * self._prior * bend


class FetchEstimate:
    """How long a load from SSD takes."""

    def __init__(self) -> None:
        self._fit = CostFit(FETCH_COSTS)

    def seconds(self, nbytes: int, queued_bytes: int = 0) -> float:
        """For `nbytes` while others' `queued_bytes` share the disk with them."""
        return self._fit.estimate_s((1.0, nbytes + queued_bytes))

    def note(self, nbytes: int, queued_bytes: int, seconds: float) -> None:
        """A load ended well."""
        self._fit.note((1.0, nbytes + queued_bytes), seconds)

    def stats(self) -> dict[str, Any]:
        """Gauges by name."""
        return {"loads": self._fit.n_seen, "error": self._fit.error}


class RebuildEstimate:
    """How long one runner takes to compute a run of a context."""

    def __init__(self) -> None:
        self._fit = CostFit(REBUILD_COSTS)

    def seconds(self, position: int, n_tokens: int) -> float:
        """For `n_tokens` after `position` others; before anything was noted it means nothing."""
        return self._fit.estimate_s(_work(position, n_tokens))

    def note(self, position: int, n_tokens: int, seconds: float) -> None:
        """A run was computed in so long."""
        self._fit.note(_work(position, n_tokens), seconds)

    @property
    def error(self) -> float | None:
        """As `CostFit.error`."""
        return self._fit.error


class Estimates:
    """What is known of this node's disk, and of each runner in each namespace."""

    def __init__(self) -> None:
        self.fetch = FetchEstimate()
        self._runners: OrderedDict[tuple[bytes, str], RebuildEstimate] = OrderedDict()
        self._last: OrderedDict[bytes, RebuildEstimate] = OrderedDict()
        """By namespace: of the runner that ended a job last."""

    def rebuilt(
        self, namespace_id: bytes, runner: str, position: int, n_tokens: int, seconds: float
    ) -> None:
        """`runner` computed a run of so many tokens after `position` others."""
        estimate = self._runners.pop((namespace_id, runner), None) or RebuildEstimate()
        self._runners[namespace_id, runner] = estimate
        self._last[namespace_id] = estimate
        self._last.move_to_end(namespace_id)
        estimate.note(position, n_tokens, seconds)
        for known in (self._runners, self._last):
            if len(known) > MODELS_MAX:
                known.popitem(last=False)

    def rebuild_s(
        self, namespace_id: bytes, position: int, n_tokens: int, runner: str = ""
    ) -> float | None:
        """Seconds to compute a run, by `runner` or by whichever did last; None: nobody ever did."""
        estimate = self._runners.get((namespace_id, runner)) or self._last.get(namespace_id)
        return None if estimate is None else estimate.seconds(position, n_tokens)

    def stats(self) -> dict[str, Any]:
        """Gauges by name; errors are medians of relative ones, None where nothing is known."""
        errors = [e for each in self._runners.values() if (e := each.error) is not None]
        return {
            "fetch": self.fetch.stats(),
            "rebuild": {
                "runners": len(self._runners),
                "error": median(errors) if errors else None,
            },
        }


def _work(position: int, n_tokens: int) -> tuple[float, float, float]:
    """Each token attends to all before it."""
    return 1.0, float(n_tokens), n_tokens * (position + n_tokens / 2)


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def _least_squares(shares: Array, weights: Array) -> Array:
    """Factors ≥ 0, near 1 where nothing tells, by which each row's `shares` sum up to 1."""
    n = shares.shape[1]
    # A cost that matters little may move far.
    prior = PRIOR_WEIGHT * np.mean(shares**2, axis=0) + 1e-12
    normal = (shares.T * weights) @ shares + np.diag(prior)
    wanted = shares.T @ weights + prior
    used = list(range(n))
    found = np.linalg.solve(normal, wanted)
    while len(used) > 1 and found[used].min() < 0:
        used = [i for i in used if found[i] > 0]
        found = np.zeros(n)
        found[used] = np.linalg.solve(normal[np.ix_(used, used)], wanted[used])
    factors: Array = np.maximum(found, 0)
    return factors
