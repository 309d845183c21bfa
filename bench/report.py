"""Rows of a benchmark, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from blobstore.bench.pairs import Pairs
from blobstore.units import format_size

Unit = Literal["B/s", "s", "1/s", "B", "share of a core", "ratio"]
Sync = Literal["none", "fdatasync"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its limit.

    `ratio` is value ÷ limit for rates and limit ÷ value for latencies and
    sizes, so that more is better; `least` is what it has to reach.
    """

    name: str
    value: float
    unit: Unit
    limit: float
    limit_name: str
    ratio: float
    working_set_bytes: int
    cold: bool
    sync: Sync
    n: int
    median_s: float
    p99_s: float
    spread: float
    least: float = 0.0

    @property
    def met(self) -> bool:
        """Whether the ratio reaches what it has to."""
        return self.ratio >= self.least

    def as_json(self) -> dict[str, Any]:
        """The row as the JSON output shows it."""
        fields = asdict(self)
        del fields["least"]
        return fields


@dataclass(frozen=True, slots=True)
class Setting:
    """What a row says of how it was measured."""

    working_set_bytes: int
    cold: bool = False
    sync: Sync = "none"
    least: float = 0.0


def rate_row(name: str, pairs: Pairs, nbytes: int, limit_name: str, setting: Setting) -> Row:
    """A row in bytes per second, of operations that moved `nbytes` each."""
    return _row(name, pairs, "B/s", nbytes, limit_name, setting)


def count_row(name: str, pairs: Pairs, count: int, limit_name: str, setting: Setting) -> Row:
    """A row in calls per second, of operations of `count` calls each."""
    return _row(name, pairs, "1/s", count, limit_name, setting)


def latency_row(name: str, pairs: Pairs, limit_name: str, setting: Setting) -> Row:
    """A row in seconds per operation."""
    return _row(name, pairs, "s", 0, limit_name, setting)


def bound_row(
    name: str, value: float, unit: Unit, bound: float, samples: Sequence[float], setting: Setting
) -> Row:
    """A row of a quantity that must stay below `bound`; `samples` are the single readings."""
    pairs = Pairs(tuple(samples), (bound,), (bound / max(value, 1e-9),))
    return Row(
        name=name,
        value=value,
        unit=unit,
        limit=bound,
        limit_name="bound",
        ratio=pairs.ratio,
        n=len(samples),
        median_s=pairs.median_s,
        p99_s=pairs.p99_s,
        spread=pairs.spread,
        working_set_bytes=setting.working_set_bytes,
        cold=setting.cold,
        sync=setting.sync,
        least=1.0,
    )


def _row(
    name: str, pairs: Pairs, unit: Unit, amount: int, limit_name: str, setting: Setting
) -> Row:
    return Row(
        name=name,
        value=amount / pairs.median_s if amount else pairs.median_s,
        unit=unit,
        limit=amount / pairs.limit_median_s if amount else pairs.limit_median_s,
        limit_name=limit_name,
        ratio=pairs.ratio,
        n=len(pairs.measured_s),
        median_s=pairs.median_s,
        p99_s=pairs.p99_s,
        spread=pairs.spread,
        working_set_bytes=setting.working_set_bytes,
        cold=setting.cold,
        sync=setting.sync,
        least=setting.least,
    )


@dataclass(slots=True)
class Report:
    """The rows of one run, and the machine that they were measured on."""

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Whether every row reaches what it has to."""
        return all(row.met for row in self.rows)

    def to_json(self) -> str:
        """`{"machine": …, "rows": […]}`."""
        rows = [row.as_json() for row in self.rows]
        return json.dumps({"machine": self.machine, "rows": rows}, indent=2)

    def print(self, console: Console) -> None:
        """Show the machine and the rows."""
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        console.print(facts, style="dim", highlight=False)
        console.print(_table(self.rows))


def _table(rows: Iterable[Row]) -> Table:
    table = Table(caption="ratio: 1 is the limit, more is better; median over pairs taken in turns")
    for column in ("row", "value", "limit", "ratio", "at least"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for column in ("limit is", "n", "p99", "spread", "working set", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            format_value(row.value, row.unit),
            format_value(row.limit, row.unit),
            f"{row.ratio:.2f}",
            f"{row.least:.2f}" if row.least else "",
            row.limit_name,
            str(row.n),
            format_value(row.p99_s, "s"),
            f"{row.spread:.0%}",
            format_size(row.working_set_bytes),
            f"{'cold' if row.cold else 'warm'}, sync {row.sync}",
            style=None if row.met else "red",
        )
    return table


def format_value(value: float, unit: Unit) -> str:
    """`value` with its unit; rates in powers of ten and of two."""
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s ({value / 2**30:.2f} GiB/s)"
    if unit == "B":
        return format_size(value)
    if unit == "1/s":
        return f"{value:,.0f}/s"
    if unit == "s":
        scale, name = next(
            ((s, n) for s, n in ((1.0, "s"), (1e-3, "ms")) if value >= s), (1e-6, "µs")
        )
        return f"{value / scale:.3g} {name}"
    return f"{value:.3g} {unit}"
