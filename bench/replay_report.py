"""What a replay found: rows as JSON and as a table, and one number per policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from blobstore.bench.replay import MIN, ReplayRow
from blobstore.bench.trace import Trace

BASE = "lru"

_SCORED_MIN, _SCORED_MAX = 0.2, 0.95
"""Share of the optimum that LRU reaches: below it nothing helps, above it nothing is needed."""


@dataclass(slots=True)
class ReplayReport:
    """The rows of one trace; with the figures of an SSD if there was one."""

    trace: Trace
    with_ssd: bool = False
    rows: list[ReplayRow] = field(default_factory=list)

    def as_json(self, *, score: bool = False) -> dict[str, Any]:
        """`{"trace": …, "rows": […]}`, with `scores` if so asked: share of the gap closed."""
        rows = [asdict(row) for row in self.rows]
        if not self.with_ssd:
            for row in rows:
                del row["ssd_bytes_read_again"]
        scores = {"scores": scores_of(self.rows)} if score else {}
        return {"trace": self.trace.name, "rows": rows, **scores}

    def print(self, console: Console, *, score: bool = False) -> None:
        """Show the rows, and the scores if so asked."""
        trace = self.trace
        console.print(
            f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} tokens, "
            f"{trace.n_blocks:,} distinct blocks of {trace.block_tokens} tokens",
            style="dim",
        )
        console.print(_table(self.rows, with_ssd=self.with_ssd))
        if score:
            _print_scores(self.rows, console)


def scores_of(rows: Iterable[ReplayRow]) -> dict[str, float | None]:
    """For each policy the mean share of the gap from LRU to the optimum that it closes.

    Over the sizes at which LRU reaches between 0.2 and 0.95 of the optimum; None if at
    none of those asked for it does, or a row that it takes is missing.
    """
    ratios = {(row.policy, row.size): row.token_hit_ratio for row in rows}
    policies = dict.fromkeys(policy for policy, _ in ratios if policy not in (BASE, MIN))
    return {policy: _score(policy, ratios) for policy in policies}


def scored_sizes(ratios: dict[tuple[str, float], float]) -> list[float]:
    """The sizes that count: where memory is tight, but not hopelessly so."""
    sizes = []
    for size in dict.fromkeys(size for _, size in ratios):
        base, best = ratios.get((BASE, size)), ratios.get((MIN, size))
        if base is not None and best and _SCORED_MIN <= base / best <= _SCORED_MAX:
            sizes.append(size)
    return sizes


def _score(policy: str, ratios: dict[tuple[str, float], float]) -> float | None:
    shares = [
        (ratios[policy, size] - ratios[BASE, size]) / (ratios[MIN, size] - ratios[BASE, size])
        for size in scored_sizes(ratios)
        if (policy, size) in ratios
    ]
    return mean(shares) if shares else None


def _print_scores(rows: Sequence[ReplayRow], console: Console) -> None:
    scores = scores_of(rows)
    if not scores:
        console.print(f"nothing to compare: name another policy than {BASE}")
        return
    ratios = {(row.policy, row.size): row.token_hit_ratio for row in rows}
    sizes = ", ".join(f"{size:g}" for size in scored_sizes(ratios)) or "none"
    console.print(f"share of the gap from {BASE} to {MIN} that is closed, at {sizes}:")
    for policy, score in scores.items():
        worst = min(
            ratio - ratios[BASE, size]
            for (name, size), ratio in ratios.items()
            if name == policy and (BASE, size) in ratios
        )
        shown = "-" if score is None else f"{score:.3f}"
        console.print(f"  {policy}: {shown}   (against {BASE} at worst {worst:+.4f})")


def _table(rows: Iterable[ReplayRow], *, with_ssd: bool) -> Table:
    table = Table(caption="size: share of the distinct blocks; hits and cost saved: share of all")
    columns = ["size", "policy", "token hits", "cost saved", "µs each evicted", "training s"]
    if with_ssd:
        columns += ["written to SSD", "of it read again"]
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    size = None
    for row in rows:
        cells = [f"{row.size:g}" if row.size != size else "", row.policy]
        cells += [f"{row.token_hit_ratio:.4f}", f"{row.cost_saved:.4f}"]
        us_each = "" if row.us_per_decision is None else f"{row.us_per_decision:.1f}"
        cells += [us_each, f"{row.train_s:.1f}"]
        if with_ssd:
            read_again = row.ssd_bytes_read_again / max(1, row.ssd_bytes_written)
            cells += [f"{row.ssd_bytes_written:,}", f"{read_again:.0%}"]
        table.add_section() if row.size != size and size is not None else None
        table.add_row(*cells)
        size = row.size
    return table
