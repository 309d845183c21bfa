"""What all ranks of an engine must say alike, before its scheduler may use it.

Each rank knows it only once it has made its caches, and may be another process. While
that is under way a question waits for a moment; without an answer nothing has a name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from blobstore.errors import InvalidRequest

WAIT_S = 0.5
"""How long a question waits: the halves of an engine meet within milliseconds, or one step."""
WAITS_MAX = 8
"""After so many in vain, it is not waited any more: they may never meet."""


class Agreement:
    """Collects what ranks say. For all threads.

    Args:
        ranks: of the engine.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waits = WAITS_MAX
        self._changed = threading.Condition()
        self._heard: set[int] = set()
        self._said: set[str] = set()

    def hear(self, said: Mapping[int, str]) -> None:
        """What some of the ranks say, by their numbers. Nothing of it is ever taken back."""
        with self._changed:
            self._heard.update(said)
            self._said.update(said.values())
            self._changed.notify_all()

    def agreed(self) -> str:
        """What all have said; waits for it, which is for background threads.

        Raises InvalidRequest as long as some have said nothing, and for good if they differ.
        """
        with self._changed:
            if not self._complete() and self._waits:
                self._waits -= 1
                self._changed.wait_for(self._complete, WAIT_S)
            if len(self._said) > 1:
                differ = "; ".join(sorted(self._said))
                raise InvalidRequest(f"the engine's ranks pack blocks in different ways: {differ}")
            if not self._complete():
                raise InvalidRequest(
                    f"{len(self._heard)} of {self._ranks} ranks have said how they pack blocks"
                )
            (said,) = self._said
            return said

    def _complete(self) -> bool:
        return len(self._heard) >= self._ranks
