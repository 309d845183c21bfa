from __future__ import annotations

import numpy as np
import pytest

from blobstore.estimates import CostFit, Estimates, FetchEstimate, RebuildEstimate
from blobstore.units import MIB

NS = b"n" * 32


def relative_errors(seed: int, noise: float) -> float | None:
    """The error that a fetch estimate tells after 50 loads of a noisy disk."""
    rng = np.random.default_rng(seed)
    fetch = FetchEstimate()
    for _ in range(50):
        nbytes = int(rng.choice([1, 2, 8, 64])) * MIB
        true_s = 0.004 + nbytes / 700e6
        fetch.note(nbytes, 0, true_s * rng.lognormal(0, noise))
    return fetch._fit.error


@pytest.mark.parametrize("seed", range(5))
def test_after_50_loads_of_a_disk_that_varies_the_error_is_small(seed: int) -> None:
    error = relative_errors(seed, noise=0.2)
    assert error is not None
    assert error < 0.25


def test_one_operation_sets_the_level() -> None:
    fetch = FetchEstimate()
    fetch.note(10 * MIB, 0, 1.0)
    assert fetch.seconds(10 * MIB) == pytest.approx(1.0, rel=0.05)
    assert fetch.seconds(20 * MIB) == pytest.approx(2.0, rel=0.15)


def test_what_others_load_counts_as_work_before_ones_own() -> None:
    fetch = FetchEstimate()
    for n in (1, 2, 3, 4):
        fetch.note(n * MIB, 0, n / 100)
    assert fetch.seconds(MIB, 3 * MIB) == pytest.approx(0.04, rel=0.05)


def test_a_disk_that_became_slower_is_believed() -> None:
    fetch = FetchEstimate()
    for _ in range(60):
        fetch.note(8 * MIB, 0, 0.01)
    for _ in range(40):
        fetch.note(8 * MIB, 0, 0.05)
    assert fetch.seconds(8 * MIB) == pytest.approx(0.05, rel=0.1)


def test_outliers_do_not_move_an_estimate() -> None:
    fetch = FetchEstimate()
    for number in range(60):
        fetch.note(8 * MIB, 0, 3.0 if number % 10 == 9 else 0.01)
    assert fetch.seconds(8 * MIB) == pytest.approx(0.01, rel=0.2)


def test_a_rebuild_costs_more_the_further_back_it_begins() -> None:
    rebuild = RebuildEstimate()
    rng = np.random.default_rng(1)

    def true_s(position: int, n: int) -> float:
        return 0.002 + 1e-4 * n + 3e-8 * n * (position + n / 2)

    for _ in range(50):
        position, n = int(rng.integers(0, 30_000)), int(rng.choice([256, 512, 2048]))
        rebuild.note(position, n, true_s(position, n) * rng.lognormal(0, 0.15))
    for position, n in ((0, 256), (0, 4096), (20_000, 1024)):
        assert rebuild.seconds(position, n) == pytest.approx(true_s(position, n), rel=0.2)
    assert rebuild.error is not None
    assert rebuild.error < 0.25


def test_costs_are_never_below_nothing() -> None:
    fit = CostFit((1.0, 1.0))
    for amount, seconds in ((1.0, 5.0), (2.0, 4.0), (3.0, 3.0), (4.0, 2.0)):
        fit.note((1.0, amount), seconds)
    assert fit.estimate_s((0.0, 1.0)) >= 0
    assert fit.estimate_s((1.0, 100.0)) > 0


def test_what_took_no_time_is_not_believed() -> None:
    fit = CostFit((1.0, 1.0))
    fit.note((1.0, 1.0), 0.0)
    assert fit.n_seen == 0
    assert fit.error is None


def test_a_runner_is_known_by_namespace_and_name() -> None:
    estimates = Estimates()
    assert estimates.rebuild_s(NS, 0, 256) is None
    for _ in range(3):
        estimates.rebuilt(NS, "slow", 0, 256, 2.0)
        estimates.rebuilt(NS, "fast", 0, 256, 0.5)
    assert estimates.rebuild_s(NS, 0, 256, "slow") == pytest.approx(2.0, rel=0.05)
    assert estimates.rebuild_s(NS, 0, 256, "fast") == pytest.approx(0.5, rel=0.05)
    assert estimates.rebuild_s(NS, 0, 256) == pytest.approx(0.5, rel=0.05)
    assert estimates.rebuild_s(NS, 0, 256, "new") == pytest.approx(0.5, rel=0.05)
    assert estimates.rebuild_s(b"o" * 32, 0, 256) is None


def test_runners_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.estimates.MODELS_MAX", 2)
    estimates = Estimates()
    for name in ("a", "b", "c"):
        estimates.rebuilt(name.encode(), name, 0, 256, 1.0)
    assert estimates.rebuild_s(b"a", 0, 256) is None
    assert estimates.rebuild_s(b"c", 0, 256) is not None
    assert estimates.stats()["rebuild"] == {"runners": 2, "error": None}


def test_stats_tell_the_errors() -> None:
    estimates = Estimates()
    assert estimates.stats()["fetch"] == {"loads": 0, "error": None}
    for _ in range(3):
        estimates.fetch.note(MIB, 0, 0.01)
        estimates.rebuilt(NS, "r", 0, 256, 1.0)
    stats = estimates.stats()
    assert stats["fetch"]["error"] < 0.5
    assert stats["rebuild"]["error"] < 0.1
