"""What is let onto SSD: what is likely enough to be used again, within the write budget.

While there is room, everything is let in. Once the tier has been full, a blob must be worth
no less than what leaves for it, and likely to be used again before it has to leave, the
more so the less of the write budget is left; so the rate of writes settles at what the
budget allows, and the likeliest blobs get it. A chain is taken as a whole: what it
continues is written before it or with it, or it is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np
import numpy.typing as npt

from blobstore.tiering.budget import Budget
from blobstore.tiering.policy import T, T_contra
from blobstore.tiering.turnover import Turnover

FloatArray = npt.NDArray[np.float64]

P_REUSE_MIN = 0.25
"""Least chance of a use in time, once the tier is full and the budget not strained. With 1 % of
a chat trace in DRAM, an SSD of 5 % is written 0.38 times as much as by admitting everything in
order of last use, at more hits (0.240 against 0.221), one of 10 % 0.57 times (0.296, 0.292)."""

_ROOMY = 1 / 8
"""Share of the tier that must be free for it to count as filling again: evicting ahead of
need gives room all the time, and that is no reason to take in everything."""

_RELAXED = 1 / 2
"""Share of the write budget's burst above which it has no influence."""

_FRESH_S = 1.0
"""How long a chance that was looked up holds good: a NumPy call for each item would cost too
much."""


class Odds(Protocol[T_contra]):
    """Who knows how likely items are to be used again."""

    def p_reuse(self, items: Sequence[T_contra], now_s: float, within_s: float) -> FloatArray:
        """The chance of a use in the time from now on, for each."""
        ...

    def worth(self, items: Sequence[T_contra], now_s: float) -> FloatArray:
        """What each is worth for as long as it is held."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something may go to SSD, and why."""

    admit: bool
    reason: str
    """Admitted: "room" or "worth". Refused: "unlikely", "worth_less", "budget" or "too_large"."""
    detail: str = ""
    """The numbers behind it, for people."""
    p_reuse: float = -1.0
    """-1: not asked for."""
    threshold: float = 0.0


class Admission(Generic[T]):
    """The filter before an SSD of `capacity_bytes`, of which `spare_bytes` stay free.

    `next_to_leave` names what would have to leave for something new, if it is known.
    Without `odds` likelihood does not matter.
    """

    def __init__(
        self,
        capacity_bytes: int,
        write_budget: Budget,
        odds: Odds[T] | None = None,
        next_to_leave: Callable[[], T | None] = lambda: None,
        *,
        spare_bytes: int = 0,
        p_reuse_min: float = P_REUSE_MIN,
    ) -> None:
        self.write_budget = write_budget
        self._turnover = Turnover(capacity_bytes)
        self._filling = True
        self._capacity_bytes = capacity_bytes
        self._spare_bytes = spare_bytes
        self._odds = odds
        self._next_to_leave = next_to_leave
        self._floor: float | None = None
        self._known: dict[T, float] = {}
        """Chances that were looked up at `_known_s`: what hangs together is asked about in turn."""
        self._known_s = float("-inf")
        self._p_reuse_min = p_reuse_min

    def decide(self, chain: Sequence[T], nbytes: int, free_bytes: int, now_s: float) -> Verdict:
        """Whether `chain` should go to SSD now; charges nothing.

        Args:
            chain: the items to write: the one asked about, and before it those that it
                continues and that are not on SSD yet, root side first.
            nbytes: of all of them.
            free_bytes: of the SSD, less what is on its way there.
            now_s: the time.
        """
        if self._is_too_large(nbytes):
            return Verdict(False, "too_large")
        has_room = self._has_room(nbytes, free_bytes - self._spare_bytes)
        return self._verdict(chain, nbytes, has_room, now_s)

    def outlook(self, chain: Sequence[T], nbytes: int, now_s: float) -> Verdict:
        """What `decide` would say, with the room that there was last time."""
        if self._capacity_bytes and self._is_too_large(nbytes):
            return Verdict(False, "too_large")
        return self._verdict(chain, nbytes, self._filling, now_s)

    def wrote(self, nbytes: int, now_s: float) -> None:
        """`nbytes` are being written, asked for or not: they count against the budget."""
        self.write_budget.charge(nbytes, now_s)
        self._turnover.note(nbytes, now_s)

    def unwrote(self, nbytes: int) -> None:
        """`nbytes` that `wrote` was told of were not written after all."""
        self.write_budget.give_back(nbytes)
        self._turnover.take_back(nbytes)

    def threshold(self, now_s: float) -> float:
        """The least chance of a use in time that is admitted when there is no room to spare."""
        return self._p_reuse_min + (1 - self._p_reuse_min) * self._strain(now_s)

    def _is_too_large(self, nbytes: int) -> bool:
        return nbytes > self._capacity_bytes - self._spare_bytes

    def _verdict(self, chain: Sequence[T], nbytes: int, has_room: bool, now_s: float) -> Verdict:
        threshold = self.threshold(now_s)
        if has_room and threshold <= self._p_reuse_min:
            return self._affordable(nbytes, now_s, Verdict(True, "room"))
        if self._odds is None:
            return self._affordable(nbytes, now_s, Verdict(True, "worth"))
        p_reuse = self._p_reuse(self._odds, chain, now_s)
        if p_reuse < threshold:
            detail = f"p {p_reuse:.3f} < {threshold:.3f}"
            return Verdict(False, "unlikely", detail, p_reuse, threshold)
        if not has_room and self._is_worth_less(self._odds, chain[-1], now_s):
            return Verdict(False, "worth_less", "", p_reuse, threshold)
        detail = f"p {p_reuse:.3f} >= {threshold:.3f}"
        return self._affordable(nbytes, now_s, Verdict(True, "worth", detail, p_reuse, threshold))

    def _p_reuse(self, odds: Odds[T], chain: Sequence[T], now_s: float) -> float:
        """The chance of the last of a chain. Its ancestors, which are next, are looked up along."""
        if not 0 <= now_s - self._known_s <= _FRESH_S:
            self._known.clear()
            self._floor = None
            self._known_s = now_s
        p_reuse = self._known.get(chain[-1])
        if p_reuse is None:
            within_s = self._turnover.turn_s(now_s)
            found = odds.p_reuse(chain, now_s, within_s).tolist()
            self._known.update(zip(chain, found, strict=True))
            p_reuse = float(found[-1])
        return p_reuse

    def _is_worth_less(self, odds: Odds[T], item: T, now_s: float) -> bool:
        """Whether the item would be the next to leave: its write would be wasted."""
        if self._floor is None:
            leaving = self._next_to_leave()
            if leaving is None:
                return False
            self._floor = float(odds.worth([leaving], now_s)[0])
        return float(odds.worth([item], now_s)[0]) < self._floor

    def _affordable(self, nbytes: int, now_s: float, verdict: Verdict) -> Verdict:
        if self.write_budget.wait_s(nbytes, now_s) > 0:
            return Verdict(False, "budget", "", verdict.p_reuse, verdict.threshold)
        return verdict

    def _has_room(self, nbytes: int, free_bytes: int) -> bool:
        if free_bytes < nbytes:
            self._filling = False
        elif free_bytes > self._capacity_bytes * _ROOMY:
            self._filling = True
        return self._filling

    def _strain(self, now_s: float) -> float:
        """How short the write budget is: 0 (not) to 1 (spent)."""
        budget = self.write_budget
        if not budget.limited or not budget.burst_bytes:
            return 0.0
        left = budget.left_bytes(now_s) / (budget.burst_bytes * _RELAXED)
        return min(max(1 - left, 0.0), 1.0)
