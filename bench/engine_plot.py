"""`bench engine` as a picture: how long each way takes, on a logarithmic scale, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from blobstore.bench.engine_report import EngineRow
from blobstore.bench.report import Row, format_value

_BAR, _GROUP, _TOP, _LEFT, _LENGTH, _WIDTH = 16, 52, 56, 130, 520, 960
_COLOURS = {"restore": "#3a7", "first token": "#36c"}


def to_svg(rows: Sequence[Row]) -> str:
    """The picture: two bars for each way, until the prefix is there and to the first token."""
    ways = [row for row in rows if isinstance(row, EngineRow)]
    scale = _Scale([seconds for row in ways for seconds in (row.restore_s, row.ttft_s)])
    bottom = _TOP + _GROUP * len(ways)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 40}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{bottom + 40}" fill="white"/>',
    ]
    for number, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 140 * number
        lines.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="27">{name}</text>')
    for tick in scale.ticks():
        x = _LEFT + scale.length(tick)
        lines.append(f'<path d="M{x} {_TOP - 8}V{bottom}" stroke="#ddd"/>')
        label = escape(format_value(tick, "s"))
        lines.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for number, row in enumerate(ways):
        lines += _group(row, _TOP + _GROUP * number, scale)
    return "\n".join([*lines, "</svg>", ""])


class _Scale:
    """Seconds to pixels, over whole powers of ten."""

    def __init__(self, seconds: Sequence[float]) -> None:
        positive = [value for value in seconds if value > 0] or [1.0]
        self._low = math.floor(math.log10(min(positive)))
        self._high = max(math.ceil(math.log10(max(positive))), self._low + 1)

    def length(self, seconds: float) -> int:
        share = (math.log10(max(seconds, 10.0**self._low)) - self._low) / (self._high - self._low)
        return round(_LENGTH * share)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self._low, self._high + 1)]


def _group(row: EngineRow, top: int, scale: _Scale) -> Iterator[str]:
    name = row.name.removeprefix("engine.") + ("" if row.tokens_equal else " (other tokens!)")
    yield f'<text x="{_LEFT - 8}" y="{top + 20}" text-anchor="end">{escape(name)}</text>'
    figures = (row.restore_s, row.speedup), (row.ttft_s, row.ttft_speedup)
    for number, ((seconds, times), colour) in enumerate(
        zip(figures, _COLOURS.values(), strict=True)
    ):
        y, length = top + number * (_BAR + 2), scale.length(seconds)
        yield f'<rect x="{_LEFT}" y="{y}" width="{length}" height="{_BAR}" fill="{colour}"/>'
        label = f"{format_value(seconds, 's')}, {times:.3g} x as soon as cold"
        yield f'<text x="{_LEFT + length + 8}" y="{y + 13}">{escape(label)}</text>'
