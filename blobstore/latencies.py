"""How long operations took, by door and verb: histograms, failures and the slowest of late.

Noting one costs less than a microsecond, so that doors note every operation.
Used on the event loop only.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

BOUNDS_S = (
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper ends of the buckets; a last one takes all that is above."""
SLOWEST_MAX = 16
SLOWEST_S = 300.0
"""How long a slow operation stays among the slowest."""


class Histogram:
    """Counts of durations by bucket, and their sum."""

    __slots__ = ("bounds_s", "counts", "longest_s", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        """One for each bound, and one above the last."""
        self.sum_s = 0.0
        self.longest_s = 0.0

    @property
    def count(self) -> int:
        """How many durations were added."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Count one duration; one equal to a bound belongs below it."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds
        if seconds > self.longest_s:
            self.longest_s = seconds

    def quantile(self, q: float) -> float:
        """A duration that a share of `q` did not exceed, as near as the buckets tell; 0 if none."""
        rank, before, lower_s = q * self.count, 0, 0.0
        for n, upper_s in zip(self.counts, (*self.bounds_s, self.longest_s), strict=True):
            if n and before + n >= rank:
                share = max(rank - before, 0.0) / n
                return min(lower_s + (upper_s - lower_s) * share, self.longest_s)
            before, lower_s = before + n, upper_s
        return self.longest_s


@dataclass(frozen=True, slots=True, order=True)
class Slow:
    """One operation that took long."""

    seconds: float
    ended_s: float
    """By the recorder's clock."""
    door: str
    verb: str


class Latencies:
    """All operations that the doors noted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._failed: dict[tuple[str, str, str], int] = {}
        self._slowest: list[Slow] = []
        self._floor_s = 0.0
        """What an operation must exceed to be among the slowest."""

    def note(self, door: str, verb: str, started_s: float, error: str = "") -> None:
        """An operation that began when `clock` read `started_s` is over; `error` is its code.

        `verb` and `error` are of a small fixed set: each makes a series of its own.
        """
        now_s = self.clock()
        seconds = now_s - started_s
        histogram = self._histograms.get((door, verb))
        if histogram is None:
            histogram = self._histograms[door, verb] = Histogram()
        histogram.add(seconds)
        if seconds > self._floor_s:
            self._note_slow(Slow(seconds, now_s, door, verb))
        if error:
            failed = (door, verb, error)
            self._failed[failed] = self._failed.get(failed, 0) + 1

    def histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        """Door, verb and durations of all that was noted."""
        for (door, verb), histogram in sorted(self._histograms.items()):
            yield door, verb, histogram

    def failures(self) -> Iterator[tuple[str, str, str, int]]:
        """Door, verb, error code and how often."""
        for (door, verb, error), n in sorted(self._failed.items()):
            yield door, verb, error, n

    def slowest(self) -> list[Slow]:
        """The slowest operations of the last five minutes, slowest first."""
        self._forget_old()
        return sorted(self._slowest, reverse=True)

    def _note_slow(self, slow: Slow) -> None:
        heapq.heappush(self._slowest, slow)
        if len(self._slowest) > SLOWEST_MAX:
            self._forget_old()
        if len(self._slowest) > SLOWEST_MAX:
            heapq.heappop(self._slowest)
        self._set_floor()

    def _forget_old(self) -> None:
        oldest_s = self.clock() - SLOWEST_S
        self._slowest = [slow for slow in self._slowest if slow.ended_s > oldest_s]
        heapq.heapify(self._slowest)
        self._set_floor()

    def _set_floor(self) -> None:
        full = len(self._slowest) >= SLOWEST_MAX
        self._floor_s = self._slowest[0].seconds if full else 0.0
