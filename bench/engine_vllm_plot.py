"""`bench engine --runner vllm` as a picture: how long each way takes to the first token, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from blobstore.bench.engine_vllm_report import VllmRow
from blobstore.bench.report import Row, format_value

_ROW, _LEFT, _LENGTH, _WIDTH, _TOP = 28, 190, 500, 960, 40


def to_svg(rows: Sequence[Row]) -> str:
    """The picture: a bar for each way, and the share of a cold start where it has to end."""
    ways = _ways(rows)
    longest_s = max((row.ttft_s for row in ways), default=1.0)
    height = _TOP + _ROW * (len(ways) + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22">Seconds to the first token</text>',
    ]
    for number, row in enumerate(ways):
        lines += _bar(row, _TOP + _ROW * number, longest_s)
    return "\n".join([*lines, "</svg>", ""])


def _ways(rows: Sequence[Row]) -> list[VllmRow]:
    """Each once: a row beside another way has the figures of its own."""
    found = [row for row in rows if isinstance(row, VllmRow) and row.ttft_s]
    return [row for row in found if "_beside_" not in row.name]


def _bar(row: VllmRow, top: int, longest_s: float) -> Iterator[str]:
    middle, length = top + _ROW // 2 + 4, round(_LENGTH * row.ttft_s / longest_s)
    name = row.name.removeprefix("vllm.") + ("" if row.tokens_equal else " (other tokens!)")
    yield f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>'
    yield (
        f'<rect x="{_LEFT}" y="{top + 4}" width="{length}" height="{_ROW - 8}" '
        f'fill="{"#3a7" if row.met else "#c44"}"/>'
    )
    if row.least:
        end = _LEFT + round(_LENGTH * row.limit / row.least / longest_s)
        yield f'<path d="M{end} {top + 1}v{_ROW - 2}" stroke="#333" stroke-width="2"/>'
    label = f"{format_value(row.ttft_s, 's')}, {row.of_cold:.2f} of cold"
    yield f'<text x="{_LEFT + length + 8}" y="{middle}">{escape(label)}</text>'
