"""How long blobs lie before they are used again, and before they leave: log-bucket histograms.

Noting one costs less than a microsecond. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from blobstore.latencies import Histogram

BOUNDS_S = (
    0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6,
)  # fmt: skip
"""Upper ends of the buckets: a tenth of a second to twelve days, two for each power of ten."""

TIERS = ("dram", "ssd")


class Ages:
    """Gaps between uses, and the ages at which copies were given up."""

    def __init__(self) -> None:
        self.reuse_gap = Histogram(BOUNDS_S)
        """One for each get: since the deepest blob that it found was used before."""
        self.at_eviction = {tier: Histogram(BOUNDS_S) for tier in TIERS}
        """Since its last use, when a copy was given up, by the tier that it left."""

    def reused(self, gap_s: float) -> None:
        """A blob was used `gap_s` after its use before."""
        self.reuse_gap.add(max(0.0, gap_s))

    def left(self, tier: str, age_s: float) -> None:
        """A copy was given up `age_s` after the blob's last use."""
        self.at_eviction[tier].add(max(0.0, age_s))

    def as_dict(self) -> dict[str, Any]:
        """Plain values: bounds, and counts by bucket (the last is above all bounds)."""
        return {
            "bounds_s": list(BOUNDS_S),
            "reuse_gap": _plain(self.reuse_gap),
            "at_eviction": {tier: _plain(ages) for tier, ages in self.at_eviction.items()},
        }


def histograms(plain: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `as_dict` gave, one histogram at a time: "" for gaps, else the tier that was left."""
    yield "", plain["reuse_gap"]
    yield from plain["at_eviction"].items()


def medians(plain: Mapping[str, Any]) -> dict[str, float]:
    """Of what `as_dict` gave: ages that half did not exceed, by the names of `histograms`.

    Those of which nothing is known are left out. What lies above all bounds counts as the
    last of them.
    """
    found = {}
    for name, counted in histograms(plain):
        ages = Histogram(plain["bounds_s"])
        ages.counts, ages.longest_s = counted["counts"], ages.bounds_s[-1]
        if ages.count:
            found[name] = ages.quantile(0.5)
    return found


def _plain(histogram: Histogram) -> dict[str, Any]:
    return {"counts": list(histogram.counts), "sum_s": histogram.sum_s}
