from __future__ import annotations

import pytest

from blobstore.latencies import BOUNDS_S, SLOWEST_MAX, SLOWEST_S, Histogram, Latencies
from tests.support.clock import FakeClock


def note(latencies: Latencies, clock: FakeClock, verb: str, seconds: float) -> None:
    started_s = clock()
    clock.advance(seconds)
    latencies.note("http", verb, started_s)


class TestHistogram:
    def test_a_duration_equal_to_a_bound_belongs_below_it(self) -> None:
        histogram = Histogram((1.0, 2.0))
        for seconds in (0.0, 1.0, 1.5, 2.0, 2.5):
            histogram.add(seconds)
        assert histogram.counts == [2, 2, 1]
        assert histogram.count == 5
        assert histogram.sum_s == 7.0
        assert histogram.longest_s == 2.5

    def test_bounds_ascend(self) -> None:
        assert list(BOUNDS_S) == sorted(set(BOUNDS_S))

    def test_quantiles_lie_in_the_bucket_that_holds_their_rank(self) -> None:
        histogram = Histogram((1.0, 2.0, 4.0))
        for seconds in [0.5] * 90 + [3.0] * 9 + [9.0]:
            histogram.add(seconds)
        assert 0 < histogram.quantile(0.5) <= 1
        assert 2 < histogram.quantile(0.95) <= 4
        assert histogram.quantile(0.99) <= 4
        assert histogram.quantile(1.0) == 9.0

    def test_of_nothing_every_quantile_is_0(self) -> None:
        assert Histogram().quantile(0.99) == 0.0

    def test_no_quantile_is_above_the_longest(self) -> None:
        histogram = Histogram()
        histogram.add(0.003)
        assert histogram.quantile(0.99) <= 0.003


class TestLatencies:
    def test_each_door_and_verb_has_its_own_histogram(self) -> None:
        latencies = Latencies(FakeClock())
        for door, verb in (("http", "put"), ("local", "get"), ("http", "get"), ("http", "get")):
            latencies.note(door, verb, latencies.clock())
        found = [(door, verb, histogram.count) for door, verb, histogram in latencies.histograms()]
        assert found == [("http", "get", 2), ("http", "put", 1), ("local", "get", 1)]

    def test_failures_are_counted_by_code_and_are_operations_too(self) -> None:
        latencies = Latencies(FakeClock())
        for error in ("", "busy", "busy", "full"):
            latencies.note("http", "put", latencies.clock(), error)
        assert list(latencies.failures()) == [
            ("http", "put", "busy", 2),
            ("http", "put", "full", 1),
        ]
        assert next(latencies.histograms())[2].count == 4

    def test_the_slowest_are_kept_and_no_more(self) -> None:
        clock = FakeClock()
        latencies = Latencies(clock)
        for number in range(3 * SLOWEST_MAX):
            note(latencies, clock, "get", 0.001 * (number * 7 % (3 * SLOWEST_MAX)))
        found = [slow.seconds for slow in latencies.slowest()]
        wanted = [0.001 * number for number in range(3 * SLOWEST_MAX)][: -SLOWEST_MAX - 1 : -1]
        assert found == pytest.approx(wanted)

    def test_what_was_slow_long_ago_makes_room(self) -> None:
        clock = FakeClock()
        latencies = Latencies(clock)
        for _ in range(SLOWEST_MAX):
            note(latencies, clock, "put", 2.0)
        clock.advance(SLOWEST_S)
        assert latencies.slowest() == []
        note(latencies, clock, "get", 0.001)
        assert [(slow.verb, slow.door) for slow in latencies.slowest()] == [("get", "http")]
