"""That worth is the best rate of hits for the time that an item is held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from blobstore.tiering.hazard_trees import AGE_EDGES_S, N_AGES, FloatArray, age_bins
from blobstore.tiering.worth import N_WORTHS, by_steps, worth_steps, worth_table


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


def _at(worth: FloatArray, ages_s: Sequence[float]) -> list[float]:
    found: list[float] = worth[0, worth_steps(np.array(ages_s))].tolist()
    return found


def test_of_two_items_in_one_bin_of_ages_the_older_is_worth_less() -> None:
    hazards = 0.1 / np.maximum(AGE_EDGES_S[1:], 0.05)[None, :]
    ages_s = AGE_EDGES_S[20] * np.array([1.01, 1.2, 1.4, 1.59])
    assert len(set(age_bins(ages_s).tolist())) == 1
    found = _at(by_steps(worth_table(hazards)), ages_s.tolist())
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


def test_between_the_starts_of_two_bins_worth_goes_from_one_to_the_other() -> None:
    table = np.random.default_rng(4).gamma(0.3, 0.1, (1, N_AGES))
    worth = by_steps(table)
    assert worth.shape == (1, N_WORTHS)
    for at in range(1, N_AGES - 1):
        low, high = table[0, at : at + 2]
        found = _at(worth, (AGE_EDGES_S[at] * 1.6 ** (np.arange(4) / 4 + 0.1)).tolist())
        assert found == pytest.approx([low + (high - low) * share / 8 for share in (1, 3, 5, 7)])
    assert _at(worth, [0.0, 0.04, -1.0]) == [table[0, 0]] * 3
    assert _at(worth, [AGE_EDGES_S[-2] * 1.01, float("inf")]) == [table[0, -1]] * 2
