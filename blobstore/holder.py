"""A process that uses the store over the local socket, and what it holds.

What was lent to a process is given to others only after that process handed it
back or exited: never after a time, and not when a connection ends, since a
forked child may keep the socket open, or the process may still be reading.
Connections of one process share one holder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.index import Record
from blobstore.turns import Turns

if TYPE_CHECKING:
    from blobstore.drafts import Reservation


@dataclass(slots=True)
class Lease:
    """Blobs that a holder reads: pins on as few records as hold all of them."""

    lease_id: int
    pins: list[Record]
    items: list[Record]
    """Every blob, where parts are awaited; empty if all were readable at once."""


@dataclass(slots=True, eq=False)
class Granted:
    """What was granted over one connection: replies may be lost with it."""

    end: Callable[[], None]
    """Closes the connection, if that is still to come."""
    lease_ids: set[int] = field(default_factory=set)
    reservation_ids: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Holder:
    """One client process. `token` tells it from all others, `pid` is for people."""

    token: object
    pid: int
    name: str
    turns: Turns
    """Its reservations that wait until it hands back some of what it was lent."""
    connections: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    kept: dict[int, list[Record]] = field(default_factory=dict)
    """Records, by offset, whose extents it still may write to after it sealed or aborted.

    One entry for each loan: two writers of a process may share an extent.
    """
    lent_bytes: int = 0
    granted: dict[int, Granted] = field(default_factory=dict)
    """By connection: open, or broken while something was granted over it."""
