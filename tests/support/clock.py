"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """Pass it where a `Clock` is asked for; starts far from zero, as a real one does."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; time never goes back."""
        assert seconds >= 0
        self.now_s += seconds
