"""Choosing who leaves DRAM: coldest first, and nobody until enough was found.

A victim first leaves the tree, which offers its parent to the policy in its own
place in the order. If the sum falls short, all of them come back.
"""

from __future__ import annotations

from collections.abc import Callable

from blobstore.index import Record
from blobstore.tiering.dram import DramTier
from blobstore.tiering.free_runs import FreeRuns
from blobstore.tiering.policy import Policy
from blobstore.tiering.tier import Extent


class Eviction:
    """Finds victims among what the policy was offered.

    `leave` takes a record out of the tree and the policy while its bytes stay;
    `come_back` undoes that, latest first.
    """

    def __init__(
        self,
        dram: DramTier,
        policy: Policy[Record],
        leave: Callable[[Record], None],
        come_back: Callable[[Record], None],
    ) -> None:
        self._dram = dram
        self._policy = policy
        self._leave = leave
        self._come_back = come_back

    def victims(self, nbytes: int) -> list[Record]:
        """Blobs of `nbytes` in sum, which have left; [] with nothing changed if there are not."""
        chosen: list[Record] = []
        while nbytes > 0:
            victim = self._next()
            if victim is None:
                self._return(chosen)
                return []
            chosen.append(victim)
            nbytes -= self._dram.padded(victim.nbytes)
        return chosen

    def victims_in_one_piece(self, nbytes: int) -> list[Record]:
        """Blobs that, with the free room between them, make one run of `nbytes`; else []."""
        runs = FreeRuns(self._dram.free_runs())
        chosen: list[Record] = []
        while True:
            victim = self._next()
            if victim is None:
                self._return(chosen)
                return []
            chosen.append(victim)
            if not victim.nbytes:
                continue
            assert victim.dram is not None
            room = Extent(0, victim.dram.offset, self._dram.padded(victim.nbytes))
            run = runs.add(room)
            if run.nbytes >= nbytes:
                return self._only_needed(chosen, run)

    def _next(self) -> Record | None:
        victim = next(self._policy.victims(), None)
        if victim is not None:
            self._leave(victim)
        return victim

    def _only_needed(self, chosen: list[Record], run: Extent) -> list[Record]:
        """Those in `run`, and what continues them; the others come back."""
        needed: set[Record] = set()
        for record in reversed(chosen):  # ancestors come before what continues them
            assert record.dram is not None
            inside = run.offset <= record.dram.offset < run.offset + run.nbytes
            if (inside and record.nbytes) or record.parent in needed:
                needed.add(record)
        self._return([record for record in chosen if record not in needed])
        return [record for record in chosen if record in needed]

    def _return(self, chosen: list[Record]) -> None:
        for record in reversed(chosen):
            self._come_back(record)
