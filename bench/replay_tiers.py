"""What the caches of a node hold while a trace is replayed: DRAM, or DRAM before an SSD.

What leaves DRAM is offered to the SSD; what is used on SSD comes back to DRAM and stays
where it was. Both hold whole prefixes, so that a hit is as long as the longer of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from blobstore.tiering.plan import Plan
from blobstore.tiering.policy import Use
from blobstore.tiering.shadow_cache import ShadowCache


class Tiers(Protocol):
    """The caches of one node, driven by its plan."""

    @property
    def n_evicted(self) -> int:
        """Blocks that have left, of all tiers."""
        ...

    @property
    def ssd_bytes_written(self) -> int:
        """All that went to the second tier."""
        ...

    @property
    def ssd_bytes_read_again(self) -> int:
        """Of what was written: what has been used there before it left."""
        ...

    def n_held(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are held somewhere."""
        ...

    def use(self, use: Use[int]) -> None:
        """Serve one request."""
        ...


class DramOnly:
    """One tier."""

    ssd_bytes_written = ssd_bytes_read_again = 0

    def __init__(self, plan: Plan[int], dram_bytes: int, block_bytes: int) -> None:
        self._plan = plan
        self._dram = ShadowCache(
            dram_bytes, plan.dram, lambda block: block_bytes, lambda block, *_: plan.forget(block)
        )

    @property
    def n_evicted(self) -> int:
        """As Tiers.n_evicted."""
        return self._dram.n_evicted

    def n_held(self, blocks: Sequence[int]) -> int:
        """As Tiers.n_held."""
        return self._dram.n_held(blocks)

    def use(self, use: Use[int]) -> None:
        """As Tiers.use."""
        self._plan.use(use)
        self._dram.use(use)


class DramAndSsd:
    """Two tiers; what is written to the second, and what of that is read again, is counted.

    `foresees` decides in place of the plan what is admitted to SSD: whether a block will
    be used again.
    """

    def __init__(
        self,
        plan: Plan[int],
        dram_bytes: int,
        ssd_bytes: int,
        block_bytes: int,
        foresees: Callable[[int], bool] | None = None,
    ) -> None:
        assert plan.ssd is not None
        self._foresees = foresees
        self._plan = plan
        self._block_bytes = block_bytes
        self._dram = ShadowCache(dram_bytes, plan.dram, self._size, self._left_dram)
        self._ssd = ShadowCache(ssd_bytes, plan.ssd, self._size, self._left_ssd)
        self._now_s = 0.0
        self._unread: set[int] = set()
        self._n_written = self._n_read_again = 0

    @property
    def n_evicted(self) -> int:
        """As Tiers.n_evicted."""
        return self._dram.n_evicted + self._ssd.n_evicted

    @property
    def ssd_bytes_written(self) -> int:
        """As Tiers.ssd_bytes_written."""
        return self._n_written * self._block_bytes

    @property
    def ssd_bytes_read_again(self) -> int:
        """As Tiers.ssd_bytes_read_again."""
        return self._n_read_again * self._block_bytes

    def n_held(self, blocks: Sequence[int]) -> int:
        """As Tiers.n_held."""
        return max(self._dram.n_held(blocks), self._ssd.n_held(blocks))

    def use(self, use: Use[int]) -> None:
        """As Tiers.use."""
        self._now_s = use.now_s
        self._plan.use(use)
        n_dram = self._dram.n_held(use.items)
        n_ssd = self._ssd.touch(use.items, use.now_s)
        for block in use.items[n_dram:n_ssd]:
            if block in self._unread:
                self._unread.remove(block)
                self._n_read_again += 1
        self._dram.use(use)

    def _size(self, block: int) -> int:
        return self._block_bytes

    def _left_dram(self, block: int, parent: int | None, last_used: float) -> None:
        if block in self._ssd:
            return
        missing, anchor = [block], []
        for above in self._dram.lineage(parent) if parent is not None else ():
            if above in self._ssd:
                anchor = [above]
                break
            missing.append(above)
        missing.reverse()
        if self._admits(missing):
            n_written = self._ssd.take_in([*anchor, *missing], last_used)
            self._plan.admission.wrote(n_written * self._block_bytes, self._now_s)
            self._n_written += n_written
            self._unread.update(missing[:n_written])
        if block not in self._ssd:
            self._plan.forget(block)

    def _admits(self, chain: list[int]) -> bool:
        if self._foresees is not None:
            return self._foresees(chain[-1])
        free_bytes = self._ssd.capacity_bytes - self._ssd.used_bytes
        nbytes = len(chain) * self._block_bytes
        return self._plan.admission.decide(chain, nbytes, free_bytes, self._now_s).admit

    def _left_ssd(self, block: int, parent: int | None, last_used: float) -> None:
        self._unread.discard(block)
        if block not in self._dram:
            self._plan.forget(block)
