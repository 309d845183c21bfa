"""Budgets of bytes, on a clock that is told."""

from __future__ import annotations

import math

import pytest

from blobstore.tiering.budget import DAY_S, Budget


def test_a_burst_passes_and_then_what_the_rate_allows() -> None:
    budget = Budget(100.0, 1000.0)
    assert budget.take(1000, 0.0)
    assert not budget.take(1, 0.0)
    assert budget.wait_s(50, 0.0) == pytest.approx(0.5)
    assert not budget.take(51, 0.5)
    assert budget.take(50, 0.5)


def test_a_bucket_holds_no_more_than_its_burst() -> None:
    budget = Budget(100.0, 1000.0)
    assert budget.left_bytes(0.0) == 1000
    assert budget.left_bytes(1e6) == 1000


def test_no_limit_lets_everything_pass() -> None:
    budget = Budget.per_second(None)
    assert not budget.limited
    assert all(budget.take(1 << 40, 0.0) for _ in range(10))
    assert budget.wait_s(1 << 60, 0.0) == 0
    assert budget.left_bytes(0.0) == math.inf
    assert budget.day_bytes is None


@pytest.mark.parametrize("budget", [Budget.per_second(0), Budget.per_day(0)])
def test_a_budget_of_nothing_lets_nothing_pass_ever(budget: Budget) -> None:
    assert budget.limited
    assert not budget.take(1, 0.0)
    assert not budget.take(0, 1e9)
    assert budget.wait_s(1, 1e9) == math.inf


def test_what_is_larger_than_the_burst_passes_when_it_is_full_and_leaves_a_debt() -> None:
    budget = Budget(100.0, 100.0)
    assert budget.take(1000, 0.0)
    assert budget.left_bytes(0.0) == -900
    assert budget.wait_s(1000, 0.0) == pytest.approx(10.0)
    assert not budget.take(1, 9.0)
    assert budget.take(1000, 10.0)


def test_no_day_has_more_than_its_budget() -> None:
    budget = Budget.per_day(86_400)
    assert budget.day_bytes == pytest.approx(86_400)
    passed = []
    for second in range(int(2 * DAY_S)):
        if second % 60 == 0:
            n = 0
            while budget.take(10, float(second)):
                n += 10
            passed.append(n)
    day = int(DAY_S / 60)
    assert max(sum(passed[at : at + day]) for at in range(len(passed) - day)) <= 86_400
    assert sum(passed) > 1.8 * 86_400


def test_what_passed_without_asking_holds_back_what_asks() -> None:
    budget = Budget(100.0, 1000.0)
    budget.charge(1500, 0.0)
    assert not budget.take(1, 4.0)
    assert budget.take(100, 6.0)


def test_what_did_not_pass_after_all_is_given_back() -> None:
    budget = Budget(100.0, 1000.0)
    assert budget.take(800, 0.0)
    budget.give_back(800)
    assert budget.take(1000, 0.0)
    budget.give_back(5000)
    assert budget.left_bytes(0.0) == 1000


def test_a_clock_that_jumps_back_gives_nothing_and_takes_nothing() -> None:
    budget = Budget(100.0, 1000.0)
    assert budget.take(1000, 1000.0)
    assert budget.left_bytes(10.0) == 0
    assert budget.left_bytes(11.0) == 100


def test_a_clock_that_jumps_ahead_fills_the_bucket_once() -> None:
    budget = Budget(100.0, 1000.0)
    assert budget.take(1000, 0.0)
    assert budget.take(1000, 1e12)
    assert not budget.take(1, 1e12)
