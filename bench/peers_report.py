"""What `bench peers` found: a row beside every contestant, and what follows from the rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from blobstore.bench.report import Report, Row, Unit

OURS = "blobstore"


@dataclass(frozen=True, slots=True)
class PeerRow(Row):
    """A figure of ours beside those of the contestants that have it, all in `unit`.

    `limit` is the figure of the one that it is measured against, `limit_name`. `least`
    is 0 where none of those that count is here.
    """

    peers: Mapping[str, float] = field(default_factory=dict)
    claim: str = ""
    absent: tuple[str, ...] = ()
    """Those that the claim is about and that did not take part."""

    def as_json(self) -> dict[str, Any]:
        """The fields of every row, and those of these rows."""
        # By name: `super()` does not find its class in one with slots.
        return Row.as_json(self) | {"wanted": self.least, "met": self.met}

    def times(self, peer: str) -> float:
        """How many times as good as this peer's figure ours is."""
        theirs = self.peers[peer]
        return theirs / self.value if self.unit == "s" else self.value / theirs


@dataclass(slots=True)
class PeersReport(Report):
    """The rows of one run, what each contestant did, and who was not here and why."""

    how: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    asides: tuple[str, ...] = ()
    """Contestants that no claim is about."""

    def verdict(self) -> list[str]:
        """A line for each claim, and one for each contestant that no claim is about."""
        claims = dict.fromkeys(row.claim for row in self._peer_rows())
        lines = [self._judge(claim) for claim in claims]
        return lines + [line for name in self.asides for line in self._aside(name)]

    def to_json(self) -> str:
        """The JSON of any report, and `how`, `skipped` and `verdict`."""
        more = {"how": self.how, "skipped": self.skipped, "verdict": self.verdict()}
        return json.dumps(json.loads(Report.to_json(self)) | more, indent=2)

    def print(self, console: Console) -> None:
        """Show machine, table, what was measured, who is missing, and the verdict."""
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        console.print(facts, style="dim", highlight=False)
        console.print(_table(list(self._peer_rows()), list(self.how)))
        for name, how in self.how.items():
            console.print(f"{name}: {how}", style="dim", markup=False)
        for name, line in self.skipped.items():
            console.print(f"{name} was skipped: {line}", markup=False)
        for line in self.verdict():
            console.print(line, markup=False)

    def _peer_rows(self) -> Iterator[PeerRow]:
        return (row for row in self.rows if isinstance(row, PeerRow))

    def _judge(self, claim: str) -> str:
        rows = [row for row in self._peer_rows() if row.claim == claim]
        figures = ", ".join(f"{row.name} {_times(row.ratio)} {row.limit_name}" for row in rows)
        absent = ", ".join(dict.fromkeys(name for row in rows for name in row.absent))
        without = f" without {absent}" if absent else ""
        if not all(row.least for row in rows):
            return f"{claim}: not judged{without} ({figures})"
        return f"{claim}: {'yes' if all(row.met for row in rows) else 'NO'}{without} ({figures})"

    def _aside(self, name: str) -> Iterator[str]:
        rows = [row for row in self._peer_rows() if name in row.peers]
        if rows:
            figures = ", ".join(f"{row.name} {_times(row.times(name))}" for row in rows)
            yield f"beside {name}, for comparison only: {figures}"


def show(value: float, unit: Unit) -> str:
    """`value` without its unit, in the scale that `scale_name` tells."""
    if math.isnan(value):
        return ""
    scaled = value / 1e9 if unit == "B/s" else value * 1e6
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.2f}"


def scale_name(unit: Unit) -> str:
    """The scale that `show` uses."""
    return "GB/s" if unit == "B/s" else "µs"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} x" if ratio >= 100 else f"{ratio:.2f} x"


def _table(rows: Sequence[PeerRow], contestants: Sequence[str]) -> Table:
    others = [name for name in contestants if name != OURS]
    seen = dict.fromkeys(name for row in rows for name in row.peers)
    others += [name for name in seen if name not in others]
    table = Table(
        caption="ratio: ours against the one named, median over rounds in which all took turns, "
        "more is better; a lease moves no bytes: its rate is of bytes made readable in place"
    )
    table.add_column("row")
    for column in ("ours", *others, "", "ratio", "wanted", "n", "spread"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_column("against")
    for row in rows:
        table.add_row(
            row.name,
            show(row.value, row.unit),
            *(show(row.peers.get(name, math.nan), row.unit) for name in others),
            scale_name(row.unit),
            f"{row.ratio:.2f}",
            f"{row.least:g}" if row.least else "",
            str(row.n),
            f"{row.spread:.0%}",
            row.limit_name,
            style=None if row.met else "red",
        )
    return table
