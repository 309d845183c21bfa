"""Asking the store how much of a prompt it holds, without holding up the scheduler.

A thread asks; the scheduler looks whether there is an answer yet. What is on SSD is
brought up meanwhile, and asked about again until it is in DRAM.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import msgspec

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.hit import Hit
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.lane import Lane
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.reasons import BUSY, DEADLINE, FAILED, UNAVAILABLE, UNNAMED
from blobstore.errors import BlobStoreError
from blobstore.hint import Hint
from blobstore.keys import Keys

PATIENCE_S = 0.002
"""How long one step of the scheduler waits for answers, all of its requests together."""
IDLE_PATIENCE_S = 0.02
"""The same after a step that computed nothing and held nobody up: another step costs more."""
POLL_S = 0.005
"""Between two questions about what is on its way from SSD."""
FRESH_S = 1.0
"""For so long an answer is good enough to be used."""
WAITING_MAX = 1024
"""Questions that wait for the thread; further ones are misses."""
SLOW_FACTOR = 2.0
"""How much longer than its estimate a load from SSD may take before it is waited for elsewhere."""


class Namespaces(Protocol):
    """As Identity: says in which namespace a request's keys and values are."""

    def adapter_of(self, lora_request: Any) -> str:
        """The adapter's name and digest; may read files."""

    def bound(self, adapter: str) -> BoundNamespace:
        """The namespace; may read files."""

    def keys(self, block_hashes: Sequence[bytes]) -> Keys:
        """One for each whole blob."""

    def check_hashes(self) -> None:
        """InvalidRequest if the engine's hashes begin otherwise than the namespace says."""


class Lookup:
    """One request's question, its answer once there is one, and when they were made.

    The thread writes `ns`, `answer`, `answered_s` and `prefetched`, until `done`; all else is
    the scheduler's.
    """

    __slots__ = (
        "answer", "answered_s", "asked_s", "cold_since_s", "done", "first_s", "hint", "hit", "keys",
        "lora", "needed", "ns", "prefetched", "seen", "settled", "waited_s", "warm_at_first",
    )  # fmt: skip

    def __init__(self, lora: Any, hint: Hint, now_s: float) -> None:
        self.lora = lora
        self.hint = hint
        self.keys = Keys(b"")
        self.ns: BoundNamespace | None = None
        self.needed = range(0)
        """The blobs that the engine lacks and could load."""
        self.answer = self.hit = Hit(0, 0)
        """What the store said last, and what the scheduler goes by."""
        self.warm_at_first = 0
        """Leading blobs that were in DRAM before any was brought up for this request."""
        self.prefetched = range(0)
        self.done = threading.Event()
        self.seen = False
        """Whether the scheduler has looked at the last answer."""
        self.first_s = self.asked_s = now_s
        self.answered_s = float("-inf")
        self.cold_since_s: float | None = None
        self.waited_s = 0.0
        """How long it took until the scheduler had an answer, the first one or the last."""
        self.settled = False
        """Whether it was told to the scheduler once."""

    def doubt(self) -> None:
        """What it says has proved wrong: ask again before it is used."""
        self.answered_s, self.seen = float("-inf"), True


