"""That hazards by age and features are found again in what was made with them."""

from __future__ import annotations

import numpy as np
import pytest

from blobstore.tiering.hazard_trees import (
    AGE_EDGES_S,
    N_AGES,
    HazardTrees,
    age_bins,
)
from blobstore.tiering.tree_growth import Belief, TreeSettings, fit_hazard_trees

N = 4000


def _fit(
    features: np.ndarray,
    times_s: np.ndarray,
    watched_s: float,
    settings: TreeSettings | None = None,
    belief: Belief | None = None,
) -> HazardTrees:
    """Of items used again after `times_s`, as seen after `watched_s`."""
    reused = times_s < watched_s
    return fit_hazard_trees(
        features,
        np.where(reused, times_s, watched_s),
        reused,
        np.ones(len(times_s)),
        settings or TreeSettings(rate_of_few=TreeSettings().rate),
        seed=1,
        belief=belief,
    )


def _two_kinds(scale_s: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    features = rng.normal(size=(N, 3)).astype(np.float32)
    scales_s = np.where(features[:, 1] > 0, *scale_s)
    return features, rng.exponential(scales_s)


def _hazard(trees: HazardTrees, row: list[float], age_s: float) -> float:
    hazards = trees.hazards(trees.log_ratios(np.array([row], np.float32)))
    return float(hazards[0, age_bins(np.array([age_s]))[0]])


def test_each_age_falls_between_the_edges_of_its_bin() -> None:
    ages_s = np.array([0.0, 0.049, 0.051, 1.0, 33.3, 1e4])
    bins = age_bins(ages_s)
    assert (AGE_EDGES_S[bins] <= ages_s).all()
    assert (ages_s < AGE_EDGES_S[bins + 1]).all()


def test_no_age_is_too_old() -> None:
    assert age_bins(np.array([1e300, np.inf])).tolist() == [N_AGES - 1] * 2


def test_the_feature_that_matters_is_found() -> None:
    trees = _fit(*_two_kinds((10.0, 1000.0)), watched_s=300.0)
    assert _hazard(trees, [0.0, 1.0, 0.0], 5.0) == pytest.approx(0.1, rel=0.35)
    assert _hazard(trees, [0.0, -1.0, 0.0], 5.0) == pytest.approx(0.001, abs=0.0015)


def test_what_has_not_been_used_yet_counts_for_as_long_as_it_was_watched() -> None:
    features, times_s = _two_kinds((100.0, 100.0))
    for watched_s in (20.0, 1000.0):
        trees = _fit(features, times_s, watched_s)
        assert _hazard(trees, [0.0, 0.0, 0.0], 10.0) == pytest.approx(0.01, rel=0.4)


def test_hazards_may_cross() -> None:
    features, _ = _two_kinds((1.0, 1.0))
    rng = np.random.default_rng(9)
    soon = np.where(rng.random(N) < 0.7, rng.uniform(1, 10, N), np.inf)
    later = rng.uniform(50, 60, N)
    trees = _fit(features, np.where(features[:, 1] > 0, soon, later), watched_s=100.0)
    assert _hazard(trees, [0.0, 1.0, 0.0], 5.0) > 20 * _hazard(trees, [0.0, -1.0, 0.0], 5.0)
    assert _hazard(trees, [0.0, -1.0, 0.0], 55.0) > 5 * _hazard(trees, [0.0, 1.0, 0.0], 55.0)


def test_a_fit_is_the_same_for_the_same_samples() -> None:
    features, times_s = _two_kinds((10.0, 100.0))
    first, second = (_fit(features, times_s, 50.0) for _ in range(2))
    assert np.array_equal(first.values, second.values)


@pytest.mark.parametrize("watched_s", [1e-6, 50.0])
def test_samples_without_any_use_make_a_model_that_expects_little(watched_s: float) -> None:
    features = np.zeros((20, 3), np.float32)
    trees = _fit(features, np.full(20, np.inf), watched_s)
    hazards = trees.hazards(trees.log_ratios(features[:1]))
    assert np.isfinite(hazards).all()
    assert _hazard(trees, [0.0, 0.0, 0.0], 10.0) < 0.02


def test_few_samples_say_less_than_the_same_among_many() -> None:
    settings = TreeSettings(rate=0.1, rate_of_few=0.04, rate_samples=10_000)
    assert [settings.rate_for(n) for n in (100, 4000, 7500, 10_000, 10**6)] == pytest.approx(
        [0.04, 0.04, 0.075, 0.1, 0.1]
    )
    seen = _two_kinds((10.0, 1000.0))
    told, told_of_few = (
        _fit(*seen, watched_s=300.0, settings=TreeSettings(rate=0.1, rate_of_few=of_few))
        for of_few in (0.1, 0.02)
    )
    apart, apart_of_few = (
        _hazard(trees, [0.0, 1.0, 0.0], 5.0) / _hazard(trees, [0.0, -1.0, 0.0], 5.0)
        for trees in (told, told_of_few)
    )
    assert 5 < 2 * apart_of_few < apart


def test_there_are_as_many_trees_as_the_events_let_hope() -> None:
    settings = TreeSettings(trees=((1_000, 5), (3_000, 10), (5_000, 30)))
    told = (0, 1_000, 2_000, 3_000, 4_500, 10**9)
    assert [settings.trees_for(n) for n in told] == [5, 5, 8, 10, 25, 30]
    features, _ = _two_kinds((1.0, 1.0))
    for n_used, n_trees in ((0, 5), (1_500, 6), (N, 20)):
        times_s = np.where(np.arange(N) < n_used, 5.0, np.inf)
        assert len(_fit(features, times_s, 50.0, settings).feature) == n_trees


def test_uses_at_the_same_time_are_uses() -> None:
    features = np.zeros((1000, 3), np.float32)
    trees = _fit(features, np.zeros(1000), 10.0)
    assert np.isfinite(trees.values).all()
    assert _hazard(trees, [0.0, 0.0, 0.0], 0.01) > 1.0


def test_a_rare_kind_is_found_wherever_it_lies_among_many_samples() -> None:
    settings = TreeSettings(rate_of_few=TreeSettings().rate, samples_per_tree=6_000)
    many = 5 * settings.samples_per_tree
    features = np.zeros((many, 2), np.float32)
    features[-many // 20 :, 1] = 1.0
    scales_s = np.where(features[:, 1] > 0, 2.0, 200.0)
    trees = _fit(features, np.random.default_rng(4).exponential(scales_s), 50.0, settings)
    assert _hazard(trees, [0.0, 1.0], 1.0) > 20 * _hazard(trees, [0.0, 0.0], 1.0)


def test_a_belief_holds_until_samples_say_otherwise() -> None:
    belief = Belief(feature=1, threshold=0.5, log_ratio=1.0)
    rows = np.random.default_rng(6).integers(0, 2, (N, 3)).astype(np.float32)

    def apart(n: int, watched_s: float) -> float:
        times_s = np.random.default_rng(7).exponential(50.0, n)  # the same for both kinds
        trees = _fit(rows[:n], times_s, watched_s, belief=belief)
        above, below = (_hazard(trees, [0.0, kind, 0.0], 10.0) for kind in (1.0, 0.0))
        return above / below

    assert apart(N, watched_s=0.01) == pytest.approx(np.e, rel=0.1)
    assert apart(N, watched_s=50.0) == pytest.approx(1.0, abs=0.2)


def test_a_belief_about_what_no_samples_differ_in_says_nothing() -> None:
    times_s = np.random.default_rng(8).exponential(50.0, 50)
    trees = _fit(np.ones((50, 3), np.float32), times_s, 50.0, belief=Belief(1, 0.5, 1.0))
    assert _hazard(trees, [1.0, 1.0, 1.0], 10.0) == _hazard(trees, [1.0, 0.0, 1.0], 10.0)


def test_ratios_go_evenly_from_the_middle_of_one_period_to_the_next() -> None:
    period_of = np.repeat([0, 1, 2], N_AGES // 3)
    trees = HazardTrees(
        pooled=np.ones(N_AGES),
        period_of=period_of,
        cuts=np.full((1, 3), np.inf),
        feature=np.zeros((1, 1), np.int64),
        cut=np.full((1, 1), 255, np.uint8),
        values=np.zeros((1, 2, 3)),
    )
    found = np.log(trees.hazards(np.array([[0.0, 1.2, -2.4]]))[0])
    middles = [5.5, 17.5, 29.5]
    assert found == pytest.approx(np.interp(np.arange(N_AGES), middles, [0.0, 1.2, -2.4]))
