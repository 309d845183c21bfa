"""A measurement and its limit, taken in turns.

Rates of a shared machine drift twofold within minutes, so a figure alone says
little. Here the limit and the measurement alternate in one loop, each going
first every second time, and the ratio is the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sample = Callable[[], Sequence[float]]
"""Does some work and returns the seconds that each of its equal operations took."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """What `alternate` saw. `ratio` is limit ÷ measured: 1 is the limit, more is better."""

    measured_s: tuple[float, ...]
    limit_s: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over pairs."""
        return statistics.median(self.ratios)

    @property
    def median_s(self) -> float:
        """The median of one measured operation."""
        return statistics.median(self.measured_s)

    @property
    def limit_median_s(self) -> float:
        """The median of one operation of the limit."""
        return statistics.median(self.limit_s)

    @property
    def p99_s(self) -> float:
        """99 of 100 measured operations took at most this; of few, the slowest."""
        return sorted(self.measured_s)[-(len(self.measured_s) // 100) - 1]

    @property
    def spread(self) -> float:
        """The middle half of the measured operations, as a share of their median."""
        if len(self.measured_s) < 2 or not self.median_s:
            return 0.0
        low, _, high = statistics.quantiles(self.measured_s, n=4, method="inclusive")
        return (high - low) / self.median_s


def alternate(measure: Sample, limit: Sample, n_pairs: int, *, warm_up: int = 1) -> Pairs:
    """Run `measure` and `limit` in turns, `warm_up` unrecorded pairs first."""
    measured: list[float] = []
    limits: list[float] = []
    ratios: list[float] = []
    for number in range(-warm_up, n_pairs):
        if number % 2:
            ours, best = measure(), limit()
        else:
            best, ours = limit(), measure()
        if number >= 0:
            measured += ours
            limits += best
            ratios.append(statistics.median(best) / statistics.median(ours))
    return Pairs(tuple(measured), tuple(limits), tuple(ratios))


def timed(work: Callable[[], object]) -> float:
    """The seconds that one call of `work` takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
