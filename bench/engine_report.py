"""What `bench engine` found: a row for each way back, and every turn behind it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from blobstore.bench.engine import Turn
from blobstore.bench.pairs import Pairs
from blobstore.bench.report import Report, Row, Setting, bound_row, format_value
from blobstore.units import format_size


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn, and the same turn computed cold."""

    request: str
    way: str
    prefix_tokens: int
    turn: Turn
    cold: Turn
    alone_s: tuple[float, ...] = ()
    """What `sooner` goes by where it is not the cold turn: the same prefix computed by the runner
    that rebuilt it, or, where two ways work at once, restored by each alone."""

    @property
    def equal(self) -> bool:
        """Whether it gave the cold turn's tokens, and left the same bytes."""
        return (self.turn.tokens, self.turn.state) == (self.cold.tokens, self.cold.state)

    @property
    def sooner(self) -> float:
        """How many times sooner the prefix was there than cold, or than the least of `alone_s`."""
        return min(self.alone_s or (self.cold.restore_s,)) / self.turn.restore_s

    def as_json(self) -> dict[str, Any]:
        """As plain values, without the tokens."""
        turn = self.turn
        return {
            "request": self.request,
            "way": self.way,
            "prompt_tokens": turn.prompt_tokens,
            "prefix_tokens": self.prefix_tokens,
            "restore_s": turn.restore_s,
            "ttft_s": turn.first_token_s,
            "bytes": turn.restored_bytes,
            "served": turn.served,
            "alone_s": self.alone_s,
            "tokens_equal": self.equal,
        }


@dataclass(frozen=True, slots=True)
class EngineRow(Row):
    """One way back: medians over its turns.

    `ratio` is what has to reach `least`: `speedup`, or how much sooner the prefix is there than
    the same runner computes it, or than by the faster of two ways alone.
    """

    restore_s: float = 0.0
    """Until the prefix's keys and values are in the runner."""
    ttft_s: float = 0.0
    """Until the first new token."""
    speedup: float = 0.0
    """The cold prefill of the same prefix ÷ `restore_s`."""
    ttft_speedup: float = 0.0
    bytes: int = 0
    """Of the prefix."""
    prefix_tokens: int = 0
    tokens_equal: bool = True
    """Every turn gave the tokens of its cold run, and left the same bytes."""

    @property
    def met(self) -> bool:
        """Whether the ratio reaches what it has to, with the right tokens."""
        return self.ratio >= self.least and self.tokens_equal


ESTIMATE_ERROR_MAX = 0.25
"""Of what a fetch or a rebuild is estimated to take, in the median."""

_LIMITS = ("cold prefill of the prefix", "cold prefill by its runner", "the faster way alone")


def row(samples: Sequence[Sample], least: float) -> EngineRow:
    """The row of the turns of one way."""
    turns, colds = [s.turn for s in samples], [s.cold for s in samples]
    restores = tuple(turn.restore_s for turn in turns)
    limits = tuple(min(s.alone_s or (s.cold.restore_s,)) for s in samples)
    pairs = Pairs(restores, limits, tuple(s.sooner for s in samples))
    nbytes = int(statistics.median(turn.restored_bytes for turn in turns))
    way = samples[0].way
    return EngineRow(
        name=f"engine.{way}",
        value=pairs.median_s,
        unit="s",
        limit=pairs.limit_median_s,
        limit_name=_LIMITS[len(samples[0].alone_s)],
        ratio=pairs.ratio,
        working_set_bytes=nbytes,
        cold=way != "dram",
        sync="none",
        n=len(samples),
        median_s=pairs.median_s,
        p99_s=pairs.p99_s,
        spread=pairs.spread,
        least=least,
        restore_s=pairs.median_s,
        ttft_s=statistics.median(turn.first_token_s for turn in turns),
        speedup=_median_ratio([turn.restore_s for turn in turns], [c.restore_s for c in colds]),
        ttft_speedup=_median_ratio(
            [turn.first_token_s for turn in turns], [c.first_token_s for c in colds]
        ),
        bytes=nbytes,
        prefix_tokens=int(statistics.median(s.prefix_tokens for s in samples)),
        tokens_equal=all(s.equal for s in samples),
    )


def _median_ratio(measured: Sequence[float], limit: Sequence[float]) -> float:
    return statistics.median(best / own for own, best in zip(measured, limit, strict=True))


@dataclass(slots=True)
class EngineReport(Report):
    """The rows of one run, all turns that they come from, and what the daemon estimated."""

    samples: list[Sample] = field(default_factory=list)
    estimates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """As of the daemon's stats, since it was last started."""

    def to_json(self) -> str:
        """The JSON of any report, and `turns` and `estimates`."""
        turns = [sample.as_json() for sample in self.samples]
        more = {"turns": turns, "estimates": dict(self.estimates)}
        return json.dumps(json.loads(Report.to_json(self)) | more, indent=2)

    def print(self, console: Console) -> None:
        """Show the machine and the rows."""
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        console.print(facts, style="dim", highlight=False)
        console.print(_table(self.rows))


def estimate_rows(estimates: Mapping[str, Any], *, wanted: bool) -> Iterator[Row]:
    """By how much what was estimated is off in the median, as a share; where that is known."""
    for what, told in estimates.items():
        error = told.get("error")
        if error is not None:
            bounds = ESTIMATE_ERROR_MAX, [error], Setting(0)
            found = bound_row(f"engine.estimate_{what}", error, "ratio", *bounds)
            yield found if wanted else replace(found, least=0.0)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        caption="prefix: restored instead of computed; ratio: what has to reach `at least`; medians"
    )
    table.add_column("way")
    for column in ("prefix", "bytes", "restore", "sooner", "first token", "sooner", "ratio"):
        table.add_column(column, justify="right")
    for column in ("at least", "of", "tokens", "n"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.name,
            *(_engine_cells(row) if isinstance(row, EngineRow) else [""] * 6),
            f"{row.ratio:.2f}",
            f"{row.least:g}" if row.least else "",
            row.limit_name,
            ("equal" if row.tokens_equal else "DIFFER") if isinstance(row, EngineRow) else "",
            str(row.n),
            style=None if row.met else "red",
        )
    return table


def _engine_cells(row: EngineRow) -> list[str]:
    return [
        str(row.prefix_tokens),
        format_size(row.bytes),
        format_value(row.restore_s, "s"),
        f"{row.speedup:.1f} x",
        format_value(row.ttft_s, "s"),
        f"{row.ttft_speedup:.1f} x",
    ]
