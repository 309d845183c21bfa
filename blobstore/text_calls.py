"""What callers say and ask about the texts of blobs: verbs of the store beside `Texts`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from blobstore.drafts import Drafts
from blobstore.index import Index, NamespaceState, Record
from blobstore.losses import Losses
from blobstore.named_keys import checked, split
from blobstore.put_texts import check_tokens, entries_told
from blobstore.rebuilds import Rebuilds
from blobstore.recall import Recall
from blobstore.text_entry import TextEntry
from blobstore.texts import Texts


class TextCalls:
    """Keys of one call are packed, root side first. Used on the event loop only."""

    def __init__(
        self,
        index: Index,
        texts: Texts,
        losses: Losses,
        recall: Recall,
        rebuilds: Rebuilds,
        drafts: Drafts,
        pool: Executor,
    ) -> None:
        self._index = index
        self._texts = texts
        self._losses = losses
        self._recall = recall
        self._rebuilds = rebuilds
        self._drafts = drafts
        self._pool = pool

    def rebuildable(
        self, namespace_id: bytes, keys: bytes, key_bytes: int, n_held: int
    ) -> Awaitable[tuple[int, float]] | None:
        """How many blobs after the `n_held` leading ones could be rebuilt, and in what time.

        The time is 0 if it is not known. None: nothing could be, as nobody is there to do it.
        """
        state = checked(self._index, namespace_id, keys, key_bytes)
        if n_held == len(keys) // key_bytes or not self._recall.possible(state):
            return None
        return self._rebuildable(state, split(keys, key_bytes)[n_held:], n_held)

    async def note(
        self, namespace_id: bytes, keys: bytes, key_bytes: int, tokens: bytes, text: str
    ) -> int:
        """Keep the tokens of a chain that was put before: of how many blobs, which are held.

        `tokens` are the ids of all keys as u32 LE, `text` the caller's of the first. Raises
        InvalidRequest if they do not fit.
        """
        state = checked(self._index, namespace_id, keys, key_bytes)
        entries = entries_told(state, split(keys, key_bytes), tokens, text)
        work = partial(check_tokens, state.namespace, entries)
        await asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._texts.note(state, entries)
        return len(entries)

    async def forget(self, namespace_id: bytes, keys: bytes, key_bytes: int) -> int:
        """Drop blobs and all that continue them, and erase the texts of all that is known to.

        How many blobs had bytes or a text. Raises StorageFailed if a text may still be on disk.
        """
        state = checked(self._index, namespace_id, keys, key_bytes)
        named = split(keys, key_bytes)
        dropped: set[bytes] = set()
        for key in named:
            record = state.blobs.get(key)
            if record is not None:
                dropped.update(each.key for each in self._index.subtree(record))
                self._losses.drop(record)
        forgotten = dropped | await self._texts.forget(state, dropped.union(named))
        self._recall.forget(state, forgotten.union(named))
        self._rebuilds.forget(state, forgotten.union(named))
        self._drafts.forget(state, forgotten.union(named))
        made = [key for key in forgotten if key in state.blobs]  # by a runner, meanwhile
        for key in made:
            if (record := state.blobs.get(key)) is not None:
                self._losses.drop(record)
        if made:  # their texts may have been noted again
            await self._texts.forget(state, made)
        return len(forgotten)

    def divergence(self, ns: NamespaceState) -> str:
        """What is agreed on for rebuilt blobs with other bytes."""
        return self._texts.terms(ns).divergence or "accept"

    def diverged(self, record: Record, was: TextEntry) -> None:
        """The digest of before is that of the bytes that are here now."""
        self._texts.note(record.ns, {record.key: replace(was, digest=record.digest)})

    async def _rebuildable(
        self, state: NamespaceState, keys: list[bytes], n_held: int
    ) -> tuple[int, float]:
        n = await self._texts.known(state, keys)
        per_blob = state.namespace.tokens_per_blob
        estimate_s = None
        if n:
            estimate_s = await self._rebuilds.estimate_s(state, n_held * per_blob, n * per_blob)
        return n, estimate_s or 0.0
