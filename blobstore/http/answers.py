"""What the door answers: JSON, and every error as a status, a code and a message.

The codes are those of `blobstore.errors`; a few more name what only HTTP has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from blobstore import errors

_encode = msgspec.json.encode

STATUS: tuple[tuple[type[errors.BlobStoreError], int], ...] = (
    (errors.UnknownNamespace, 404),
    (errors.InvalidRequest, 400),
    (errors.DeadlineExceeded, 504),
    (errors.Full, 507),
    (errors.Retryable, 503),
)
"""The first class that fits decides; all other errors are 500."""

INTERNAL = "internal error: see the daemon's log"


class Refusal(Exception):
    """An answer other than success that only this door gives."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float = 0.0,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.retry_after_s = retry_after_s
        self.facts = facts


def answer(body: object, status: int = 200) -> web.Response:
    """`body` as a line of JSON."""
    return web.Response(
        body=_encode(body) + b"\n", status=status, content_type="application/json", headers=_SAFE
    )


def answer_list(name: str, slices: Sequence[bytes], **more: object) -> web.Response:
    """`{name: […], …}`, its items in slices that were encoded one by one."""
    items = b",".join(inner for encoded in slices if (inner := encoded[1:-1]))
    return answer({name: msgspec.Raw(b"[%s]" % items), **more})


def encoded(items: list[Any]) -> bytes:
    """A slice for `answer_list`."""
    return _encode(items)


def miss(reason: str) -> Refusal:
    """A blob that is not held, or not to be had now: never an error inside."""
    return Refusal(
        404, "miss", f"the blob is not to be had: {reason}",
        headers={"X-Blobstore-Reason": reason}, reason=reason,
    )  # fmt: skip


def refusal(error: Refusal) -> web.Response:
    """The answer that `error` is."""
    headers = dict(error.headers)
    if error.status == 503:
        headers.setdefault("Retry-After", _whole_seconds(error.retry_after_s))
    return _failed(error.status, error.code, str(error), error.retry_after_s, headers, error.facts)


def failure(error: errors.BlobStoreError) -> web.Response:
    """The answer to a request that raised `error`."""
    status = status_of(error)
    message = str(error) if status != 500 else INTERNAL
    retry_after_s = error.retry_after_s if isinstance(error, errors.Retryable) else 0.0
    headers = {"Retry-After": _whole_seconds(retry_after_s)} if status == 503 else {}
    return _failed(status, error.code, message, retry_after_s, headers, {})


def status_of(error: errors.BlobStoreError) -> int:
    """The status that says best what `error` is."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def broken() -> web.Response:
    """The answer when something failed that should not have: nothing of the inside."""
    return _failed(500, "error", INTERNAL, 0.0, {}, {})


def _failed(
    status: int,
    code: str,
    message: str,
    retry_after_s: float,
    headers: Mapping[str, str],
    facts: Mapping[str, object],
) -> web.Response:
    body = {"error": code, "message": message, "retry_after_s": retry_after_s, **facts}
    found = answer(body, status)
    found.headers.update(headers)
    return found


def _whole_seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))


_SAFE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
