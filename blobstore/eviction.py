"""Choosing who leaves DRAM: coldest first, and nobody until enough was found.

A victim first leaves the tree, which offers its parent to the policy in its own
place in the order. If the sum falls short, all of them come back. What is in DRAM
alone, and has not been decided about, is passed to a gate first: it may have to be
written to SSD before it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from blobstore.index import Record
from blobstore.run_search import only_needed
from blobstore.tiering.dram import DramTier
from blobstore.tiering.free_runs import FreeRuns
from blobstore.tiering.policy import Policy
from blobstore.tiering.tier import Extent

ASIDE_MAX = 256
"""Blobs that must be written before they may go, past which one search looks for others."""

JOINED_MAX = 256
"""Blobs that one search for a run of free room lets leave and come back: some milliseconds."""


class Gate(Protocol):
    """Who decides about blobs that are in DRAM alone before they leave it."""

    @property
    def coming_bytes(self) -> int:
        """On their way to SSD so that their room here can be had."""
        ...

    def waits(self, record: Record) -> bool:
        """It has not been decided about: it must not be lost, and may be written."""
        ...

    def may_leave(self, record: Record, *, urgent: bool) -> bool:
        """Whether a blob that was offered may go now; if not it may be on its way to SSD then.

        `urgent` is what a reader waits for: no budget holds it up.
        """
        ...

    def save(self, record: Record) -> None:
        """A client wants a blob in DRAM alone to be on SSD alone."""
        ...

    def pressed(self, *, short: bool) -> None:
        """Room was taken, or (`short`) could not be had."""
        ...

    def why_lost(self, record: Record) -> str:
        """The reason, for counters, why a blob goes that is nowhere else."""
        ...


class OpenGate:
    """Without an SSD tier there is nothing to decide."""

    coming_bytes = 0

    def waits(self, record: Record) -> bool:
        """As Gate.waits."""
        return False

    def may_leave(self, record: Record, *, urgent: bool) -> bool:
        """As Gate.may_leave."""
        return True

    def save(self, record: Record) -> None:
        """As Gate.save."""

    def pressed(self, *, short: bool) -> None:
        """As Gate.pressed."""

    def why_lost(self, record: Record) -> str:
        """As Gate.why_lost."""
        return "no_ssd"


class Eviction:
    """Finds victims among what the policy was offered.

    `leave` takes a record out of the tree and the policy while its bytes stay;
    `come_back` undoes that, latest first. `offer` offers a record to the policy
    again, if it may still go.
    """

    def __init__(
        self,
        dram: DramTier,
        policy: Policy[Record],
        leave: Callable[[Record], None],
        come_back: Callable[[Record], None],
        offer: Callable[[Record], None],
    ) -> None:
        self._dram = dram
        self._policy = policy
        self._leave = leave
        self._come_back = come_back
        self._offer = offer
        self.gate: Gate = OpenGate()

    def victims(self, nbytes: int, *, urgent: bool, patient: bool) -> list[Record]:
        """Blobs of `nbytes` in sum, which have left; [] with nothing changed if there are not.

        What has to be written first is passed over for warmer blobs, unless `patient`:
        then there are none while enough is being written.
        """
        chosen: list[Record] = []
        aside: list[Record] = []
        try:
            self._choose(nbytes, chosen, aside, urgent=urgent, patient=patient)
        except BaseException:  # a fault of the policy must not strand who has left
            self._return(chosen)
            raise
        finally:
            self._offer_again(aside)
        return chosen

    def _choose(
        self,
        nbytes: int,
        chosen: list[Record],
        aside: list[Record],
        *,
        urgent: bool,
        patient: bool,
    ) -> None:
        """Fill `chosen` with victims, or leave it empty."""
        while nbytes > 0:
            n_aside = len(aside)
            victim = self._next(aside, urgent)
            waits = patient and len(aside) > n_aside and self.gate.coming_bytes >= nbytes
            if victim is not None:
                chosen.append(victim)
                nbytes -= self._dram.padded(victim.nbytes)
            if victim is None or waits:
                self._return(chosen)
                chosen.clear()
                return

    def victims_in_one_piece(self, nbytes: int, *, urgent: bool) -> list[Record] | None:
        """Blobs that, with the free room between them, make one run of `nbytes`; else [].

        None if there are more than may be looked at while others wait.
        """
        runs = FreeRuns(self._dram.free_runs())
        chosen: list[Record] = []
        aside: list[Record] = []
        needed: list[Record] | None = []
        while (victim := self._next(aside, urgent)) is not None:
            chosen.append(victim)
            if not victim.nbytes:
                continue
            assert victim.dram is not None
            room = Extent(0, victim.dram.offset, self._dram.padded(victim.nbytes))
            run = runs.add(room)
            if run.nbytes >= nbytes:
                needed = only_needed(chosen, run)
                break
            if len(chosen) >= JOINED_MAX:
                needed = None
                break
        unneeded = set(chosen).difference(needed or ())
        self._return([record for record in chosen if record in unneeded])
        self._offer_again(aside)
        return needed

    def _next(self, aside: list[Record], urgent: bool) -> Record | None:
        """The coldest that may go, which has left; those passed over are withdrawn to `aside`."""
        while (victim := next(self._policy.victims(), None)) is not None:
            if self.gate.may_leave(victim, urgent=urgent):
                self._leave(victim)
                return victim
            self._policy.withdraw(victim)
            aside.append(victim)
            if len(aside) >= ASIDE_MAX:
                return self._next_decided()
        return None

    def _next_decided(self) -> Record | None:
        """As `_next`, of those about which nothing is left to decide: a few are looked at."""
        few = islice(self._policy.victims(), 16 * ASIDE_MAX)
        victim = next((record for record in few if not self.gate.waits(record)), None)
        if victim is not None:
            self._leave(victim)
        return victim

    def _return(self, chosen: list[Record]) -> None:
        for record in reversed(chosen):
            self._come_back(record)

    def _offer_again(self, aside: list[Record]) -> None:
        for record in aside:
            self._offer(record)
