"""The canonical bytes of identity: length-framed fields behind a domain tag.

    frame(tag) frame(field) frame(field) ...     frame(x) = len(x) as u32 LE, then x

Text is UTF-8, a number is a u64 LE, and a nested value is the bytes of its own
fields. Field borders are in the bytes, so two different values never encode
alike. Which fields a value has, and their order, is the value's own matter.
"""

from __future__ import annotations

import struct

from blobstore.errors import InvalidRequest

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
MAX_TEXT_BYTES = 4096
"""Longest text field: room for a long path, not for a payload."""


def pack(tag: bytes, *fields: str | int | bytes) -> bytes:
    """`fields` in canonical form, behind the domain tag `tag`."""
    packed = bytearray()
    for field in (tag, *fields):
        if isinstance(field, int):
            field = _NUMBER.pack(field)
        elif isinstance(field, str):
            field = field.encode()
        packed += _LENGTH.pack(len(field))
        packed += field
    return bytes(packed)


def unpack(tag: bytes, data: bytes) -> list[bytes]:
    """The fields of `data`; InvalidRequest unless it is whole frames behind `tag`."""
    fields, at = [], 0
    while at < len(data):
        start = at + _LENGTH.size
        if start > len(data):
            raise InvalidRequest(f"{tag.decode()}: a length is cut short at byte {at}")
        (length,) = _LENGTH.unpack_from(data, at)
        at = start + length
        if at > len(data):
            raise InvalidRequest(
                f"{tag.decode()}: a field of {length} bytes at byte {start} exceeds "
                f"the {len(data) - start} that are left"
            )
        fields.append(data[start:at])
    if not fields or fields[0] != tag:
        found = bytes(fields[0][:32]) if fields else b""
        raise InvalidRequest(f"wanted {tag!r} as the first field, found {found!r}")
    return fields[1:]


def as_number(field: bytes) -> int:
    """The number in `field`; InvalidRequest unless it is a u64."""
    if len(field) != _NUMBER.size:
        raise InvalidRequest(f"a number takes {_NUMBER.size} bytes, found {len(field)}")
    number: int = _NUMBER.unpack(field)[0]
    return number


def as_text(field: bytes) -> str:
    """The text in `field`; InvalidRequest unless it is UTF-8."""
    try:
        return field.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"text is not UTF-8: {error}") from error


def check_number(name: str, value: object, least: int, most: int) -> None:
    """InvalidRequest unless `value` is an int (no bool) from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is an int, found {value!r}")
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is from {least} to {most}, found {value}")


def check_text(name: str, value: object, *, max_bytes: int = MAX_TEXT_BYTES) -> None:
    """InvalidRequest unless `value` is text of at most `max_bytes` in UTF-8."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is text, found {type(value).__name__}")
    try:
        nbytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} cannot be encoded as UTF-8: {error}") from error
    if nbytes > max_bytes:
        raise InvalidRequest(f"{name} takes {nbytes} bytes, at most {max_bytes} are allowed")
