"""What `bench engine --runner vllm` found: a row for each way, and every answer behind it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from blobstore.bench.engine_vllm import Answer
from blobstore.bench.pairs import Pairs
from blobstore.bench.report import Report, Row, format_value


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer, and the same prompt computed by an engine without a connector."""

    prompt: int
    way: str
    answer: Answer
    cold: Answer
    own_s: float = 0.0
    """Until the first token out of the same engine's own cache, where that was asked for."""

    @property
    def equal(self) -> bool:
        """Whether it gave the cold one's tokens."""
        return self.answer.tokens == self.cold.tokens

    def as_json(self) -> dict[str, Any]:
        """As plain values, without the tokens."""
        return {
            "prompt": self.prompt,
            "way": self.way,
            "cached_tokens": self.answer.cached_tokens,
            "ttft_s": self.answer.first_token_s,
            "of_cold": self.answer.first_token_s / self.cold.first_token_s,
            "own_cache_s": self.own_s,
            "tokens_equal": self.equal,
        }


@dataclass(frozen=True, slots=True)
class VllmRow(Row):
    """One way, beside its limit. What `ratio` has to reach is `wanted`, too, in JSON."""

    ttft_s: float = 0.0
    """Until the first token, in the median; 0 where whole answers are measured."""
    of_cold: float = 0.0
    """`ttft_s` as a share of the cold one's."""
    cached_tokens: int = 0
    tokens_equal: bool = True
    """Every answer had the tokens of an engine without a connector."""

    @property
    def met(self) -> bool:
        """Whether the ratio reaches what it has to, with the right tokens."""
        return self.ratio >= self.least and self.tokens_equal

    def as_json(self) -> dict[str, Any]:
        """The row as the JSON output shows it."""
        return Row.as_json(self) | {"wanted": self.least}


def first_token_row(samples: Sequence[Sample], least: float) -> VllmRow:
    """How soon the first token came in one way, beside cold."""
    colds = [sample.cold.first_token_s for sample in samples]
    return _row(f"vllm.{samples[0].way}", samples, colds, "cold, without a connector", least)


def beside_row(
    name: str, ours: Sequence[Sample], theirs: Sequence[Sample], limit_name: str, least: float
) -> VllmRow:
    """The same beside another way of the same prompts, as if both engines were equally fast.

    Two processes of one engine differ by a tenth in how fast they compute, for as long as they
    live: each is measured by its own cache.
    """
    assert [sample.prompt for sample in ours] == [sample.prompt for sample in theirs]
    limits = [
        their.answer.first_token_s * our.own_s / their.own_s
        for our, their in zip(ours, theirs, strict=True)
    ]
    return _row(name, ours, limits, limit_name, least)


def throughput_row(
    name: str, pairs: Pairs, limit_name: str, least: float, *, tokens_equal: bool
) -> VllmRow:
    """How long prompts that nothing begins like took, beside them in the way `limit_name`."""
    return VllmRow(
        name=name,
        limit_name=limit_name,
        ratio=pairs.ratio,
        least=least,
        tokens_equal=tokens_equal,
        **_figures(pairs),
    )


def _row(
    name: str, samples: Sequence[Sample], limits: Sequence[float], limit_name: str, least: float
) -> VllmRow:
    taken = tuple(sample.answer.first_token_s for sample in samples)
    ratios = tuple(limit / own for own, limit in zip(taken, limits, strict=True))
    pairs = Pairs(taken, tuple(limits), ratios)
    shares = (sample.answer.first_token_s / sample.cold.first_token_s for sample in samples)
    return VllmRow(
        name=name,
        limit_name=limit_name,
        ratio=pairs.ratio,
        least=least,
        ttft_s=pairs.median_s,
        of_cold=statistics.median(shares),
        cached_tokens=int(statistics.median(sample.answer.cached_tokens for sample in samples)),
        tokens_equal=all(sample.equal for sample in samples),
        **_figures(pairs),
    )


def _figures(pairs: Pairs) -> dict[str, Any]:
    return {
        "value": pairs.median_s,
        "unit": "s",
        "limit": pairs.limit_median_s,
        "working_set_bytes": 0,
        "cold": False,
        "sync": "none",
        "n": len(pairs.measured_s),
        "median_s": pairs.median_s,
        "p99_s": pairs.p99_s,
        "spread": pairs.spread,
    }


@dataclass(slots=True)
class VllmReport(Report):
    """The rows of one run, and all answers that those of first tokens come from."""

    samples: list[Sample] = field(default_factory=list)

    def to_json(self) -> str:
        """The JSON of any report, and `turns`."""
        turns = [sample.as_json() for sample in self.samples]
        return json.dumps(json.loads(Report.to_json(self)) | {"turns": turns}, indent=2)

    def print(self, console: Console) -> None:
        """Show the machine and the rows."""
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        console.print(facts, style="dim", highlight=False)
        console.print(_table(self.rows))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(caption="ratio: how many times sooner than the limit; medians over pairs")
    table.add_column("way")
    for column in ("takes", "of cold", "tokens cached", "limit", "ratio", "at least"):
        table.add_column(column, justify="right")
    for column in ("limit is", "tokens", "n"):
        table.add_column(column)
    for row in rows:
        assert isinstance(row, VllmRow)
        table.add_row(
            row.name,
            format_value(row.value, "s"),
            f"{row.of_cold:.2f}" if row.ttft_s else "",
            str(row.cached_tokens) if row.ttft_s else "",
            format_value(row.limit, "s"),
            f"{row.ratio:.2f}",
            f"{row.least:g}" if row.least else "",
            row.limit_name,
            "equal" if row.tokens_equal else "DIFFER",
            str(row.n),
            style=None if row.met else "red",
        )
    return table
