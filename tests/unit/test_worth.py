"""That worth is the best rate of hits for the time that an item is held."""

from __future__ import annotations

import numpy as np
import pytest

from blobstore.tiering.hazard_trees import N_AGES, age_bins
from blobstore.tiering.worth import worth_table


def _bin(age_s: float) -> int:
    return int(age_bins(np.array([age_s]))[0])


def test_a_constant_hazard_is_worth_itself() -> None:
    table = worth_table(np.full((1, N_AGES), 0.01))
    assert table[0] == pytest.approx(0.01, rel=1e-6)


def test_an_item_that_is_due_is_worth_more_than_its_average() -> None:
    hazards = np.full((2, N_AGES), 1e-9)
    hazards[0, _bin(100.0)] = 0.1
    hazards[1, _bin(100.0) : _bin(1000.0)] = 0.0005
    table = worth_table(hazards)
    assert table[0, _bin(90.0)] > table[1, _bin(90.0)]
    assert table[0, _bin(90.0)] > 2 * table[0, 0]


def test_an_item_whose_time_has_passed_is_worth_nothing() -> None:
    hazards = np.full((1, N_AGES), 1e-9)
    hazards[0, : _bin(30.0)] = 0.1
    assert worth_table(hazards)[0, _bin(40.0)] < 1e-8


def test_worth_is_never_below_the_hazard_of_the_moment() -> None:
    hazards = np.random.default_rng(3).gamma(0.3, 0.1, (20, N_AGES))
    assert (worth_table(hazards) >= hazards * (1 - 1e-9)).all()
