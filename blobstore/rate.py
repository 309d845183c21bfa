"""How fast something goes, smoothed."""

from __future__ import annotations

import math
from collections.abc import Callable

SMOOTHED_OVER_S = 10.0
"""What was noted so long ago counts 1/e of what is noted now."""


class Rate:
    """Something per second, averaged over the last moments."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at_s = clock()
        self._per_s = 0.0

    def note(self, amount: float) -> None:
        """So much has passed just now."""
        self._per_s = self.per_s() + amount / SMOOTHED_OVER_S

    def per_s(self) -> float:
        """The rate now; 0 long after the last note."""
        now_s = self._clock()
        self._per_s *= math.exp(min(self._at_s - now_s, 0.0) / SMOOTHED_OVER_S)
        self._at_s = now_s
        return self._per_s
