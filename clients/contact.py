"""What a client knows of the daemon that it talks to, whichever way it waits."""

from __future__ import annotations

import logging

from blobstore.clients import reading, writing
from blobstore.clients.handshake import Greeted, socket_path
from blobstore.clients.session import Session, continued
from blobstore.clients.steps import Call

log = logging.getLogger("blobstore.clients")


class Contact:
    """An address, and the session with the run of the daemon that was last found there."""

    reading = reading
    writing = writing

    def __init__(self, address: str, timeout_s: float) -> None:
        self._path = socket_path(address)
        self._timeout_s = timeout_s
        self._session: Session | None = None
        self._closed = False
        self._lost = False

    @property
    def boot_id(self) -> int:
        """Tells one run of the daemon from the next; 0 if there was none yet."""
        return self._session.boot_id if self._session is not None else 0

    @property
    def lent_bytes_max(self) -> int:
        """How much the daemon lends to a client."""
        return self._session.terms.lent_bytes_max if self._session is not None else 0

    def call(self, timeout_s: float | None) -> Call:
        """A call that starts now."""
        return Call(self._timeout_s if timeout_s is None else timeout_s)

    def _meet(self, greeted: Greeted) -> Session:
        """The session with the daemon that greeted. Takes over its descriptors."""
        self._session = session = continued(self._session, greeted)
        if self._lost:
            self._lost = False
            log.warning("found the daemon at %s again", self._path)
        return session

    def _miss(self, why: str) -> None:
        """The connection is dead. Said once, however many calls miss until it is back."""
        if not self._lost:
            self._lost = True
            log.warning("lost the daemon at %s: %s", self._path, why)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
