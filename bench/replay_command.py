"""What `blobstore bench replay` was asked for, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from blobstore.bench.replay import MIN, SIZES, ReplayRow, ReplaySettings, replay
from blobstore.bench.replay_live import LIVE_S, live_head, live_rows
from blobstore.bench.replay_report import BASE, ReplayReport
from blobstore.bench.trace import Trace, bundled_traces, load_trace, made_trace
from blobstore.errors import InvalidRequest

POLICIES = (BASE, "ours", MIN)

_TINY_SIZES = (0.05, 0.2)
_TINY_REQUESTS = 300
_TINY_LIVE_S = 0.5


@dataclass(frozen=True, slots=True)
class Asked:
    """What to replay: traces, sizes and policies (the usual ones where none are named), and how.

    `score` adds the rows that scores need. With a `live_directory` the head of each trace is
    replayed, and against daemons there too.
    """

    traces: Sequence[str]
    sizes: Sequence[float] = ()
    policies: Sequence[str] = ()
    settings: ReplaySettings = field(default_factory=ReplaySettings)
    tiny: bool = False
    score: bool = False
    live_directory: Path | None = None

    def reports(self, say: Callable[[str], None]) -> Iterator[ReplayReport]:
        """One trace after the other; `say` hears of each row."""
        for trace in self._traces():
            report = ReplayReport(trace, self.settings.ssd_size is not None)
            for row in self._rows(trace):
                say(f"{trace.name} {row.size:g} {row.policy}: {row.token_hit_ratio:.4f}")
                report.rows.append(row)
            yield report

    def _rows(self, trace: Trace) -> Iterator[ReplayRow]:
        policies, sizes = self._policies(), self._sizes()
        yield from replay(trace, policies, sizes, self.settings)
        if self.live_directory is not None:
            seconds = _TINY_LIVE_S if self.tiny else LIVE_S
            yield from live_rows(
                trace, policies, sizes, self.settings, self.live_directory, seconds=seconds
            )

    def _traces(self) -> Iterator[Trace]:
        if self.tiny and not self.traces:
            yield made_trace()
        for name in self.traces or (() if self.tiny else bundled_traces()):
            trace = load_trace(name)
            if self.live_directory is not None:
                trace = live_head(trace)
            yield trace.head(_TINY_REQUESTS) if self.tiny else trace

    def _sizes(self) -> Sequence[float]:
        return self.sizes or (_TINY_SIZES if self.tiny else SIZES)

    def _policies(self) -> Sequence[str]:
        policies = list(dict.fromkeys(self.policies or POLICIES))
        if self.score:
            policies = [BASE, *(name for name in policies if name not in (BASE, MIN)), MIN]
        return policies


def show(reports: Sequence[ReplayReport], console: Console, *, as_json: bool, score: bool) -> None:
    """All of it; as JSON one document a line if there are several."""
    for report in reports:
        if as_json:
            indent = None if len(reports) > 1 else 2
            console.file.write(json.dumps(report.as_json(score=score), indent=indent) + "\n")
        else:
            report.print(console, score=score)


def numbers(text: str) -> list[float]:
    """What was typed as a list of sizes. Raises InvalidRequest."""
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise InvalidRequest(f"not sizes: {text!r} (an example: 0.01,0.02)") from None


def names(text: str) -> list[str]:
    """What was typed as a list of names."""
    return [part.strip() for part in text.split(",") if part.strip()]
