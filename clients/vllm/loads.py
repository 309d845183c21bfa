"""Reading blobs into the blocks that the engine gave to a request, on background threads.

Nobody else reads or writes these blocks until the engine hears that the load has ended,
which it does exactly once, whatever became of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.sync import Client, Lease
from blobstore.clients.vllm.copies import Copies
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.lane import Lane
from blobstore.clients.vllm.metadata import Load
from blobstore.clients.vllm.place import Place, blocks_at
from blobstore.clients.vllm.reasons import ABSENT, DEADLINE, FAILED, UNAVAILABLE
from blobstore.clients.vllm.recorder import Recorder
from blobstore.hint import Hint
from blobstore.keys import Keys

THREADS = 2
"""One copies while the other one waits for the daemon; more would take the engine's cores."""
WINDOW_BYTES = 128 << 20
"""Leased at once: each window costs a round trip, while nothing is copied."""
WAITING_MAX = 1 << 16
"""More requests than an engine has."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A load that is over: `blobs` leading ones were read; all of them only if it is `whole`."""

    request_id: str
    blobs: int
    whole: bool


class Loads:
    """All loads of a worker. `start` and `take` are called by the engine's thread.

    Where they `may_fail`, one that has waited for longer than `timeout_s`, for each of its
    windows, when its turn comes is not read at all.
    """

    def __init__(
        self,
        place: Place,
        daemon: Daemon,
        recorder: Recorder,
        faults: Faults,
        timeout_s: float,
        *,
        tells_tokens: bool = True,
        may_fail: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._daemon = daemon
        self._recorder = recorder
        self._faults = faults
        self._timeout_s = timeout_s
        self._tells_tokens = tells_tokens
        self._may_fail = may_fail
        self._clock = clock
        self._lane = Lane("loads", threads=THREADS, waiting_max=WAITING_MAX)
        self._changed = threading.Condition()
        self._ended: list[Ended] = []
        self._running = 0

    def start(self, loads: Sequence[Load], copies: Copies | None) -> None:
        """Begin; each of them is in `take` one day."""
        with self._changed:
            self._running += len(loads)
        for load in loads:
            if not self._faults.guarded(False, self._post, load, copies):
                self._end(Ended(load.request_id, 0, whole=False))

    def take(self, wait_s: float = 0.0, *, anyway: bool = False) -> list[Ended]:
        """Those that ended since the last call; waits for one if some are running, or `anyway`."""
        with self._changed:
            if wait_s and (self._running or anyway) and not self._ended:
                self._changed.wait(wait_s)
            ended, self._ended = self._ended, []
        return ended

    def spread(self, cores: AbstractSet[int]) -> None:
        """Read on any of `cores`."""
        self._lane.spread(cores)

    def close(self, timeout_s: float) -> None:
        """Take no more."""
        self._lane.close(timeout_s)

    def _post(self, load: Load, copies: Copies | None) -> bool:
        if copies is None:
            return False
        run = _Run(load, copies, copies.fence(), self._clock())
        return self._lane.post(partial(self._run, run))

    # On a thread.

    def _run(self, run: _Run) -> None:
        reason = FAILED
        try:
            reason = self._read(run) if self._in_time(run) else DEADLINE
        except Exception as error:  # whatever it is: the engine computes these tokens itself
            self._faults.note("loads", f"{type(error).__name__}: {error}")
        finally:
            self._faults.guarded(None, self._count, run, reason)
            self._end(run.ended(reason))

    def _in_time(self, run: _Run) -> bool:
        """Whether a load is begun soon enough: the engine could have computed it meanwhile."""
        run.began_s = self._clock()
        windows = 1 + len(run.load.keys) // run.load.key_bytes // self._blobs_per_window
        return not self._may_fail or run.began_s <= run.posted_s + windows * self._timeout_s

    def _count(self, run: _Run, reason: str) -> None:
        if reason:
            if self._tells_tokens:
                self._recorder.missed(reason)
            return
        self._faults.note("loads", "")
        tokens = run.done * self._place.blob_tokens - run.load.skip if self._tells_tokens else 0
        nbytes = run.done * run.copies.read_bytes
        self._recorder.loaded(tokens, nbytes, self._clock() - run.began_s)

    def _read(self, run: _Run) -> str:
        """Read all blobs, or as far as it goes; why it ends before the last one."""
        keys = Keys(run.load.keys, run.load.key_bytes)
        if not keys:
            return ABSENT
        ns = self._place.bound_of(run.load.namespace)
        hint = Hint.from_dict(run.load.hint)
        step = self._blobs_per_window
        while run.done < len(keys):
            client = self._daemon.reach()
            if client is None:
                return UNAVAILABLE
            before = run.done
            reason = self._window(run, client, ns, keys[before : before + step], hint)
            self._daemon.note(reason if run.done == before else "")
            if run.done == before:
                return reason or ABSENT
        return ""

    @property
    def _blobs_per_window(self) -> int:
        return max(1, WINDOW_BYTES // self._place.blob_bytes)

    def _window(self, run: _Run, client: Client, ns: BoundNamespace, keys: Keys, hint: Hint) -> str:
        """Read some of `keys`, by one deadline for all of them; why it ends where it does."""
        stream, deadline_s = run.load.stream, self._clock() + self._timeout_s
        lease = client.get(ns, keys, hint=hint, timeout_s=self._timeout_s, stream=stream)
        with lease:
            for number in range(len(lease)):
                left_s = max(0.0, deadline_s - self._clock())
                if stream and not lease.wait(number, timeout_s=left_s):
                    break
                self._copy(run, lease, number)
        return lease.reason

    def _copy(self, run: _Run, lease: Lease, number: int) -> None:
        load = run.load
        blocks = blocks_at(self._place, load.blocks, run.done)
        run.copies.into(blocks, lease[number], load.skip if run.done == 0 else 0, run.fence)
        run.done += 1

    def _end(self, ended: Ended) -> None:
        with self._changed:
            self._ended.append(ended)
            self._running -= 1
            self._changed.notify()


@dataclass(slots=True)
class _Run:
    """A load under way: `done` leading blobs of it are in their blocks."""

    load: Load
    copies: Copies
    fence: Any
    posted_s: float
    began_s: float = 0.0
    done: int = 0

    def ended(self, reason: str) -> Ended:
        """How it ended. One that failed is told short of its end: else it would be asked again."""
        blobs = self.done
        if reason:
            blobs = min(blobs, max(0, len(self.load.keys) // self.load.key_bytes - 1))
        return Ended(self.load.request_id, blobs, whole=not reason)
