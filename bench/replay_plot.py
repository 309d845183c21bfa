"""Replays as a picture: token hits over size, a line per policy, a panel per trace, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from blobstore.bench.replay import MIN, ReplayRow
from blobstore.bench.replay_report import ReplayReport

_WIDTH, _PANEL, _TOP, _LEFT, _HEIGHT, _LENGTH, _KEY = 960, 380, 40, 70, 280, 640, 740
_MARK = 24

_COLOURS = ("#c44", "#3a7", "#36c", "#c80", "#849", "#088", "#865", "#d5a", "#666", "#5a0")


def to_svg(reports: Sequence[ReplayReport]) -> str:
    """The picture. Sizes are on a logarithmic scale; the optimum is dashed."""
    height = _PANEL * len(reports)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, report in enumerate(reports):
        lines += _panel(report, _PANEL * number + _TOP)
    return "\n".join([*lines, "</svg>", ""])


def _panel(report: ReplayReport, top: int) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="{top - 14}" font-weight="bold">{escape(report.trace.name)}</text>'
    ticks = ticks_up_to(max((row.token_hit_ratio for row in report.rows), default=0.0) or 1.0)
    most = ticks[-1]
    sizes = sorted({row.size for row in report.rows})
    for tick in ticks:
        y = top + _HEIGHT - round(_HEIGHT * tick / most)
        yield f'<path d="M{_LEFT} {y}h{_LENGTH}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
    for size in sizes:
        x = _x(size, sizes)
        yield f'<text x="{x}" y="{top + _HEIGHT + 18}" text-anchor="middle">{size:.4g}</text>'
    policies = list(dict.fromkeys(row.policy for row in report.rows))
    for number, policy in enumerate(policies):
        rows = sorted((r for r in report.rows if r.policy == policy), key=lambda row: row.size)
        points = [
            (_x(row.size, sizes), top + _HEIGHT - round(_HEIGHT * row.token_hit_ratio / most))
            for row in rows
        ]
        colour = "black" if policy == MIN else _COLOURS[number % len(_COLOURS)]
        yield from _line(policy, rows, points, colour)
        y = top + 16 * number + 12
        stroke = _stroke(policy, colour)
        yield f'<path d="M{_KEY} {y - 4}h{_MARK}" stroke-width="2" {stroke}/>'
        yield f'<text x="{_KEY + _MARK + 8}" y="{y}">{escape(policy)}</text>'


def ticks_up_to(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`, which is above 0."""
    rough = most / 5
    decade = 10.0 ** math.floor(math.log10(rough))
    step = next(decade * part for part in (1, 2, 5, 10) if decade * part >= rough * (1 - 1e-9))
    n = math.ceil(most / step * (1 - 1e-9))
    return [round(step * number, 12) for number in range(n + 1)]


def _stroke(policy: str, colour: str) -> str:
    dashes = ' stroke-dasharray="5 4"' if policy == MIN else ""
    return f'stroke="{colour}"{dashes}'


def _line(
    policy: str, rows: Sequence[ReplayRow], points: Sequence[tuple[int, int]], colour: str
) -> Iterator[str]:
    path = "L".join(f"{x} {y}" for x, y in points)
    yield f'<path d="M{path}" fill="none" stroke-width="2" {_stroke(policy, colour)}/>'
    for row, (x, y) in zip(rows, points, strict=True):
        told = f"{policy} {row.size:g}: {row.token_hit_ratio:.4f}"
        title = f"<title>{escape(told)}</title>"
        yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{title}</circle>'


def _x(size: float, sizes: Sequence[float]) -> int:
    least, most = math.log(sizes[0]), math.log(sizes[-1])
    share = (math.log(size) - least) / (most - least) if most > least else 0.5
    return _LEFT + 20 + round((_LENGTH - 40) * share)
