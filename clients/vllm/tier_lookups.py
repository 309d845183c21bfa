"""Which chunks the store holds, as far as the scheduler has been told: never by waiting.

The scheduler asks for a chunk again in each of its steps until it gets a yes or a no. The
first time the key is only written down; at the end of the step all new keys go to a thread
in one batch, and its answers are taken in when the scheduler asks next. All methods are
the scheduler's, in one thread or under its lock; only the queues are shared.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from blobstore.clients.vllm.reasons import BUSY, DEADLINE

Batch = list[bytes]
Answers = tuple[Batch, Sequence[bool]]


FRESH_S = 1.0
"""For so long a no is not asked about again, by whichever request."""


@dataclass(slots=True)
class _Asked:
    """A key that some requests want to know about."""

    since_s: float
    held: bool | None = None
    requests: set[str] = field(default_factory=set)


class TierLookups:
    """What is known of the keys that requests have asked for, for as long as these live.

    Args:
        submit: takes a batch to the thread that calls `answered`; False if it takes no more.
        timeout_s: after which an answer that has not come is a no.
        on_miss: is told why, if it is for another reason than the answer, and for how many keys.
    """

    def __init__(
        self,
        submit: Callable[[Batch], bool],
        timeout_s: float,
        on_miss: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submit = submit
        self._timeout_s = timeout_s
        self._on_miss = on_miss
        self._clock = clock
        self._keys: dict[bytes, _Asked] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._new: Batch = []
        self._answers: queue.SimpleQueue[Answers] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._keys)

    def held(self, key: bytes, request: str) -> bool | None:
        """Whether the store holds `key`; None: ask again in the next step."""
        self._take_in()
        now_s = self._clock()
        asked = self._keys.get(key)
        if asked is None:
            asked = self._keys[key] = self._ask(key, now_s)
        elif self._is_stale(asked, request, now_s):
            asked = self._keys[key] = self._ask(key, now_s, asked.requests)
        if request not in asked.requests:
            asked.requests.add(request)
            self._by_request.setdefault(request, set()).add(key)
        if asked.held is None and now_s - asked.since_s >= self._timeout_s:
            asked.held = False
            self._on_miss(DEADLINE, 1)
        return asked.held

    def end_of_step(self) -> None:
        """Send what is new."""
        self._take_in()
        new = [key for key in self._new if key in self._keys]
        self._new = []
        if new and not self._submit(new):
            self._on_miss(BUSY, len(new))
            self.missing(new)

    def answered(self, keys: Batch, held: Sequence[bool]) -> None:
        """The thread has asked the store. Called from there."""
        self._answers.put((keys, held))

    def missing(self, keys: Iterable[bytes]) -> None:
        """They are not to be had, whatever was answered, for all who have asked so far.

        Otherwise what cannot be loaded would be found, and loaded, for ever.
        """
        for key in keys:
            if key in self._keys:
                self._keys[key].held = False

    def finished(self, request: str) -> None:
        """The request is over: what it alone has asked for is forgotten."""
        for key in self._by_request.pop(request, ()):
            asked = self._keys[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._keys[key]

    def _is_stale(self, asked: _Asked, request: str, now_s: float) -> bool:
        """A no to others, which may have stored it since then. Nobody asks twice for that."""
        is_new = request not in asked.requests
        return is_new and asked.held is False and now_s - asked.since_s >= FRESH_S

    def _ask(self, key: bytes, now_s: float, requests: Iterable[str] = ()) -> _Asked:
        self._new.append(key)
        return _Asked(now_s, requests=set(requests))

    def _take_in(self) -> None:
        """An answer that came too late, or for a key that nobody wants, changes nothing."""
        while not self._answers.empty():
            keys, held = self._answers.get_nowait()
            for key, is_held in zip(keys, held, strict=True):
                asked = self._keys.get(key)
                if asked is not None and asked.held is None:
                    asked.held = bool(is_held)
