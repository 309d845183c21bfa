"""What this process owes a daemon: leases that ended, extents and reservations to give back.

The last view of a lease can die anywhere: on any thread, inside the garbage
collector, in the middle of a call that holds a lock. So what is owed is only
noted here, and sent by whoever can send without waiting. It is kept while there
is no connection; a daemon that restarted is owed nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blobstore.protocol import Abort, Holding, Leased, Release, Reply, Reserved

IDS_PER_FRAME = 4096
"""Bounds one Release; the daemon serves others in between."""


class Sender(Protocol):
    """A connection that can send what is owed."""

    def flush(self) -> None:
        """Send it, unless that means to wait."""


class Disownable(Protocol):
    """A lease or a writer: something that a forked child must not use."""

    def disown(self) -> None:
        """Every later use raises WrongProcess."""


@dataclass(frozen=True, slots=True)
class _Lease:
    lease_id: int


@dataclass(frozen=True, slots=True)
class _Extent:
    offset: int


Grant = tuple[type[Leased] | type[Reserved], int]
"""Number of a lease or a reservation."""

_Debt = _Lease | _Extent | Abort | Holding


@dataclass(frozen=True, slots=True)
class Debts:
    """Some of what is owed, and the message that settles it."""

    items: list[_Debt]
    request: Abort | Holding | Release


class Returns:
    """The debts of this process to one daemon, and what it still holds of it."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        """The connection, if there is one."""
        self.owed: deque[_Debt] = deque()
        """What is to be sent, in this order."""
        self._held: dict[int, weakref.ref[Disownable]] = {}
        self._viewed: set[int] = set()
        self._writers: dict[int, weakref.ref[Disownable]] = {}
        self._arrived: set[Grant] = set()
        """Of replies that nobody has taken yet."""
        self._void = False

    @property
    def holding(self) -> bool:
        """Whether views of leased or lent bytes are alive, or writers are open."""
        return bool(self._held or self._viewed or self._writers)

    def arrive(self, reply: Reply) -> None:
        """A reply is here; what it grants is held until somebody takes it or gives it back."""
        if type(reply) is Leased and reply.lease_id:
            self._arrived.add((Leased, reply.lease_id))
        elif type(reply) is Reserved and reply.reservation_id:
            self._arrived.add((Reserved, reply.reservation_id))

    def reclaim(self, connection_ids: Sequence[int]) -> None:
        """Owe the end of what was granted over these connections, which broke, and is not held.

        No reply of theirs may arrive any more.
        """
        self.owed.append(self.held_over(connection_ids))

    def held_over(self, connection_ids: Sequence[int]) -> Holding:
        """The message that ends what was granted over these connections and is not held."""
        # In this order: what moves on meanwhile is seen where it was or where it goes.
        arrived = list(self._arrived)
        writers = {*self._writers}
        owed = {debt.reservation_id for debt in list(self.owed) if isinstance(debt, Abort)}
        leases = {number for kind, number in arrived if kind is Leased} | {*self._held}
        reservations = {number for kind, number in arrived if kind is Reserved} | writers | owed
        return Holding(list(connection_ids), list(leases), list(reservations), list(self._viewed))

    def hold(self, exporter: object, lease_id: int, lease: Disownable) -> None:
        """The lease is held until `exporter`, which all its views keep alive, dies."""
        # The finalizer's registry keeps this object, and that the connection.
        weakref.finalize(exporter, self.end_lease, lease_id).atexit = False
        self._held[lease_id] = weakref.ref(lease)
        self._arrived.discard((Leased, lease_id))

    def holds(self, lease_id: int) -> bool:
        """Whether the lease will be ended by a finalizer."""
        return lease_id in self._held

    def end_lease(self, lease_id: int) -> None:
        """Owe the end of a lease. Safe anywhere."""
        self._held.pop(lease_id, None)
        self._arrived.discard((Leased, lease_id))
        if not self._void:
            self.owed.append(_Lease(lease_id))
            self._send()

    def open_writer(self, writer: Disownable, reservation_id: int) -> None:
        """The connection is kept for this writer until it is sealed or given up."""
        self._writers[reservation_id] = weakref.ref(writer)
        self._arrived.discard((Reserved, reservation_id))

    def writes(self, reservation_id: int) -> bool:
        """Whether a writer will end the reservation."""
        return reservation_id in self._writers

    def close_writer(self, reservation_id: int) -> None:
        """The writer has ended, and all that it leaves behind is known here."""
        self._writers.pop(reservation_id, None)
        self._send()  # which ends a connection that was kept for it

    def give_up(self, reservation_id: int, alive: Sequence[int] = ()) -> None:
        """Owe the end of a reservation of which the blobs `alive` are still viewed. Safe anywhere.

        Naming a reservation that the daemon ended, or whose connection broke, is
        harmless: it says which of its extents are out of this process's reach.
        """
        if not self._void:
            self.owed.append(Abort(reservation_id, list(alive)))
            self._arrived.discard((Reserved, reservation_id))
            self._send()

    def hand_back_after(self, exporter: weakref.ref[Any], offset: int) -> None:
        """Owe the extent at `offset` once `exporter` dies, or now if it is dead.

        Only for extents that a Seal or an Abort before named as alive.
        """
        alive = exporter()
        if alive is None:
            self.hand_back(offset)
            return
        self._viewed.add(offset)
        weakref.finalize(alive, self.hand_back, offset).atexit = False

    def hand_back(self, offset: int) -> None:
        """Owe an extent: no view of it is left. Safe anywhere."""
        self._viewed.discard(offset)
        if not self._void:
            self.owed.append(_Extent(offset))
            self._send()

    def take(self) -> Debts:
        """Some of what is owed, with the message that settles it; it is owed no longer."""
        first = self.owed.popleft()
        if isinstance(first, Abort | Holding):
            return Debts([first], first)
        items: list[_Debt] = [first]
        while (
            self.owed and len(items) < IDS_PER_FRAME and isinstance(self.owed[0], _Lease | _Extent)
        ):
            items.append(self.owed.popleft())
        leases = [item.lease_id for item in items if isinstance(item, _Lease)]
        extents = [item.offset for item in items if isinstance(item, _Extent)]
        return Debts(items, Release(leases, extents))

    def take_back(self, unsent: Debts) -> None:
        """These are owed still: their message was not sent, or not all of it."""
        self.owed.extendleft(reversed(unsent.items))

    def write_off(self) -> None:
        """The daemon is another one now: nothing is owed to the old one, and never will be."""
        self._void = True
        self.owed.clear()

    def leave_parent(self) -> None:
        """In a forked child: all of this is the parent's."""
        self.write_off()
        for held in (*self._held.values(), *self._writers.values()):
            holder = held()
            if holder is not None:
                holder.disown()
        self._held.clear()
        self._arrived.clear()
        self._writers.clear()
        self._viewed.clear()

    def _send(self) -> None:
        if self.sender is not None:
            self.sender.flush()
