"""A report as a picture: one bar per row, its ratio against the limit, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from blobstore.bench.report import Row, format_value

_ROW, _LEFT, _BAR, _WIDTH = 28, 210, 420, 960
_SHOWN_MAX = 1.5
"""Ratios beyond this are cut: a bar shows how near the limit is, not how far beyond."""


def to_svg(rows: Sequence[Row]) -> str:
    """The picture; a tick on a bar is what the ratio has to reach."""
    height = _ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_x(1.0)}" y="18" text-anchor="middle">1 = the limit</text>',
    ]
    for number, row in enumerate(rows):
        lines += _bar(row, _ROW * (number + 1))
    bottom = _ROW * (len(rows) + 1)
    lines.append(f'<path d="M{_x(1.0)} 24V{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    return "\n".join([*lines, "</svg>", ""])


def _bar(row: Row, top: int) -> Iterator[str]:
    middle = top + _ROW // 2 + 4
    colour = "#3a7" if row.met else "#c44"
    value, limit = format_value(row.value, row.unit), format_value(row.limit, row.unit)
    yield f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{escape(row.name)}</text>'
    yield (
        f'<rect x="{_LEFT}" y="{top + 4}" width="{_x(row.ratio) - _LEFT}" height="{_ROW - 8}" '
        f'fill="{colour}"><title>{escape(row.limit_name)}</title></rect>'
    )
    if row.least:
        yield f'<path d="M{_x(row.least)} {top + 1}v{_ROW - 2}" stroke="#333" stroke-width="2"/>'
    yield (
        f'<text x="{_LEFT + _BAR + 8}" y="{middle}">{row.ratio:.2f}: '
        f"{escape(value)} of {escape(limit)}</text>"
    )


def _x(ratio: float) -> int:
    return _LEFT + round(_BAR * min(max(ratio, 0.0), _SHOWN_MAX) / _SHOWN_MAX)
