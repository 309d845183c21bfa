"""Which of several contenders leads, judged by what each would have saved of the same requests.

The one in front stays there until another beats it by more than chance: recently, by much
(the pattern has changed), or over a long time, by little (it is worse here). So single
events change nothing, and neither does a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

_RECENT = 1 / 256
_LONG = 1 / 8192
"""Weight of the newest request in the two averages."""

_REQUESTS_MIN = 128
"""Before these have been seen nobody is overtaken."""


class Race:
    """Contenders by name, the first of which is wanted in front.

    Overtaking the wanted one takes a lead of `margin` (as a share of all tokens; recently
    of five times that) beyond what chance explains; giving the front back to it takes any
    lead that chance does not explain.
    """

    def __init__(self, names: Sequence[str], margin: float) -> None:
        assert len(names) > 1
        self.names = tuple(names)
        self.in_front = self.names[0]
        self._margin = margin
        self._restart()
        self._totals = [0.0] * len(self.names)
        self._tokens = 0.0

    def put_in_front(self, name: str) -> None:
        """Start anew with `name` in front."""
        assert name in self.names
        self.in_front = name
        self._restart()

    def note(self, saved: Sequence[float], tokens: float) -> None:
        """One request of `tokens`, of which each contender would have saved so many."""
        self.n_requests += 1
        self._tokens = self._tokens * (1 - _LONG) + tokens
        front = saved[self.names.index(self.in_front)]
        for at, tokens_saved in enumerate(saved):
            self._totals[at] = self._totals[at] * (1 - _LONG) + tokens_saved
            for lead in self._leads[at]:
                lead.note(tokens_saved - front, tokens)

    def judge(self) -> bool:
        """Let whoever has overtaken take the front; whether somebody has."""
        if self.n_requests < _REQUESTS_MIN:
            return False
        surplus, name = max(
            (self._surplus(at), name) for at, name in enumerate(self.names) if name != self.in_front
        )
        if surplus <= 0:
            return False
        self.put_in_front(name)
        return True

    def ratios(self) -> dict[str, float]:
        """What each would have saved lately, as a share of all tokens."""
        tokens = self._tokens or 1.0
        return {name: total / tokens for name, total in zip(self.names, self._totals, strict=True)}

    def _surplus(self, at: int) -> float:
        """By how much contender `at` leads beyond what is asked of it."""
        recent, long = self._leads[at]
        if at == 0:
            return max(recent.mean() - 3 * recent.error(), long.mean() - 2 * long.error())
        return max(
            recent.mean() - 5 * self._margin - 3 * recent.error(),
            long.mean() - self._margin - 2 * long.error(),
        )

    def _restart(self) -> None:
        self.n_requests = 0
        """Since the last change at the front."""
        self._leads = [(_Lead(_RECENT), _Lead(_LONG)) for _ in self.names]


class _Lead:
    """By how much one contender leads the front, on average over the last requests."""

    __slots__ = ("_keep", "_squares", "_sum", "_tokens")

    def __init__(self, newest: float) -> None:
        self._keep = 1 - newest
        self._sum = self._squares = self._tokens = 0.0

    def note(self, lead: float, tokens: float) -> None:
        self._sum = self._sum * self._keep + lead
        self._squares = self._squares * self._keep * self._keep + lead * lead
        self._tokens = self._tokens * self._keep + tokens

    def mean(self) -> float:
        return self._sum / self._tokens if self._tokens else 0.0

    def error(self) -> float:
        return sqrt(self._squares) / self._tokens if self._tokens else 0.0
