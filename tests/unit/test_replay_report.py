"""How replays are shown: JSON, scores, a picture, and the options of the command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blobstore.bench import commands
from blobstore.bench.replay import ReplayRow
from blobstore.bench.replay_command import Asked, names, numbers
from blobstore.bench.replay_plot import ticks_up_to, to_svg
from blobstore.bench.replay_report import ReplayReport, scores_of
from blobstore.bench.trace import made_trace
from blobstore.errors import InvalidRequest

TRACE = made_trace()
SVG = "{http://www.w3.org/2000/svg}"
KEYS = {
    "policy", "size", "token_hit_ratio", "cost_saved", "ssd_bytes_written", "us_per_decision",
    "train_s",
}  # fmt: skip


def row(policy: str, size: float, ratio: float) -> ReplayRow:
    return ReplayRow(policy, size, ratio, ratio, 100, 2.0, 0.0, 40)


ROWS = [
    *(row("lru", 0.01, 0.1), row("ours", 0.01, 0.3), row("min", 0.01, 0.9)),  # LRU: hopeless
    *(row("lru", 0.02, 0.4), row("ours", 0.02, 0.5), row("min", 0.02, 0.8)),
    *(row("lru", 0.05, 0.6), row("ours", 0.05, 0.75), row("min", 0.05, 0.8)),
    *(row("lru", 0.1, 0.8), row("ours", 0.1, 0.79), row("min", 0.1, 0.8)),  # LRU: nothing to win
]


@pytest.fixture(autouse=True)
def _signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_end_in_order", lambda: None)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(commands.bench, ["replay", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def text_of(report: ReplayReport, *, score: bool) -> str:
    console = Console(width=200, record=True, file=None, quiet=False, stderr=True)
    with console.capture() as captured:
        report.print(console, score=score)
    return captured.get()


def test_rows_in_json_have_the_agreed_names() -> None:
    shown = ReplayReport(TRACE, rows=ROWS).as_json()
    assert shown["trace"] == "made"
    assert all(row.keys() == KEYS for row in shown["rows"])
    assert [row["policy"] for row in shown["rows"][:3]] == ["lru", "ours", "min"]


def test_with_an_ssd_rows_say_too_what_was_read_again() -> None:
    shown = ReplayReport(TRACE, with_ssd=True, rows=ROWS).as_json()
    assert all(row.keys() == {*KEYS, "ssd_bytes_read_again"} for row in shown["rows"])


def test_the_score_is_the_mean_share_of_the_gap_where_there_is_one() -> None:
    assert scores_of(ROWS) == {"ours": pytest.approx((0.25 + 0.75) / 2)}


def test_there_is_no_score_where_nothing_is_to_be_won() -> None:
    assert scores_of(ROWS[:3]) == {"ours": None}
    assert scores_of(ROWS[9:]) == {"ours": None}
    assert scores_of([row("ours", 0.02, 0.5)]) == {"ours": None}


def test_the_table_shows_scores_and_the_worst_against_lru() -> None:
    text = text_of(ReplayReport(TRACE, rows=ROWS), score=True)
    assert "closed, at 0.02, 0.05:" in text
    assert "ours: 0.500   (against lru at worst -0.0100)" in text
    assert "written to SSD" not in text


def test_a_score_of_nothing_but_lru_says_so() -> None:
    text = text_of(ReplayReport(TRACE, rows=[r for r in ROWS if r.policy != "ours"]), score=True)
    assert "nothing to compare: name another policy than lru" in text
    assert "closed" not in text


def test_the_table_shows_what_was_written_and_read_again() -> None:
    text = text_of(ReplayReport(TRACE, with_ssd=True, rows=ROWS), score=False)
    assert "written to SSD" in text
    assert "40%" in text


def test_the_picture_has_a_line_per_policy_and_a_point_per_row() -> None:
    svg = ET.fromstring(to_svg([ReplayReport(TRACE, rows=ROWS)] * 2))
    assert len(svg.findall(f"{SVG}circle")) == 2 * len(ROWS)
    texts = [element.text for element in svg.findall(f"{SVG}text")]
    assert texts.count("ours") == texts.count("min") == texts.count("made") == 2


def test_the_key_of_the_picture_has_the_marks_of_the_lines() -> None:
    svg = ET.fromstring(to_svg([ReplayReport(TRACE, rows=ROWS)]))
    strokes = [path.get("stroke") for path in svg.findall(f"{SVG}path")]
    assert [strokes.count(colour) for colour in ("#c44", "#3a7", "black")] == [2, 2, 2]
    points = [point.get("fill") for point in svg.findall(f"{SVG}circle")]
    assert [points.count(colour) for colour in ("#c44", "#3a7", "black")] == [4, 4, 4]


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.4187, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.031, [0, 0.01, 0.02, 0.03, 0.04]),
    ],
)
def test_ticks_are_round_and_reach_beyond_the_most(most: float, ticks: list[float]) -> None:
    assert ticks_up_to(most) == pytest.approx(ticks)


def test_a_picture_that_would_not_be_svg_is_refused_at_once(tmp_path: Path) -> None:
    picture = tmp_path / "replay.png"
    result = CliRunner().invoke(commands.bench, ["replay", "--tiny", "--plot", str(picture)])
    assert isinstance(result.exception, InvalidRequest)
    assert str(result.exception).endswith("ends in .svg, found replay.png")
    assert not picture.exists()


def test_a_picture_of_one_size_or_of_nothing_is_drawn() -> None:
    for shown in (ROWS[:3], []):
        ET.fromstring(to_svg([ReplayReport(TRACE, rows=shown)]))


def test_tiny_replays_a_made_trace() -> None:
    body = json.loads(run("--tiny", "--json"))
    assert body["trace"] == "made"
    assert {row["policy"] for row in body["rows"]} == {"lru", "ours", "min"}


def test_sizes_policies_and_the_trace_are_as_asked() -> None:
    body = json.loads(
        run("lmcache_agents", "--tiny", "--sizes", "0.1,0.3", "--policies", "arc, fifo", "--json")
    )
    assert body["trace"] == "lmcache_agents"
    found = [(row["size"], row["policy"]) for row in body["rows"]]
    assert found == [(0.1, "arc"), (0.1, "fifo"), (0.3, "arc"), (0.3, "fifo")]


def test_a_score_brings_what_it_needs() -> None:
    body = json.loads(run("--tiny", "--json", "--score", "--policies", "arc"))
    assert {row["policy"] for row in body["rows"]} == {"lru", "arc", "min"}
    assert body["scores"].keys() == {"arc"}


def test_several_traces_are_one_document_a_line() -> None:
    lines = run("lmcache_agents", "lmcache_agents", "--tiny", "--json", "--policies", "lru")
    assert [json.loads(line)["trace"] for line in lines.splitlines()] == ["lmcache_agents"] * 2


def test_tables_and_a_picture_are_written_too(tmp_path: Path) -> None:
    picture = tmp_path / "replay.svg"
    text = run("--tiny", "--ssd", "0.2", "--cost", "--hints", "--plot", str(picture))
    assert "made: 133 requests" in text
    assert "of it read again" in text
    ET.parse(picture)


def test_all_bundled_traces_are_replayed_unless_some_are_named() -> None:
    asked = Asked([], [0.5], ["fifo"])
    assert [report.trace.name for report in asked.reports(lambda line: None)] == [
        "lmcache_agents",
        "mooncake_conversation",
    ]


def test_lists_are_read_as_they_are_typed() -> None:
    assert numbers("0.01,0.2,") == [0.01, 0.2]
    assert names(" lru ,ours,") == ["lru", "ours"]
    with pytest.raises(InvalidRequest, match="not sizes"):
        numbers("1%")
