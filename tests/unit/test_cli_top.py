"""`blobstore top`: rates between two answers, and what is shown of them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.cli import main, top
from blobstore.cli.top import RATES, sample_of
from blobstore.counters import Counters
from blobstore.errors import Unavailable
from blobstore.protocol import Report
from blobstore.units import MIB
from tests.support.served_store import ServedStore, served_store

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def served(tmp_path: Path, monkeypatch: Patch) -> Iterator[ServedStore]:
    with served_store(tmp_path / "b.sock") as found:
        monkeypatch.setenv("BLOBSTORE__LOCAL__SOCKET", os.fspath(found.path))
        yield found


@pytest.fixture
def stats(served: ServedStore) -> dict[str, Any]:
    return served.call(lambda store: store.stats())


def later(stats: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same daemon after so many seconds of work."""
    after = copy.deepcopy(stats)
    after["uptime_s"] += seconds
    counters = after["counters"]
    counters["gets"] += 10
    counters["hit_blobs"]["dram"] = 100
    counters["hit_bytes"]["dram"] = 100 * MIB
    counters["missed_blobs"] |= {"absent": 6, "no_room": 2}
    counters["put_blobs"]["stored"] = 40
    counters["put_bytes"] += 40 * MIB
    counters["saved_blobs"] += 4
    counters["saved_bytes"] += 4 * MIB
    return after


def test_rates_are_differences_by_the_daemon_s_clock(stats: dict[str, Any]) -> None:
    sample = sample_of(stats, later(stats, 2.0))
    assert sample["interval_s"] == pytest.approx(2.0)
    rates = sample["rates"]
    assert rates["gets"] == pytest.approx(5.0)
    assert rates["hit_blobs"] == {"dram": pytest.approx(50.0)}
    assert rates["hit_bytes"] == {"dram": pytest.approx(50.0 * MIB)}
    assert rates["missed_blobs"] == {"absent": pytest.approx(3.0), "no_room": pytest.approx(1.0)}
    assert rates["put_bytes"] == pytest.approx(20.0 * MIB)
    assert rates["loaded_blobs"] == 0.0
    assert sample["tiers"]["dram"]["capacity_bytes"] == 16 * MIB


def test_a_restart_in_between_gives_no_rates(stats: dict[str, Any]) -> None:
    busy = later(stats, 100.0)
    sample = sample_of(busy, stats | {"boot_id": stats["boot_id"] + 1, "uptime_s": 1.0})
    assert sample["interval_s"] == 0.0
    assert set(sample["rates"]["hit_blobs"].values()) <= {0.0}
    assert sample["rates"]["put_bytes"] == 0.0


def test_two_answers_at_once_give_no_rates(stats: dict[str, Any]) -> None:
    assert sample_of(stats, later(stats, 0.0))["rates"]["gets"] == 0.0


def test_every_rate_is_of_a_counter(stats: dict[str, Any]) -> None:
    assert set(RATES) <= Counters().as_dict().keys()
    assert set(sample_of(stats, stats)["rates"]) == set(RATES)


