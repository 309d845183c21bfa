"""What `bench peers` found as a picture: for each row, a bar per contestant, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from blobstore.bench.peers_report import OURS, PeerRow, scale_name, show
from blobstore.bench.report import Row

_BAR, _GAP, _LEFT, _LENGTH, _WIDTH = 18, 34, 150, 560, 960
_DECADE = 1
"""A bar is cut off a decade below the smallest figure of its row: scales are logarithmic,
as a lease is three decades faster than a copy."""


def to_svg(rows: Sequence[Row]) -> str:
    """The picture. Longer is better in all rows: latencies are drawn as calls per second."""
    groups = [row for row in rows if isinstance(row, PeerRow)]
    height = sum(_height(row) for row in groups) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" fill="#666">longer is better; logarithmic</text>',
    ]
    top = _GAP
    for row in groups:
        lines += _group(row, top)
        top += _height(row)
    return "\n".join([*lines, "</svg>", ""])


def _height(row: PeerRow) -> int:
    return _GAP + _BAR * (1 + len(row.peers))


def _group(row: PeerRow, top: int) -> Iterator[str]:
    figures = {OURS: row.value, **row.peers}
    goodness = {
        name: math.log10(1 / value if row.unit == "s" else value) for name, value in figures.items()
    }
    least, most = min(goodness.values()) - _DECADE, max(goodness.values())
    wanted = f", wanted {row.least:g} x" if row.least else ""
    yield (
        f'<text x="{_LEFT}" y="{top + 12}" font-weight="bold">{escape(row.name)}: '
        f"{row.ratio:.1f} x {escape(row.limit_name)}{wanted}</text>"
    )
    for number, (name, value) in enumerate(figures.items(), 1):
        y = top + _BAR * number
        length = round(_LENGTH * (goodness[name] - least) / (most - least))
        colour = "#999" if name != OURS else "#3a7" if row.met else "#c44"
        yield f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
        yield (
            f'<rect x="{_LEFT}" y="{y + 2}" width="{length}" height="{_BAR - 4}" fill="{colour}">'
            f"<title>{escape(row.claim)}</title></rect>"
        )
        yield (
            f'<text x="{_LEFT + length + 6}" y="{y + 13}">{show(value, row.unit)} '
            f"{scale_name(row.unit)}</text>"
        )
