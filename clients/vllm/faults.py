"""Says what does not work: once, until it has worked again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("blobstore.clients.vllm")


class Faults:
    """Remembers of each thing that may fail how it last went. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}

    def note(self, what: str, reason: str) -> None:
        """How `what` went: "" if it worked, else why not."""
        with self._lock:
            before = self._last.get(what, "")
            self._last[what] = reason
        if reason and not before:
            log.warning("%s: %s", what, reason)
        elif before and not reason:
            log.info("%s: works again", what)

    def guarded(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns, or `default` if it raises: an engine must not die of us."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.broke(function, error)
            return default

    def broke(self, function: Callable[..., Any], error: Exception) -> None:
        """`function` raised what it must not: said with the traceback, once."""
        name = getattr(function, "__qualname__", str(function))
        with self._lock:
            known = name in self._last
            self._last[name] = str(error)
        if not known:
            log.error("%s failed; what it was for is a miss", name, exc_info=error)