def test_once_prints_one_sample(served: ServedStore, capsys: Output) -> None:
    assert main(["top", "--once", "--json", "--interval", "0.05"]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert sample["interval_s"] > 0
    assert set(sample["tiers"]) == {"dram", "ssd"}
    assert main(["top", "--once", "--interval", "0.05"]) == 0
    out = capsys.readouterr().out
    assert out.count("unix:") == 1
    assert "16 MiB" in out
    assert "clients" in out


def answers(monkeypatch: Patch, *bodies: Any) -> None:
    """What the daemon answers, one after the other; then the person presses Ctrl-C."""
    waiting = list(bodies)

    def answer(*_: object) -> Report:
        if not waiting:
            raise KeyboardInterrupt
        body = waiting.pop(0)
        if isinstance(body, Exception):
            raise body
        return Report(body)

    monkeypatch.setattr(top, "ask", answer)


def test_without_once_it_goes_on_until_it_is_interrupted(
    stats: dict[str, Any], capsys: Output, monkeypatch: Patch
) -> None:
    answers(monkeypatch, stats, later(stats, 1.0), later(later(stats, 1.0), 1.0))
    assert main(["top", "--json", "--interval", "0.05"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["rates"]["gets"] == pytest.approx(10.0)
    assert second["uptime_s"] > first["uptime_s"]


def test_people_see_flows_misses_by_reason_and_faults(
    stats: dict[str, Any], capsys: Output, monkeypatch: Patch
) -> None:
    after = later(stats, 1.0)
    after["counters"]["corrupt"] = 2
    answers(monkeypatch, stats, after)
    assert main(["top", "--interval", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert rows["hits: dram"] == ["100", "100", "MiB/s"]
    assert rows["misses: no_room"] == ["2.0"]
    assert rows["puts: stored"] == ["40", "40", "MiB/s"]
    assert rows["saved to ssd"] == ["4.0", "4", "MiB/s"]
    assert any("2 corrupt copies put aside" in line for line in lines)


def test_people_see_why_blobs_move_and_who_decides(
    stats: dict[str, Any], capsys: Output, monkeypatch: Patch
) -> None:
    stats["plan"] = {
        "policy": "lru2",
        "wanted": "ours",
        "regret": 0.0125,
        "fits": 3,
        "write_budget": {"day_left_bytes": 5 * MIB},
        "more": "not shown",
    }
    after = later(stats, 2.0)
    counters = after["counters"]
    counters["moved_blobs"]["dram>ssd"] = {"worth": 40}
    counters["moved_bytes"]["dram>ssd"] = {"worth": 40 * MIB}
    counters["refused_blobs"]["ssd"] = {"unlikely": 6}
    counters["refused_bytes"]["ssd"] = {"unlikely": 6 * MIB}
    answers(monkeypatch, stats, after)
    assert main(["top", "--interval", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:27].strip(): line[27:].split() for line in lines}
    assert rows["dram>ssd: worth"] == ["20", "20", "MiB/s"]
    assert rows["not let into ssd: unlikely"] == ["3.0", "3", "MiB/s"]
    assert (
        "policy lru2 in place of ours, 1.25% of tokens behind the best reference, 3 fits, "
        "5 MiB may be written to ssd at once"
    ) in lines
    assert "not shown" not in "".join(lines)


def test_a_policy_that_leads_is_said_to_lead(
    stats: dict[str, Any], capsys: Output, monkeypatch: Patch
) -> None:
    stats["plan"] = {"policy": "ours", "wanted": "ours", "regret": -0.02}
    answers(monkeypatch, stats, stats)
    assert main(["top", "--interval", "0.05"]) == 0
    expected = "policy ours, 2.00% of tokens ahead of the best reference"
    assert expected in capsys.readouterr().out.splitlines()


def test_people_see_how_long_blobs_lie_before_they_are_used_again_or_leave(
    stats: dict[str, Any], capsys: Output, monkeypatch: Patch
) -> None:
    assert sample_of(stats, stats)["median_ages_s"] == {}
    ages = stats["ages"]
    ages["reuse_gap"]["counts"][4] = 10  # in 3 to 10 s
    ages["at_eviction"]["dram"]["counts"][6:8] = [1, 3]  # 30 to 100 s, 100 to 300 s
    ages["at_eviction"]["ssd"]["counts"][-1] = 1
    answers(monkeypatch, stats, stats)
    assert main(["top", "--interval", "0.05"]) == 0
    expected = (
        "median age when used again 6.5 s, when leaving dram 2 min 46 s, when leaving ssd 11 d 13 h"
    )
    assert expected in capsys.readouterr().out.splitlines()


def test_a_terminal_waits_for_a_daemon_that_went_away(
    stats: dict[str, Any], capsys: Output, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answers(
        monkeypatch, stats, stats, later(stats, 1.0), Unavailable("it is gone"), stats,
        later(stats, 2.0),
    )  # fmt: skip
    assert main(["top", "--interval", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "it is gone" in out
    assert out.index("it is gone") < out.rindex("hits: dram")


@pytest.mark.parametrize("interval", ["0", "-1", "soon"])
def test_an_interval_is_a_time(interval: str, capsys: Output) -> None:
    assert main(["top", "--interval", interval]) == 2
