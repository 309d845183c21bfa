"""What a forked child must let go of, before it runs another line.

A child inherits sockets and mappings that are its parent's: a byte that it wrote
to either would be the parent's. Whoever holds such things registers here.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Something that a forked child has no right to."""

    def leave_parent(self) -> None:
        """Runs in the child, its only thread, where locks may be held by threads that are gone."""


_watched: WeakSet[Inherited] = WeakSet()


def watch(holder: Inherited) -> None:
    """Call `holder.leave_parent()` in every child forked while `holder` lives."""
    _watched.add(holder)


def _in_child() -> None:
    for holder in list(_watched):
        holder.leave_parent()


os.register_at_fork(after_in_child=_in_child)