class Lookups:
    """All questions of a scheduler. Only its thread calls; nothing blocks or raises.

    An engine that goes `in_step` with others holds them up also where it computes nothing.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        daemon: Daemon,
        options: Options,
        faults: Faults,
        clock: Callable[[], float] = time.monotonic,
        *,
        in_step: bool = False,
    ) -> None:
        self._idle_patience_s = PATIENCE_S if in_step else IDLE_PATIENCE_S
        self._namespaces = namespaces
        self._daemon = daemon
        self._options = options
        self._faults = faults
        self._clock = clock
        self._lane = Lane("lookups", waiting_max=WAITING_MAX)
        self._patience_s = self._idle_patience_s
        self._checked = False
        self._generation = ""
        self._lane.post(self._prepare)

    @property
    def usable(self) -> bool:
        """Whether the daemon is there, as far as is known."""
        return self._daemon.usable

    def begin(self, lora: Any, block_hashes: Sequence[bytes], hint: Hint, needed: range) -> Lookup:
        """Ask for the first time; the engine could load the blobs `needed`, if they are held."""
        lookup = Lookup(lora, hint, self._clock())
        self._ask(lookup, block_hashes, needed)
        return lookup

    def settled(self, lookup: Lookup, block_hashes: Sequence[bytes], needed: range) -> bool:
        """Whether `lookup.hit` is to be used; else look again in the next step.

        At once where nothing is needed: the answer then only tells what need not be saved.
        `block_hashes` and `needed` are those of the request now, in case it must be asked again.
        """
        settled = self._settled(lookup, block_hashes, needed)
        lookup.waited_s = self._clock() - lookup.first_s
        return settled

    def next_step(self, *, idle: bool = False) -> None:
        """The scheduler begins another step; `idle` if the engine computes nothing meanwhile."""
        self._patience_s = self._idle_patience_s if idle else PATIENCE_S

    def tell(self, lookup: Lookup, block_hashes: Sequence[bytes], finish: str) -> None:
        """Let the store know why the model stopped with these tokens; one-way."""
        if lookup.ns is not None and self._daemon.usable:
            keys = self._namespaces.keys(block_hashes)
            self._lane.post(partial(self._finish, lookup.ns, keys, lookup.hint, finish))

    def start_anew(self) -> None:
        """Ask in a namespace of its own from now on, where nothing is stored yet."""
        self._generation = uuid.uuid4().hex

    def close(self, timeout_s: float) -> None:
        """Ask no more."""
        self._lane.close(timeout_s)

    def _settled(self, lookup: Lookup, block_hashes: Sequence[bytes], needed: range) -> bool:
        if not self._daemon.usable:
            lookup.hit = Hit(0, 0, reason=UNAVAILABLE)
            return True
        if self._is_stale(lookup):
            self._ask(lookup, block_hashes, needed)
        if not needed:
            lookup.seen = True
            return True
        if not self._awaited(lookup):
            lookup.seen = self._given_up(lookup)
            return lookup.seen
        if not lookup.seen and lookup.cold_since_s is None:
            lookup.warm_at_first = lookup.answer.warm
        lookup.seen, lookup.hit, lookup.needed = True, lookup.answer, needed
        return not self._worth_waiting(lookup)

    def _is_stale(self, lookup: Lookup) -> bool:
        """Whether there is an answer that was looked at before, too long ago.

        One that came since is taken however long the step was: or else a request could ask
        in every step and never have an answer in the same one.
        """
        good_s = FRESH_S if lookup.cold_since_s is None else POLL_S
        old = self._clock() - lookup.answered_s > good_s
        return lookup.done.is_set() and lookup.seen and old

    def _ask(self, lookup: Lookup, block_hashes: Sequence[bytes], needed: range) -> None:
        lookup.asked_s = self._clock()
        lookup.keys = self._namespaces.keys(block_hashes)
        lookup.needed, lookup.seen = needed, False
        lookup.done.clear()
        if not self._daemon.usable:
            self._conclude(lookup, Hit(0, 0, reason=UNAVAILABLE))
        elif not self._lane.post(partial(self._answer, lookup)):
            self._conclude(lookup, Hit(0, 0, reason=BUSY))

    def _awaited(self, lookup: Lookup) -> bool:
        """Whether there is an answer, with what is left of this step's patience."""
        if not lookup.done.is_set() and self._patience_s > 0:
            before_s = self._clock()
            lookup.done.wait(self._patience_s)
            self._patience_s -= self._clock() - before_s
        return lookup.done.is_set()

    def _given_up(self, lookup: Lookup) -> bool:
        """Whether the answer is waited for no longer: the last one is used, if there was one."""
        if lookup.cold_since_s is not None and not self._worth_waiting(lookup):
            return True
        if self._clock() < lookup.asked_s + self._options.lookup_timeout_s:
            return False
        lookup.hit = Hit(0, 0, reason=DEADLINE)
        return True

    def _worth_waiting(self, lookup: Lookup) -> bool:
        """Whether what was found, and the engine lacks, is on SSD and may soon be in DRAM."""
        hit = lookup.hit
        if not _on_ssd(hit, lookup.needed):
            lookup.cold_since_s = None
            return False
        now_s = self._clock()
        if lookup.cold_since_s is None:
            lookup.cold_since_s = now_s
        patience_s = min(self._options.prefetch_wait_s, max(POLL_S, SLOW_FACTOR * hit.eta_s))
        return now_s < lookup.cold_since_s + patience_s

    def _conclude(self, lookup: Lookup, hit: Hit) -> None:
        lookup.answer = hit
        lookup.answered_s = self._clock()
        lookup.done.set()

    # On the thread.

    def _answer(self, lookup: Lookup) -> None:
        failed = Hit(0, 0, reason=FAILED)
        self._conclude(lookup, self._faults.guarded(failed, self._found, lookup))

    def _found(self, lookup: Lookup) -> Hit:
        lookup.ns = lookup.ns or self._space(lookup.lora)
        if lookup.ns is None:
            return Hit(0, 0, reason=UNNAMED)
        if self._clock() > lookup.asked_s + self._options.lookup_timeout_s:
            return Hit(0, 0, reason=DEADLINE)
        return self._match(lookup, lookup.ns, lookup.keys)

    def _space(self, lora: Any) -> BoundNamespace | None:
        """The namespace of requests with this adapter, or None if it cannot be told."""
        adapter = f" with the adapter {lora.lora_name}" if lora is not None else ""
        what = f"requests{adapter} are neither stored nor read"
        try:
            if not self._checked:
                self._namespaces.check_hashes()
                self._checked = True
            ns = self._of_generation(self._namespaces.bound(self._namespaces.adapter_of(lora)))
        except (BlobStoreError, OSError) as error:
            self._faults.note(what, str(error))
            return None
        self._faults.note(what, "")
        return ns

    def _of_generation(self, ns: BoundNamespace) -> BoundNamespace:
        if not self._generation:
            return ns
        salt = f"{ns.namespace.salt}/{self._generation}"
        return BoundNamespace(replace(ns.namespace, salt=salt), ns.shard)

    def _prepare(self) -> None:
        """Read the weights if it must, and connect: the first request has less to wait for."""
        with contextlib.suppress(BlobStoreError, OSError):  # said at the first request
            ns, client = self._namespaces.bound(""), self._daemon.reach()
            if client is not None:
                client.namespace(ns.namespace, ns.shard)

    def _match(self, lookup: Lookup, ns: BoundNamespace, keys: Keys) -> Hit:
        client = self._daemon.reach()
        if client is None:
            return Hit(0, 0, reason=UNAVAILABLE)
        timeout_s = self._options.lookup_timeout_s
        hit = client.match(ns, keys, hint=lookup.hint, timeout_s=timeout_s)
        needed = lookup.needed
        if hit.warm < needed.start < min(hit.blobs, needed.stop):  # DRAM lacks what the engine has
            held = client.match(ns, keys[needed.start : hit.blobs], timeout_s=timeout_s)
            hit = msgspec.structs.replace(hit, warm=needed.start + held.warm, eta_s=held.eta_s)
        cold = _on_ssd(hit, needed)
        if not set(cold) <= set(lookup.prefetched):
            started = client.prefetch(ns, keys[cold.start : cold.stop], timeout_s=timeout_s)
            cold = range(cold.start, cold.start + started)
        lookup.prefetched = cold  # less each time, as they come up: what leaves again is not in it
        self._daemon.note(hit.reason)
        return hit

    def _finish(self, ns: BoundNamespace, keys: Keys, hint: Hint, finish: str) -> None:
        client = self._daemon.reach()
        if client is not None:
            told, timeout_s = Hint(finish=finish).over(hint), self._options.lookup_timeout_s
            self._daemon.note(client.match(ns, keys, hint=told, timeout_s=timeout_s).reason)


def _on_ssd(hit: Hit, needed: range) -> range:
    """Of the blobs that were found and are needed, those that have yet to come to DRAM."""
    return range(max(hit.warm, needed.start), min(hit.blobs, needed.stop))
