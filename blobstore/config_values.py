"""How the values of the configuration are written, whatever source they come from.

A TOML file has types, the environment and flags have text only: each function
takes either, and raises InvalidRequest with an example or the bounds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from blobstore.errors import InvalidRequest
from blobstore.units import parse_size

AUTO: Literal["auto"] = "auto"
SOCKET_PATH_MAX = 107
"""sun_path of Linux's sockaddr_un holds 108 bytes, the closing NUL among them."""

PORT_MAX = 65535
_HOST_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}")

Size = int | Literal["auto"]

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def size(value: object) -> int:
    """Bytes: `4GiB`, `4GB` or a number."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(f"not a size: {value!r} (examples: 4GiB, 500MB, 65536)")
    return parse_size(value)


def positive_size(value: object) -> int:
    """A size above 0."""
    found = size(value)
    if not found:
        raise InvalidRequest("must be above 0")
    return found


def auto_size(value: object) -> Size:
    """A size, or `auto`."""
    return AUTO if value == AUTO else size(value)


def auto_or_off(value: object) -> Size:
    """A size, `auto`, or `off`, which is 0."""
    return 0 if value == "off" else auto_size(value)


def share(value: object) -> float:
    """A number from 0 to below 1."""
    try:
        number = float(value) if isinstance(value, int | float | str) else -1.0
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1:
        raise InvalidRequest(f"not a number from 0 to below 1: {value!r}")
    return number


def count(value: object) -> int:
    """A whole number above 0."""
    try:
        number = int(value) if isinstance(value, int | str) else 0
    except ValueError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise InvalidRequest(f"not a whole number above 0: {value!r}")
    return number


def seconds(value: object) -> float:
    """A finite number of seconds, at least 0."""
    try:
        number = float(value) if isinstance(value, int | float | str) else -1.0
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise InvalidRequest(f"not a number of seconds: {value!r}")
    return number


def duration(value: object) -> float:
    """A finite number of seconds above 0."""
    return _above_0(value, "seconds")


def days(value: object) -> float:
    """A finite number of days above 0."""
    return _above_0(value, "days")


def _above_0(value: object, unit: str) -> float:
    number = seconds(value)
    if number == 0:
        raise InvalidRequest(f"must be above 0 {unit}")
    return number


def truth(value: object) -> bool:
    """true or false, also as yes/no and on/off."""
    found = _TRUTH.get(str(value).lower())
    if found is None:
        raise InvalidRequest(f"not true or false: {value!r}")
    return found


def path(value: object) -> Path:
    """An absolute path; `~` and paths relative to the working directory are resolved."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise InvalidRequest(f"not a path: {value!r}")
    return Path(value).expanduser().absolute()


def optional_path(value: object) -> Path | None:
    """A path; the empty string is None."""
    return None if value == "" else path(value)


def socket_path(value: object) -> Path:
    """Where a Unix socket may be, with or without `unix:` in front."""
    found = path(value.removeprefix("unix:") if isinstance(value, str) else value)
    if (length := len(os.fsencode(found))) > SOCKET_PATH_MAX:
        raise InvalidRequest(
            f"a Unix socket's path may be {SOCKET_PATH_MAX} bytes long, found {length}: {found}"
        )
    return found


def user_ids(value: object) -> tuple[int, ...]:
    """User ids: a list, or text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    try:
        uids = tuple(int(item) for item in items if item != "")  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        uids = (-1,)
    if any(uid < 0 for uid in uids):
        raise InvalidRequest(f"not a list of user ids: {value!r}")
    return uids


def names(value: object) -> tuple[str, ...]:
    """Names: a list, or text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"not a list of names: {value!r}")
    return tuple(item.strip() for item in items if item.strip())


def host_port(value: object) -> str:
    """`HOST:PORT` or `[IPV6]:PORT`; the empty string is none."""
    text = value.strip() if isinstance(value, str) else None
    if text is None or (text and not _HOST_PORT.fullmatch(text)):
        raise InvalidRequest(f"not HOST:PORT: {value!r} (examples: 127.0.0.1:8470, [::1]:8470)")
    if text and int(text.rpartition(":")[2]) > PORT_MAX:
        raise InvalidRequest(f"not a port: {value!r} (0 to {PORT_MAX})")
    return text


def one_of(*names: str) -> Callable[[object], str]:
    """One of these words."""

    def parse(value: object) -> str:
        if value not in names:
            raise InvalidRequest(f"not one of {', '.join(names)}: {value!r}")
        return str(value)

    return parse
