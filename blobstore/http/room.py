"""Memory for what is held whole: bodies of JSON that come, and long answers that go.

Each request may have megabytes of either, and a thousand are in flight. So all of them
together are bounded; what is short is not counted.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from blobstore.errors import Busy

ROOM_BYTES = 128 << 20
UNCOUNTED_BYTES = 64 << 10
"""Of one body: short requests are served whatever long ones there are."""


class Room:
    """What requests in flight hold, by the connection that they came on."""

    def __init__(self, nbytes: int = ROOM_BYTES) -> None:
        self._free = nbytes
        self._taken: dict[Any, int] = {}

    def take(self, request: web.Request, nbytes: int) -> None:
        """For `nbytes` more of one request; Busy if others have the room."""
        if nbytes <= 0:
            return
        if nbytes > self._free:
            raise Busy("others' long bodies take the memory that there is", retry_after_s=1.0)
        self._free -= nbytes
        self._taken[request.protocol] = self._taken.get(request.protocol, 0) + nbytes

    def leave(self, request: web.Request) -> None:
        """The request has ended."""
        self._free += self._taken.pop(request.protocol, 0)


KEY = web.AppKey("room", Room)
