"""How long it takes to write a tier full."""

from __future__ import annotations

import math

import pytest

from blobstore.tiering.turnover import Turnover


def test_nothing_is_known_before_enough_was_written() -> None:
    turnover = Turnover(1600)
    assert turnover.turn_s(0.0) == math.inf
    turnover.note(99, 10.0)
    assert turnover.turn_s(20.0) == math.inf


def test_a_turn_that_is_not_over_is_guessed_from_what_was_seen() -> None:
    turnover = Turnover(1000)
    turnover.note(100, 0.0)
    assert turnover.turn_s(10.0) == pytest.approx(100.0)


def test_the_last_turn_counts_and_not_the_ones_before() -> None:
    turnover = Turnover(1000)
    for second in range(100):
        turnover.note(100, float(second))  # 10 s a turn
    assert turnover.turn_s(100.0) == pytest.approx(10.0, rel=0.15)
    for second in range(100, 600):
        turnover.note(10, float(second))  # 100 s a turn
    assert turnover.turn_s(600.0) == pytest.approx(100.0, rel=0.05)


def test_a_turn_gets_longer_while_nothing_is_written() -> None:
    turnover = Turnover(1000)
    for second in range(10):
        turnover.note(100, float(second))
    assert turnover.turn_s(1e6) > 9e5


def test_memory_is_bounded() -> None:
    turnover = Turnover(1000)
    for second in range(10_000):
        turnover.note(1, second / 10)
    assert len(turnover._marks) <= 70


def test_a_clock_that_jumps_back_moves_the_past_along() -> None:
    turnover = Turnover(1000)
    for second in range(100):
        turnover.note(100, 1e6 + second)
    for second in range(5):
        turnover.note(100, float(second))
    assert turnover.turn_s(5.0) == pytest.approx(10.0, rel=0.25)


def test_what_was_not_written_after_all_does_not_count() -> None:
    told, other = Turnover(1000), Turnover(1000)
    for second in range(30):
        told.note(100, float(second))
        other.note(100, float(second))
        for _ in range(5):
            told.note(100, float(second))
            told.take_back(100)
    assert told.turn_s(30.0) == pytest.approx(other.turn_s(30.0), rel=0.15)
