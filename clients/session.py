"""What this process shares with one run of a daemon, over however many connections.

A lost connection to the same run (told by its boot id) loses nothing: the arena
stays mapped and leases stay right. With another run comes another session; views
of the old arena keep the old mapping for as long as they live.
"""

from __future__ import annotations

import os
import threading

from blobstore.clients import forks
from blobstore.clients.handshake import Greeted
from blobstore.clients.mapping import BACKGROUND_BYTES, Bytes, Mapping
from blobstore.clients.returns import Disownable, Returns
from blobstore.protocol import Welcome

LOST_MAX = 16
"""Broken connections that are named again: the message that named them may have been lost."""


class Session:
    """The arena of one run of the daemon, and what this process holds of it.

    Takes over both descriptors. `background_bytes` as in Mapping.populate.
    """

    def __init__(
        self,
        welcome: Welcome,
        read_only_fd: int,
        read_write_fd: int,
        background_bytes: int = BACKGROUND_BYTES,
    ) -> None:
        self.boot_id = welcome.boot_id
        self.terms = welcome
        self.returns = Returns()
        self.lost_ids: list[int] = []
        """Connections before the one that there is now."""
        self._connection_id = welcome.connection_id
        self._background_bytes = background_bytes
        self._read_write_fd = read_write_fd
        self._mappings: list[Mapping] = []
        self._lock = threading.RLock()
        self._writable: Bytes | None = None
        try:
            self._readable = self._map(read_only_fd, writable=False)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read_only_fd)
        forks.watch(self)

    def hold(self, lease_id: int, lease: Disownable) -> memoryview:
        """A read-only view of the arena that, with all views made of it, holds the lease."""
        exporter = self._readable[:]
        self.returns.hold(exporter, lease_id, lease)
        return exporter.data

    def extent(self, offset: int, nbytes: int) -> Bytes | None:
        """An array of its own over an extent that was lent for writing.

        None if the session was closed before anything was written.
        """
        array = self._writable
        if array is None:
            array = self._map_writable()
        return array[offset : offset + nbytes] if array is not None else None

    def close(self) -> None:
        """Let go of the arena. Views that are alive keep their mapping."""
        with self._lock:
            fd, self._read_write_fd = self._read_write_fd, -1
            mappings, self._mappings = self._mappings, []
        if fd >= 0:
            os.close(fd)
        for mapping in mappings:
            mapping.stop_populating()

    def reconnected(self, welcome: Welcome) -> None:
        """The same run of the daemon has greeted again."""
        if self._connection_id:
            self.lost_ids = [*self.lost_ids[1 - LOST_MAX :], self._connection_id]
        self._connection_id = welcome.connection_id

    @property
    def connection_ids(self) -> list[int]:
        """All of its connections: those before, and the one that there is now."""
        return [*self.lost_ids, self._connection_id]

    def leave_parent(self) -> None:
        """In a forked child: what the parent holds is no business of the child's."""
        self.returns.leave_parent()
        fd, self._read_write_fd = self._read_write_fd, -1
        if fd >= 0:
            os.close(fd)

    def _map(self, fd: int, *, writable: bool) -> Bytes:
        mapping = Mapping(fd, self.terms.arena_bytes, writable=writable)
        self._mappings.append(mapping)
        mapping.populate(self._background_bytes)
        return mapping.array()

    def _map_writable(self) -> Bytes | None:
        with self._lock:
            if self._writable is None and self._read_write_fd >= 0:
                self._writable = self._map(self._read_write_fd, writable=True)
                os.close(self._read_write_fd)
                self._read_write_fd = -1
            return self._writable


def continued(session: Session | None, greeted: Greeted) -> Session:
    """`session` if the daemon that greeted is still the same run, else a new one in its place.

    Takes over the descriptors of `greeted`.
    """
    if session is not None and session.boot_id == greeted.welcome.boot_id:
        greeted.close_descriptors()
        session.reconnected(greeted.welcome)
        return session
    fresh = Session(greeted.welcome, greeted.read_only_fd, greeted.read_write_fd)
    if session is not None:
        session.returns.write_off()
        session.close()
    return fresh
