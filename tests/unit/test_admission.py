"""What is let onto SSD, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from blobstore.tiering.admission import P_REUSE_MIN, Admission, FloatArray
from blobstore.tiering.budget import Budget

CAPACITY = 1000


class _Odds:
    """Says what it is told to, and remembers what it was asked."""

    def __init__(self, p: float) -> None:
        self.p = p
        self.asked: list[tuple[list[str], float]] = []

    def p_reuse(self, items: Sequence[str], now_s: float, within_s: float) -> FloatArray:
        self.asked.append((list(items), within_s))
        return np.full(len(items), self.p)

    def worth(self, items: Sequence[str], now_s: float) -> FloatArray:
        return np.array([float(item == "a") for item in items])


def _admission(
    p: float | None = None, day_bytes: int | None = None, spare_bytes: int = 0
) -> Admission[str]:
    odds = None if p is None else _Odds(p)
    budget = Budget.per_day(day_bytes)
    return Admission(CAPACITY, budget, odds, spare_bytes=spare_bytes)


def _reasons(admission: Admission[str], frees: Sequence[int], nbytes: int = 10) -> list[str]:
    return [admission.decide(["a"], nbytes, free, 0.0).reason for free in frees]


def test_everything_comes_in_while_there_is_room() -> None:
    verdict = _admission(0.0).decide(["a"], 10, CAPACITY, 0.0)
    assert verdict.admit
    assert verdict.reason == "room"


def test_once_it_was_full_only_the_likely_come_in() -> None:
    unlikely, likely = _admission(P_REUSE_MIN - 0.01), _admission(P_REUSE_MIN + 0.01)
    assert _reasons(unlikely, [500, 5, 60]) == ["room", "unlikely", "unlikely"]
    assert _reasons(likely, [500, 5, 60]) == ["room", "worth", "worth"]
    assert "0.240 < 0.250" in unlikely.decide(["a"], 10, 5, 0.0).detail


def test_room_that_eviction_makes_ahead_of_need_is_no_room() -> None:
    admission = _admission(0.0)
    assert _reasons(admission, [5, 100, 125, 126, 100, 5]) == [
        "unlikely", "unlikely", "unlikely", "room", "room", "unlikely",
    ]  # fmt: skip


def test_the_spare_part_is_for_what_was_judged() -> None:
    assert _reasons(_admission(0.0, spare_bytes=50), [61, 59]) == ["room", "unlikely"]
    assert _reasons(_admission(0.9, spare_bytes=50), [61, 59]) == ["room", "worth"]


def test_the_last_of_a_chain_is_asked_about_and_all_of_it_must_fit() -> None:
    odds = _Odds(0.9)
    admission = Admission(CAPACITY, Budget.per_day(None), odds)
    assert admission.decide(["a", "b", "c"], 900, 0, 0.0).admit
    assert odds.asked == [(["a", "b", "c"], float("inf"))]
    assert admission.decide(["a", "b", "c"], 1001, 2000, 0.0).reason == "too_large"


def test_a_use_must_come_before_the_tier_is_written_full_again() -> None:
    odds = _Odds(0.9)
    admission = Admission(CAPACITY, Budget.per_day(None), odds)
    for second in range(101):
        admission.wrote(50, float(second))
    admission.decide(["a"], 10, 0, 100.0)
    assert odds.asked[-1][1] == pytest.approx(20.0, rel=0.1)


def test_without_odds_likelihood_does_not_matter() -> None:
    assert _reasons(_admission(), [500, 5]) == ["room", "worth"]


def test_a_spent_budget_keeps_out_everything_until_it_recovers() -> None:
    admission = _admission(1.0, day_bytes=8000)
    admission.wrote(1000, 0.0)
    assert admission.decide(["a"], 10, CAPACITY, 0.0).reason == "budget"
    assert admission.decide(["a"], 10, 0, 0.0).reason == "budget"
    assert admission.decide(["a"], 10, 0, 3600.0).reason == "worth"


def test_a_budget_of_nothing_keeps_out_everything() -> None:
    for admission in (_admission(1.0, day_bytes=0), _admission(None, day_bytes=0)):
        assert admission.decide(["a"], 10, CAPACITY, 1e9).reason == "budget"


def test_the_less_budget_is_left_the_likelier_it_must_be() -> None:
    admission = _admission(0.5, day_bytes=8000)
    thresholds = []
    for _ in range(10):
        thresholds.append(admission.threshold(0.0))
        admission.wrote(100, 0.0)
    assert thresholds[0] == P_REUSE_MIN
    assert thresholds == sorted(thresholds)
    assert thresholds[-1] > 0.8


def test_a_strained_budget_is_kept_for_the_likely_even_where_there_is_room() -> None:
    admission = _admission(0.4, day_bytes=8000)
    admission.wrote(900, 0.0)
    assert admission.decide(["a"], 10, CAPACITY, 0.0).reason == "unlikely"


def test_writes_settle_at_the_budget_and_the_likely_get_it() -> None:
    odds = _Odds(0.0)
    admission = Admission(CAPACITY, Budget.per_day(86_400), odds)
    rng = np.random.default_rng(1)
    n_written, admitted = 0, []
    for second in range(0, 2 * 86_400, 8):
        odds.p = float(rng.random())  # asked anew: steps are longer than a chance holds
        if admission.decide(["a"], 80, 0, float(second)).admit:
            admission.wrote(80, float(second))
            n_written += 80
            admitted.append(odds.p)
    assert 0.85 * 2 * 86_400 < n_written <= 2 * 86_400 * 1.07
    # Of ten bytes a second one may be written: the likeliest tenth, near enough.
    assert np.mean(np.array(admitted[1000:]) > 0.8) > 0.95


def test_deciding_charges_nothing() -> None:
    admission = _admission(1.0, day_bytes=8000)
    for _ in range(1000):
        assert admission.decide(["a"], 10, CAPACITY, 0.0).admit


def test_the_outlook_is_what_would_be_decided() -> None:
    admission = _admission(0.1)
    assert admission.outlook(["a"], 10, 0.0).reason == "room"
    admission.decide(["b"], 10, 0, 0.0)
    assert admission.outlook(["a"], 10, 0.0).reason == "unlikely"


def test_the_outlook_is_of_all_that_would_be_written_together() -> None:
    budget = Budget(1.0, 500)
    admission = Admission(CAPACITY, budget, _Odds(0.9))
    chain = ["a", "b"]
    assert admission.outlook(chain, CAPACITY + 1, 0.0).reason == "too_large"
    admission.wrote(200, 0.0)
    for nbytes, reason in ((300, "room"), (301, "budget")):
        assert admission.outlook(chain, nbytes, 0.0).reason == reason
        assert admission.decide(chain, nbytes, CAPACITY, 0.0).reason == reason
    without_ssd: Admission[str] = Admission(0, Budget.per_day(None))
    assert without_ssd.outlook(chain, 300, 0.0).reason == "room"


def test_ancestors_are_looked_up_along_and_asked_about_no_more_for_a_moment() -> None:
    odds = _Odds(0.1)
    admission = Admission(CAPACITY, Budget.per_day(None), odds)
    for chain in (["a", "b", "c"], ["a", "b"], ["a"]):
        assert admission.decide(chain, 10, 0, 100.0).reason == "unlikely"
    assert len(odds.asked) == 1
    odds.p = 0.9
    assert admission.decide(["a"], 10, 0, 100.5).reason == "unlikely"
    assert admission.decide(["d"], 10, 0, 100.5).reason == "worth"
    assert admission.decide(["a"], 10, 0, 101.5).reason == "worth"
    odds.p = 0.1
    assert admission.decide(["a"], 10, 0, 5.0).reason == "unlikely"  # the clock jumped back


def test_what_would_be_the_next_to_leave_is_not_written() -> None:
    def make(leaving: str | None) -> Admission[str]:
        budget = Budget.per_day(None)
        return Admission(CAPACITY, budget, _Odds(0.9), lambda: leaving)

    assert make("b").decide(["a"], 10, 0, 0.0).reason == "worth"
    assert make("a").decide(["b"], 10, 0, 0.0).reason == "worth_less"
    assert make("b").decide(["b"], 10, 0, 0.0).reason == "worth"
    assert make("a").decide(["b"], 10, 500, 0.0).reason == "room"
    assert make(None).decide(["b"], 10, 0, 0.0).reason == "worth"
