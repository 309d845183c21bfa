"""What callers say about whole contexts: that one replaces another, or will be needed soon."""

from __future__ import annotations

import asyncio
from itertools import takewhile

from blobstore.index import Index, NamespaceState, Record
from blobstore.protocol import KEYS_MAX
from blobstore.readers import Readers
from blobstore.recall import Recall
from blobstore.sessions import Sessions
from blobstore.superseded import Superseded
from blobstore.texts import Texts
from blobstore.uses import Uses

TEXTS_AT_ONCE = 64
"""Read on the way up a context whose end has left: it may soon reach what is held."""


class Contexts:
    """Verbs of the store. Used on the event loop only."""

    def __init__(
        self,
        index: Index,
        sessions: Sessions,
        superseded: Superseded,
        uses: Uses,
        readers: Readers,
        recall: Recall,
        texts: Texts,
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._superseded = superseded
        self._uses = uses
        self._readers = readers
        self._recall = recall
        self._texts = texts

    async def supersede(self, ns: NamespaceState, old_leaf: bytes, new_leaf: bytes) -> int:
        """The context that ends at `old_leaf` goes on as the one that ends at `new_leaf`.

        How many blobs only the old one has: they leave first, after a grace period, unless
        somebody uses them. 0 where either is not held, or others go on from the old one.
        """
        await self._catch_up()
        return await self._superseded.replace(ns, old_leaf, new_leaf)

    async def namespace_of(self, session: str) -> NamespaceState | None:
        """Where the context of a session is; None if that is not known."""
        await self._catch_up()
        known = self._sessions.find(session)
        return self._index.namespaces.get(known.namespace_id) if known is not None else None

    async def prefetch(self, session: str) -> int:
        """Start to bring the context of a session into DRAM; how many blobs are on their way.

        What is on SSD is loaded, what is left as a text alone is rebuilt, as far as the terms of
        its namespace have it and somebody serves that. What is left of it otherwise comes back.
        """
        ns, known = await self.namespace_of(session), self._sessions.find(session)
        if ns is None or known is None:
            return 0
        leaf, missing = ns.blobs.get(known.key), list[bytes]()
        if leaf is None and self._recall.possible(ns):
            leaf, missing = await self._up_to_what_is_held(ns, known.key)
        if leaf is None and not missing:
            leaf = ns.blobs.get(known.held)
        held = _keys(leaf) if leaf is not None else []
        n = self.prefetch_keys(ns, b"".join(held), len(held[0])) if held else 0
        if missing and self._recall.bring_ahead(ns, [*held, *missing]):
            n += len(missing)
        return n

    def prefetch_keys(self, ns: NamespaceState, keys: bytes, key_bytes: int) -> int:
        """Start to load the leading blobs from SSD; how many are on their way."""
        leaf = ns.blobs.get(keys[-key_bytes:])
        if leaf is not None:
            self._superseded.used(leaf)
        return self._readers.prefetch(ns, keys, key_bytes)

    async def _catch_up(self) -> None:
        """Know of all uses until now, so that sessions end where they do."""
        for _ in range(len(self._uses)):
            self._uses.drain()
            if not len(self._uses):
                break
            await asyncio.sleep(0)

    async def _up_to_what_is_held(
        self, ns: NamespaceState, key: bytes
    ) -> tuple[Record | None, list[bytes]]:
        """The last blob that is held of the context that ends at `key`, and the keys after it.

        No keys where the texts between them are not all known.
        """
        missing: list[bytes] = []
        while key and key not in ns.blobs:
            above = await self._texts.ancestors(ns, key, TEXTS_AT_ONCE)
            if not above or len(missing) >= KEYS_MAX:
                return None, []
            for name, entry in above:
                if name in ns.blobs:
                    break
                missing.append(name)
                key = entry.parent
        missing.reverse()
        return ns.blobs.get(key), missing


def _keys(leaf: Record) -> list[bytes]:
    """Of a context, root side first, as far as they are of one length."""
    keys = [record.key for record in leaf.path()]
    return list(takewhile(lambda key: len(key) == len(keys[0]), keys))
