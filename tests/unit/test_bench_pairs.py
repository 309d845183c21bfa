"""Limit and measurement in turns, and the rows made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console

from blobstore.bench.pairs import Pairs, Sample, alternate
from blobstore.bench.report import Report, Setting, count_row, format_value, latency_row, rate_row

FIELDS = {
    "name", "value", "unit", "limit", "limit_name", "ratio", "working_set_bytes", "cold", "sync",
    "n", "median_s", "p99_s", "spread",
}  # fmt: skip


def scripted(*seconds: float, log: list[str] | None = None, name: str = "") -> Sample:
    left: Iterator[float] = iter(seconds)

    def sample() -> Sequence[float]:
        if log is not None:
            log.append(name)
        return [next(left)]

    return sample


def test_each_of_a_pair_goes_first_every_second_time() -> None:
    log: list[str] = []
    alternate(
        scripted(*[1.0] * 4, log=log, name="ours"),
        scripted(*[1.0] * 4, log=log, name="limit"),
        4,
        warm_up=0,
    )
    assert log == ["limit", "ours", "ours", "limit"] * 2


def test_warm_up_pairs_are_not_counted() -> None:
    pairs = alternate(scripted(99.0, 2.0, 2.0), scripted(1.0, 1.0, 1.0), 2, warm_up=1)
    assert pairs.measured_s == (2.0, 2.0)


def test_the_ratio_is_the_median_over_pairs_not_the_ratio_of_medians() -> None:
    ours, limit = (2.0, 4.0, 8.0), (1.0, 3.0, 7.0)
    pairs = alternate(scripted(*ours), scripted(*limit), 3, warm_up=0)
    assert pairs.ratio == 0.75
    assert pairs.median_s == 4.0


def test_drift_that_hits_both_alike_leaves_the_ratio() -> None:
    drift = (1.0, 2.0, 0.5, 1.7, 0.6)
    pairs = alternate(scripted(*(2 * d for d in drift)), scripted(*drift), 5, warm_up=0)
    assert pairs.ratio == 0.5


def test_p99_of_few_samples_is_the_slowest_and_of_many_is_not() -> None:
    few = Pairs((1.0, 5.0, 2.0), (1.0,), (1.0,))
    many = Pairs((*[1.0] * 199, 9.0), (1.0,), (1.0,))
    assert few.p99_s == 5.0
    assert many.p99_s == 1.0


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert Pairs((1.0, 2.0, 3.0, 4.0, 5.0), (1.0,), (1.0,)).spread == pytest.approx(2 / 3)
    assert Pairs((1.0,), (1.0,), (1.0,)).spread == 0.0


def test_rates_divide_by_the_limit_and_latencies_are_divided_into_it() -> None:
    pairs = Pairs((2.0,), (1.0,), (0.5,))
    setting = Setting(working_set_bytes=1)
    rate = rate_row("r", pairs, 100, "copy", setting)
    count = count_row("c", pairs, 10, "one client", setting)
    latency = latency_row("l", pairs, "echo", setting)
    assert (rate.value, rate.limit, rate.ratio) == (50.0, 100.0, 0.5)
    assert (count.value, count.limit, count.ratio) == (5.0, 10.0, 0.5)
    assert (latency.value, latency.limit, latency.ratio) == (2.0, 1.0, 0.5)


def test_the_json_has_exactly_the_promised_fields() -> None:
    row = latency_row("l", Pairs((2.0,), (1.0,), (0.5,)), "echo", Setting(1 << 30, least=0.4))
    parsed = json.loads(Report({"cpus": 2}, [row]).to_json())
    assert set(parsed) == {"machine", "rows"}
    assert set(parsed["rows"][0]) == FIELDS


def test_a_row_below_what_it_has_to_reach_is_not_met() -> None:
    pairs = Pairs((2.0,), (1.0,), (0.5,))
    good = latency_row("l", pairs, "echo", Setting(1, least=0.5))
    bad = latency_row("l", pairs, "echo", Setting(1, least=0.51))
    assert Report({}, [good]).met
    assert not Report({}, [good, bad]).met


def test_the_table_shows_rates_in_powers_of_ten_and_of_two() -> None:
    row = rate_row("dram.put", Pairs((1.0,), (0.5,), (0.5,)), 2**30, "memcpy", Setting(2**30))
    console = Console(width=240, record=True, file=None, quiet=False)
    with console.capture() as capture:
        Report({"cpus": 2}, [row]).print(console)
    assert "1.07 GB/s (1.00 GiB/s)" in capture.get()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.5, "s", "2.5 s"),
        (0.0125, "s", "12.5 ms"),
        (7e-6, "s", "7 µs"),
        (1234.5, "1/s", "1,234/s"),
    ],
)
def test_values_are_shown_in_fitting_units(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text  # type: ignore[arg-type]
