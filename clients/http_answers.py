"""What a daemon's answers over HTTP mean: bodies of success, and errors by status and code."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from blobstore.clients.http_exchange import Exchange
from blobstore.errors import (
    BY_CODE,
    BlobStoreError,
    DeadlineExceeded,
    Full,
    InvalidRequest,
    ProtocolError,
    Unavailable,
    from_code,
)

T = TypeVar("T")

MISS = "miss"
"""The code of a blob that is not to be had."""

_OF_STATUS: dict[int, type[BlobStoreError]] = {
    400: InvalidRequest, 502: Unavailable, 503: Unavailable, 504: DeadlineExceeded, 507: Full,
}  # fmt: skip
"""For answers of others than the daemon, such as a proxy between."""
_UNAUTHORIZED = 401


class Fault(msgspec.Struct):
    """The body of an answer that is no success."""

    error: str
    message: str = ""
    retry_after_s: float = 0.0
    reason: str = ""


class _Put(msgspec.Struct):
    result: str = ""


class Refused(BlobStoreError):
    """The daemon will not, for the reason that is its `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def decoded(exchange: Exchange, kind: type[T]) -> T:
    """The body of a success as `kind`; raises what it is otherwise."""
    if exchange.answered.status != 200:
        raise error_of(exchange)
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the daemon's answer is not as agreed: {error}") from error


def result_of(exchange: Exchange) -> str:
    """What became of a put, in the words of `writer.results`; "" if the answer does not say."""
    try:
        return msgspec.json.decode(exchange.body, type=_Put).result
    except (msgspec.DecodeError, RecursionError):
        return ""


def error_of(exchange: Exchange) -> BlobStoreError:
    """What an answer that is no success would be if it were raised."""
    if exchange.error is not None:
        return exchange.error
    status = exchange.answered.status
    try:
        fault = msgspec.json.decode(exchange.body, type=Fault)
    except (msgspec.DecodeError, RecursionError):
        if status == _UNAUTHORIZED:
            return Refused("unauthorized", "the daemon does not know the token")
        kind = _OF_STATUS.get(status, BlobStoreError)
        return kind(f"the daemon answered with status {status}")
    if fault.error == MISS:
        return Refused(fault.reason or "absent", fault.message)
    if fault.error in BY_CODE:
        return from_code(fault.error, fault.message, fault.retry_after_s)
    return Refused(fault.error, fault.message)
