"""That samples are watched until the next use, and which are kept."""

from __future__ import annotations

import numpy as np

from blobstore.tiering.reuse_features import N_FEATURES, Float32Array
from blobstore.tiering.reuse_samples import ReuseSamples


def _rows(*values: float) -> Float32Array:
    return np.repeat(np.array(values, np.float32)[:, None], N_FEATURES, 1)


def _samples(n_max: int) -> ReuseSamples:
    return ReuseSamples(n_max, np.random.default_rng(1))


def test_a_sample_ends_with_the_next_use_or_lasts_until_now() -> None:
    samples = _samples(10)
    tokens = samples.watch(_rows(1, 2), 100.0)
    samples.end(tokens[:1], 130.0)
    copy = samples.copy(200.0)
    assert copy.features[:, 0].tolist() == [1, 2]
    assert copy.watched_s.tolist() == [30.0, 100.0]
    assert copy.reused.tolist() == [True, False]


def test_a_copy_does_not_change_any_more() -> None:
    samples = _samples(4)
    samples.watch(_rows(1, 2, 3), 0.0)
    copy = samples.copy(5.0)
    samples.watch(_rows(7, 8, 9), 6.0)
    assert copy.features[:, 0].tolist() == [1, 2, 3]


def test_half_are_the_latest_and_half_are_of_all_before() -> None:
    samples = _samples(200)
    for value in range(5000):
        samples.watch(_rows(value), float(value))
    kept = np.sort(samples.copy(5000.0).features[:, 0])
    assert len(kept) == len(np.unique(kept)) == len(samples) == 200
    assert kept[100:].tolist() == list(range(4900, 5000))
    assert 1800 < kept[:100].mean() < 3000


def test_the_end_of_a_sample_that_was_given_up_is_ignored() -> None:
    samples = _samples(4)
    first = samples.watch(_rows(1), 0.0)
    for value in range(100):
        samples.watch(_rows(value + 10), 1.0)
    if 1 in samples.copy(2.0).features[:, 0]:
        return
    samples.end(first, 2.0)
    assert not samples.copy(3.0).reused.any()


def test_a_clock_that_jumps_back_makes_no_negative_times() -> None:
    samples = _samples(4)
    samples.watch(_rows(1), 100.0)
    assert samples.copy(50.0).watched_s.tolist() == [0.0]
