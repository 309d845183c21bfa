"""The one connection below a client of the daemon on this machine."""

from __future__ import annotations

from typing import Any


def connection_of(kv: Any) -> Any:
    """Of a client of either kind that has connected."""
    connection = kv._runner._connection
    assert connection is not None
    return connection
