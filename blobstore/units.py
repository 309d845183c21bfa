"""Sizes as people write them: `4GiB`, `4GB`, `4096`."""

from __future__ import annotations

import re

from blobstore.errors import InvalidRequest

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SCALE = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1 << (10 * n) for n, p in enumerate("kmgt", 1)},
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)},
}
# No size needs more digits, and Python's own limits would raise errors of another type.
_SIZE = re.compile(r"\s*(\d{1,24}(?:\.\d{1,24})?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`; a bare number is bytes, `4GiB` is not `4GB`.

    Raises InvalidRequest for anything else.
    """
    match = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    if match is None:
        raise InvalidRequest(f"not a size: {text!r} (examples: 4GiB, 500MB, 65536)")
    number, unit = match.groups()
    scale = _SCALE.get(unit.lower())
    if scale is None:
        raise InvalidRequest(
            f"unknown unit {unit!r} in {text!r} (use KiB MiB GiB TiB or KB MB GB TB)"
        )
    return int(float(number) * scale) if "." in number else int(number) * scale


def format_size(nbytes: float) -> str:
    """`nbytes` in the largest binary unit that keeps it at least 1, three digits."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
