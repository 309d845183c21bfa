"""Reading everything back: every copy of every blob against its digests."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from blobstore.digest import PIECE_BYTES, first_bad_piece, payload_digest
from blobstore.errors import BlobStoreError, Busy
from blobstore.index import Index, Record
from blobstore.residency import Residency
from blobstore.tiering.ssd import SsdTier
from blobstore.tiering.tier import Extent

STEP_BYTES = 4 * PIECE_BYTES


class Scrub:
    """Checks copies one after the other, beside the traffic; corrupt ones are quarantined."""

    def __init__(
        self,
        ssd: SsdTier | None,
        arena: memoryview,
        index: Index,
        residency: Residency,
        quarantine: Callable[[Record], None],
        quarantine_dram: Callable[[Record], None],
        pool: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._ssd = ssd
        self._arena = arena
        self._index = index
        self._residency = residency
        self._quarantine = quarantine
        self._quarantine_dram = quarantine_dram
        self._pool = pool
        self._clock = clock
        self._running = False

    async def run(self, timeout_s: float) -> dict[str, Any]:
        """A report; `complete` is false if time ran out first. Raises Busy if one is under way."""
        if self._running:
            raise Busy("a verify is under way already")
        self._running = True
        try:
            return await self._run(timeout_s)
        finally:
            self._running = False

    async def _run(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = self._clock() + timeout_s
        report: dict[str, Any] = {
            "complete": True, "blobs": 0, "copies": 0, "bytes": 0, "corrupt": [], "unreadable": [],
        }  # fmt: skip
        bounce = memoryview(mmap.mmap(-1, STEP_BYTES))
        for record in list(self._index.records()):
            if self._clock() >= deadline_s:
                report["complete"] = False
                break
            if record.gone or record.hole:
                continue
            report["blobs"] += 1
            await self._check(record, bounce, report)
        return report

    async def _check(self, record: Record, bounce: memoryview, report: dict[str, Any]) -> None:
        self._residency.pin(record)
        try:
            if record.packed:
                await self._check_dram(record, report)
            if record.ssd is not False:
                await self._check_ssd(record, record.ssd, bounce, report)
        finally:
            self._residency.unpin(record, used=False)

    async def _check_dram(self, record: Record, report: dict[str, Any]) -> None:
        work = asyncio.get_running_loop().run_in_executor
        report["copies"] += 1
        report["bytes"] += record.nbytes
        if not await work(self._pool, self._dram_is_good, record) and record.packed:
            self._note(record, "dram", report)
            self._quarantine_dram(record)

    async def _check_ssd(
        self, record: Record, place: Extent | bool, bounce: memoryview, report: dict[str, Any]
    ) -> None:
        work = asyncio.get_running_loop().run_in_executor
        report["copies"] += 1
        report["bytes"] += record.nbytes
        good, error = False, None
        try:
            good = await work(self._pool, self._ssd_is_good, record, place, bounce)
        except BlobStoreError as fault:
            error = fault
        if record.ssd != place:  # dropped meanwhile: there was nothing to check
            return
        if error is not None:
            report["unreadable"].append({"key": record.key.hex(), "error": str(error)})
        elif not good:
            self._note(record, "ssd", report)
            self._quarantine(record)

    def _note(self, record: Record, tier: str, report: dict[str, Any]) -> None:
        report["corrupt"].append(
            {"namespace": record.ns.id.hex(), "key": record.key.hex(), "tier": tier}
        )

    def _dram_is_good(self, record: Record) -> bool:
        assert record.dram is not None
        view = self._arena[record.dram.offset : record.dram.offset + record.nbytes]
        return first_bad_piece(view, 0, record.pieces) is None and _whole(record)

    def _ssd_is_good(self, record: Record, place: Extent | bool, bounce: memoryview) -> bool:
        assert self._ssd is not None
        for start in range(0, max(record.nbytes, 1), STEP_BYTES):
            into = bounce[: min(STEP_BYTES, record.nbytes - start)]
            if isinstance(place, Extent):
                self._ssd.read(place, start, into)
            else:
                self._ssd.read_inline(record.ns.id, record.key, into)
            if first_bad_piece(into, start // PIECE_BYTES, record.pieces) is not None:
                return False
        return _whole(record)


def _whole(record: Record) -> bool:
    return payload_digest(record.nbytes, record.pieces) == record.digest
