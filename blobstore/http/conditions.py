"""Range, ETag and conditional requests of RFC 9110, as far as immutable blobs need them.

Several ranges in one request, other units and malformed headers are ignored, which the
RFC allows: the whole blob is then the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_RANGE = re.compile(r"bytes[ \t]*=[ \t]*([0-9]*)[ \t]*-[ \t]*([0-9]*)[ \t]*", re.IGNORECASE)
_TAG = re.compile(r'(W/)?("[\x21\x23-\x7e\x80-\xff]*")')
_DIGITS_MAX = 20
"""Above all sizes there are; longer numbers are as good as this one."""

Span = tuple[int, int]
"""First byte, and the one after the last."""


class Unsatisfiable(Exception):
    """A well-formed range that no byte of the blob lies in."""


def etag_of(digest: bytes) -> str:
    """The strong tag of a blob: its digest."""
    return f'"{digest.hex()}"'


def span_of(headers: Mapping[str, str], etag: str, nbytes: int) -> Span | None:
    """The part asked for of a blob of `nbytes`, or None for all of it.

    A range whose If-Range names another blob is ignored. Raises Unsatisfiable.
    """
    wanted = headers.get("Range")
    if wanted is None or headers.get("If-Range", etag) != etag:
        return None
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return _suffix(_number(last), nbytes)
    start, end = _number(first), _number(last) if last else nbytes - 1
    if last and end < start:
        return None
    if start >= nbytes:
        raise Unsatisfiable
    return start, min(end + 1, nbytes)


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """If-None-Match names this blob, so that the caller has it (304)."""
    return _names(headers.get("If-None-Match"), etag, weakly=True)


def is_refused(headers: Mapping[str, str], etag: str | None) -> bool:
    """If-Match asks for another blob than the one with `etag` (None: none is held) (412)."""
    asked = headers.get("If-Match")
    return asked is not None and (etag is None or not _names(asked, etag, weakly=False))


def must_be_new(headers: Mapping[str, str]) -> bool:
    """If-None-Match is `*`: a put may only create (412)."""
    return headers.get("If-None-Match", "").strip() == "*"


def _suffix(length: int, nbytes: int) -> Span:
    if not length or not nbytes:
        raise Unsatisfiable
    return max(nbytes - length, 0), nbytes


def _number(digits: str) -> int:
    return int(digits.lstrip("0")[:_DIGITS_MAX] or "0")


def _names(header: str | None, etag: str, *, weakly: bool) -> bool:
    if header is None:
        return False
    if header.strip() == "*":
        return True
    return any(tag == etag and (weakly or not weak) for weak, tag in _TAG.findall(header))
