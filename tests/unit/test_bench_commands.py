"""The commands' options, and the picture of a report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blobstore.bench import commands, rpc
from blobstore.bench.pairs import Pairs
from blobstore.bench.plot import to_svg
from blobstore.bench.report import Row, Setting, bound_row, latency_row
from blobstore.bench.setup import Setup
from blobstore.errors import NotEnough, SetupError

SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, ratio: float, least: float = 0.5) -> Row:
    return latency_row(
        name, Pairs((1.0,), (ratio,), (ratio,)), "a <limit>", Setting(1, least=least)
    )


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """`bench rpc` without a daemon: what it was asked is recorded."""
    asked: list[Setup] = []

    def rows(setup: Setup) -> list[Row]:
        asked.append(setup)
        return [row("rpc.ping", 0.7), row("rpc.slow", 0.1)]

    monkeypatch.setattr(rpc, "rows", rows)
    monkeypatch.setattr(commands, "_end_in_order", lambda: None)
    return asked


def test_json_is_the_only_thing_on_standard_output(canned: list[Setup], tmp_path: Path) -> None:
    result = CliRunner().invoke(commands.bench, ["rpc", "--json", "--data", str(tmp_path)])
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert [found["name"] for found in body["rows"]] == ["rpc.ping", "rpc.slow"]
    assert body["machine"]["cpus"] >= 1
    assert canned[0].directory == tmp_path


def test_tiny_reaches_the_benchmark(canned: list[Setup], tmp_path: Path) -> None:
    for arguments in (["--tiny"], []):
        CliRunner().invoke(commands.bench, ["rpc", "--data", str(tmp_path), *arguments])
    assert [setup.scale("full", "tiny") for setup in canned] == ["tiny", "full"]


def test_check_fails_for_a_row_below_its_bound_and_names_it(
    canned: list[Setup], tmp_path: Path
) -> None:
    arguments = ["rpc", "--json", "--data", str(tmp_path)]
    result = CliRunner().invoke(commands.bench, [*arguments, "--check"])
    assert isinstance(result.exception, commands.BelowBound)
    assert "rpc.slow 0.10" in str(result.exception)
    assert "rpc.ping" not in str(result.exception)


def test_plot_writes_a_picture(canned: list[Setup], tmp_path: Path) -> None:
    picture = tmp_path / "rpc.svg"
    CliRunner().invoke(
        commands.bench, ["rpc", "--json", "--data", str(tmp_path), "--plot", str(picture)]
    )
    assert ET.parse(picture).getroot().tag == f"{SVG}svg"


def test_a_directory_that_is_not_there_is_named(canned: list[Setup], tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    result = CliRunner().invoke(commands.bench, ["rpc", "--data", str(missing)])
    assert isinstance(result.exception, SetupError)
    assert str(missing) in str(result.exception)
    assert canned == []


def test_every_benchmark_has_a_line_of_help() -> None:
    shown = CliRunner().invoke(commands.bench, ["--help"]).stdout
    for name in (
        "tiers",
        "rpc",
        "midfill",
        "clients",
        "catalogue",
        "put-cost",
        "idle",
        "http",
        "peers",
    ):
        assert f" {name} " in shown


def test_bars_are_as_long_as_ratios_and_cut_beyond_the_limit() -> None:
    rows = [row("half", 0.5), row("whole", 1.0), row("far", 9.0), row("farther", 90.0)]
    drawn = ET.fromstring(to_svg(rows))
    half, whole, far, farther = (int(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect")
                                 if bar.find(f"{SVG}title") is not None)  # fmt: skip
    assert whole == 2 * half
    assert whole < far == farther


def test_a_missed_bound_has_another_colour() -> None:
    drawn = ET.fromstring(to_svg([row("good", 0.6), row("bad", 0.4)]))
    good, bad = (bar.attrib["fill"] for bar in drawn.iter(f"{SVG}rect")
                 if bar.find(f"{SVG}title") is not None)  # fmt: skip
    assert good != bad


def test_a_quantity_below_its_bound_has_a_ratio_above_one() -> None:
    assert bound_row("idle.cpu", 0.005, "share of a core", 0.01, [0.005], Setting(0)).ratio == 2.0
    assert bound_row("idle.cpu", 0.0, "share of a core", 0.01, [0.0], Setting(0)).met
    assert not bound_row("idle.cpu", 0.02, "share of a core", 0.01, [0.02], Setting(0)).met


def test_too_little_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    setup = Setup(tmp_path, False, lambda line: None)
    setup.need_memory(1)
    with pytest.raises(NotEnough, match=r"needs 1e\+03 TiB|needs 1024 TiB"):
        setup.need_memory(1 << 50)
