"""How many bytes may pass: a bucket that fills with time and is emptied by use.

The time is told with each call, on any clock that does not matter but for its pace: one
that jumps back stands still, one that jumps ahead fills the bucket once.
"""

from __future__ import annotations

from typing import Self

DAY_S = 86_400.0

_BURST_S = 1.0
"""Of a rate per second: long enough for a batch, short enough to be smooth."""

_DAY_BURST = 1 / 8
"""Of a budget per day, that may pass at once: writes come in waves over a day."""


class Budget:
    """At most `rate_bytes_per_s` on average, and `burst_bytes` at once.

    A rate of None sets no limit, one of 0 lets nothing pass. Something larger than the
    burst passes when the bucket is full, and leaves a debt.
    """

    def __init__(self, rate_bytes_per_s: float | None, burst_bytes: float) -> None:
        assert burst_bytes >= 0
        self.rate_bytes_per_s = rate_bytes_per_s
        self.burst_bytes = burst_bytes
        self._level_bytes = burst_bytes
        self._at_s: float | None = None

    @classmethod
    def per_second(cls, rate_bytes_per_s: float | None) -> Self:
        """So many bytes in any second, on average."""
        return cls(rate_bytes_per_s, (rate_bytes_per_s or 0) * _BURST_S)

    @classmethod
    def per_day(cls, nbytes: float | None) -> Self:
        """At most `nbytes` in any 24 hours, an eighth of them at once."""
        if nbytes is None:
            return cls(None, 0)
        burst_bytes = nbytes * _DAY_BURST
        return cls((nbytes - burst_bytes) / DAY_S, burst_bytes)

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self.rate_bytes_per_s is not None

    @property
    def day_bytes(self) -> float | None:
        """The most that may pass in 24 hours; None without a limit."""
        if self.rate_bytes_per_s is None:
            return None
        return self.rate_bytes_per_s * DAY_S + self.burst_bytes

    def left_bytes(self, now_s: float) -> float:
        """What may pass at once; infinite without a limit, negative in debt."""
        if self.rate_bytes_per_s is None:
            return float("inf")
        self._fill(self.rate_bytes_per_s, now_s)
        return self._level_bytes

    def take(self, nbytes: int, now_s: float) -> bool:
        """Whether `nbytes` may pass now; if so they are charged."""
        if self.wait_s(nbytes, now_s) > 0:
            return False
        self._level_bytes -= nbytes
        return True

    def charge(self, nbytes: int, now_s: float) -> None:
        """`nbytes` passed without asking; later ones wait for it."""
        self.left_bytes(now_s)
        self._level_bytes -= nbytes

    def give_back(self, nbytes: int) -> None:
        """`nbytes` that were charged did not pass."""
        self._level_bytes = min(self._level_bytes + nbytes, self.burst_bytes)

    def wait_s(self, nbytes: int, now_s: float) -> float:
        """How long until `nbytes` may pass, if nothing else does; infinite if never."""
        if self.rate_bytes_per_s is None:
            return 0.0
        self._fill(self.rate_bytes_per_s, now_s)
        missing_bytes = min(float(nbytes), self.burst_bytes) - self._level_bytes
        if self.burst_bytes > 0 and missing_bytes <= 0:
            return 0.0
        if self.rate_bytes_per_s == 0:
            return float("inf")
        return missing_bytes / self.rate_bytes_per_s

    def _fill(self, rate_bytes_per_s: float, now_s: float) -> None:
        if self._at_s is not None and now_s > self._at_s:
            level_bytes = self._level_bytes + (now_s - self._at_s) * rate_bytes_per_s
            self._level_bytes = min(level_bytes, self.burst_bytes)
        self._at_s = now_s
