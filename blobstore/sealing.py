"""Sealing: digest complete drafts on worker threads, then publish them under their keys.

Only what is published can be found. Bytes that a writer may still touch are
never published: a copy of them is. Used on the event loop only, but for the
functions marked as work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from blobstore.counters import Counters
from blobstore.digest import payload_digest, piece_digests
from blobstore.divergence import Divergences
from blobstore.drafts import Answer, Draft, Drafts
from blobstore.fill import Fill
from blobstore.index import Index, Record, Retention
from blobstore.residency import Residency
from blobstore.stories import Stories
from blobstore.writeback import Writeback

if TYPE_CHECKING:
    from blobstore.text_entry import TextEntry

INLINE_DIGEST_BYTES = 256 << 10
"""Below this a digest takes less time than handing it to a thread (xxh3: 20 GB/s)."""

Digests = tuple[bytes, bytes]
"""Piece digests and payload digest."""


class Sealing:
    """Publishes drafts; `Draft.answer` says what became of each."""

    def __init__(
        self,
        index: Index,
        residency: Residency,
        drafts: Drafts,
        writeback: Writeback | None,
        arena: memoryview,
        pool: Executor,
        lanes: int,
        clock: Callable[[], float],
        stories: Stories,
        counters: Counters,
        divergences: Divergences,
    ) -> None:
        self._index = index
        self._residency = residency
        self._drafts = drafts
        self._writeback = writeback
        self._arena = arena
        self._pool = pool
        self._lanes = lanes
        self._clock = clock
        self._stories = stories
        self._counters = counters
        self._divergences = divergences
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_shown: Callable[[Record, bool], None] = lambda record, rebuilt: None
        """Called whenever a blob has become readable, and whether a runner made it again."""
        self.on_diverged: Callable[[Record, TextEntry], None] = lambda record, was: None
        """Called when a rebuilt blob was taken though its bytes are not those of before."""

    async def seal(self, drafts: Sequence[Draft]) -> None:
        """Publish complete drafts, root side first; each has its answer when this returns.

        Once begun it runs to its end, even if the caller is cancelled.
        """
        if not drafts:
            return
        for draft in drafts:
            draft.closing = True
            self._residency.pin(draft.record)
        nbytes = sum(draft.record.nbytes for draft in drafts)
        if nbytes <= INLINE_DIGEST_BYTES and not any(d.copy or d.lenders for d in drafts):
            await self._seal(drafts)  # no thread is at work that would have to be waited for
            return
        task = asyncio.get_running_loop().create_task(self._seal(drafts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for the seals in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def compare(self, existing: Record, digest: bytes, retention: Retention) -> Answer:
        """The answer to a put of a key that was sealed before; `digest` b"" is not compared."""
        held = existing.ns.blobs.get(existing.key) if existing.gone else existing
        if held is None or held.hole:
            return "refused", "gone"
        if digest and digest != held.digest:
            return "divergent", "the key is sealed with other bytes"
        if self._writeback is None:
            held.retention = max(held.retention, self._kept_as(retention))
        elif retention > held.retention:
            self._writeback.raise_retention(held, retention)
        elif held.unsaved:
            self._writeback.save(held)
        return "exists", ""

    async def _seal(self, drafts: Sequence[Draft]) -> None:
        copies: dict[Draft, Record] = {}
        try:
            await self._copy_reachable(drafts, copies)
            drafts_left = [draft for draft in drafts if draft.answer is None]
            records = [copies.get(draft, draft.record) for draft in drafts_left]
            made = await self._digests(records)
            await self._parents_sealed(drafts_left)
        except BaseException:
            self._unpin(drafts)
            for draft in drafts:
                self._drafts.kill(draft, ("refused", "io_error"))
            raise
        else:
            self._unpin(drafts)
            for draft, record, digests in zip(drafts_left, records, made, strict=True):
                record.pieces, record.digest = digests
                self._publish(draft, record)
        finally:
            for copy in copies.values():
                if not copy.packed:  # nobody got to see it
                    self._residency.give_back(copy)

    def _unpin(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            self._residency.unpin(draft.record, used=False)

    async def _copy_reachable(self, drafts: Sequence[Draft], copies: dict[Draft, Record]) -> None:
        """Copy what a writer may still touch to where it cannot; no room refuses the draft."""
        for draft in drafts:
            if not (draft.copy or draft.lenders):
                continue
            own = draft.record
            copy = Record(own.ns, own.key, own.parent, own.nbytes, own.tokens)
            copy.retention = own.retention
            if not await self._residency.take_staging(copy):
                self._drafts.kill(draft, ("refused", "full"))
                continue
            copies[draft] = copy
            await asyncio.get_running_loop().run_in_executor(
                self._pool, np.copyto, self._array(copy), self._array(own)
            )

    async def _digests(self, records: Sequence[Record]) -> list[Digests]:
        views = [self._view(record) for record in records]
        if sum(view.nbytes for view in views) <= INLINE_DIGEST_BYTES:
            return _digest_all(views)
        loop = asyncio.get_running_loop()
        lanes = range(min(self._lanes, len(views)))
        shares = await asyncio.gather(
            *(
                loop.run_in_executor(self._pool, _digest_all, views[lane :: len(lanes)])
                for lane in lanes
            )
        )
        return [shares[i % len(lanes)][i // len(lanes)] for i in range(len(views))]

    async def _parents_sealed(self, drafts: Sequence[Draft]) -> None:
        """Wait for blobs that these continue and that are still being written.

        Not for ever: keys that name each other as parents would wait in a circle.
        """
        own = {draft.record.key for draft in drafts}
        parents = {parent for draft in drafts if (parent := draft.record.parent)}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drafts.ttl_s):
                for parent in parents:
                    while parent.key not in own and (rivals := _writing(parent)):
                        await rivals[0].wait_end()

    def _publish(self, draft: Draft, record: Record) -> None:
        """Make `record` visible under its key, unless another writer was first."""
        if draft.answer is not None:  # it was forgotten meanwhile
            return
        own, shown = draft.record, None
        record.retention = self._kept_as(record.retention)
        existing, remade = own.ns.blobs.get(own.key), draft.remade
        again = remade is not None and existing is not None and existing.cold
        if existing is not None and not (existing.hole or again):
            answer = self.compare(existing, record.digest, record.retention)
        elif remade is not None and not self._divergences.may_keep(
            record, _before(existing, remade), promised=again and _is_promised(existing)
        ):
            answer = ("refused", "divergent")
        elif existing is None:
            answer, shown = self._add(record)
        elif existing.hole:
            answer, shown = self._mend(record, existing)
        else:
            answer, shown = self._bring_back(record, existing)
        assert own.fill is not None
        if record is own and answer[0] in ("stored", "exists"):
            own.fill.finish()  # readers who follow it have every byte of what is published
        if shown is own:
            self._drafts.published(draft, answer)
        else:
            self._drafts.kill(draft, answer)
        if shown is not None:
            self._after_publish(shown, remade)

    def _kept_as(self, retention: Retention) -> Retention:
        """Without a disk nothing is durable."""
        return retention if self._writeback is not None else min(retention, Retention.STANDARD)

    def _add(self, record: Record) -> tuple[Answer, Record | None]:
        if record.parent is not None:
            parent = record.ns.blobs.get(record.parent.key)
            if parent is None or parent.hole:
                return ("refused", "orphan"), None
            record.parent, record.depth = parent, parent.depth + 1
        record.last_used = self._clock()
        self._residency.show(record)
        self._index.add(record)
        return ("stored", ""), record

    def _mend(self, record: Record, hole: Record) -> tuple[Answer, Record | None]:
        """A hole gets bytes again; blobs that continue it stay where they are."""
        followed = record.pins > 0  # by a reader, who keeps the extent under the draft's record
        resized = hole.pins > 0 and hole.nbytes != record.nbytes
        if followed or resized or not self._residency.reclaim(hole):
            return ("refused", "busy"), None
        hole.digest, hole.pieces = record.digest, record.pieces
        hole.nbytes, hole.tokens = record.nbytes, record.tokens
        hole.retention = max(hole.retention, record.retention)
        hole.last_used = self._clock()
        self._residency.hand_over(record, hole)
        return ("stored", ""), hole

    def _bring_back(self, record: Record, cold: Record) -> tuple[Answer, Record | None]:
        """What is on SSD alone gets its bytes in DRAM from a runner; others replace it there."""
        if record.pins or record.nbytes != cold.nbytes:  # its extent must change hands
            return ("refused", "busy"), None
        assert self._writeback is not None  # it is on SSD
        if record.digest == cold.digest:
            self._residency.hand_over(record, cold)
        else:
            self._writeback.hollow(cold, "diverged")
            cold.digest, cold.pieces = record.digest, record.pieces
            self._residency.hand_over(record, cold)
            self._writeback.write(cold, "diverged")
        return ("stored", ""), cold

    def _after_publish(self, record: Record, remade: TextEntry | None) -> None:
        if remade is None:
            self._stories.note(record, "put")
        else:
            self._counters.moved("none>dram", "rebuilt", record)
            self._stories.note(record, "none>dram", "rebuilt")
            if record.digest != remade.digest:
                self.on_diverged(record, remade)
        self.on_shown(record, remade is not None)
        self._residency.settle(record)
        if record.parent is not None:
            self._residency.settle(record.parent)
        if self._writeback is not None and record.retention is not Retention.VOLATILE:
            self._writeback.save(record)

    def _view(self, record: Record) -> memoryview:
        assert record.dram is not None
        return self._arena[record.dram.offset : record.dram.offset + record.nbytes]

    def _array(self, record: Record) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(self._view(record), np.uint8)


def _is_promised(existing: Record | None) -> bool:
    return existing is not None and existing.retention is Retention.DURABLE


def _before(existing: Record | None, remade: TextEntry) -> bytes:
    """The digest of the bytes that a rebuilt blob stands for."""
    return existing.digest if existing is not None and existing.held else remade.digest


def _writing(record: Record) -> list[Fill]:
    """Drafts under the key of `record`, unless that is held."""
    held = record.ns.blobs.get(record.key)
    if held is not None and not held.hole:
        return []
    drafts = record.ns.drafts.get(record.key, ())
    return [draft.fill for draft in drafts if draft.fill is not None]


def _digest_all(views: Sequence[memoryview]) -> list[Digests]:
    """Digest payloads (work)."""
    made = []
    for view in views:
        pieces = piece_digests(view)
        made.append((pieces, payload_digest(view.nbytes, pieces)))
    return made
