"""Texts that were noted and are not at rest yet: they can be read, and forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from blobstore.text_entry import Noted

Name = tuple[bytes, bytes]
"""Namespace id and key."""


class PendingTexts:
    """At most `most_bytes` of them; used on the event loop only."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._waiting: dict[Name, Noted] = {}
        self._leaving: dict[Name, Noted] = {}
        """Being written; they are put back if that fails."""
        self._children: dict[Name, set[bytes]] = {}
        """Of the blobs that those which wait or leave continue."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._leaving)

    @property
    def waiting(self) -> bool:
        """There is something to take."""
        return bool(self._waiting)

    def get(self, namespace_id: bytes, key: bytes) -> Noted | None:
        """What was noted last of a blob."""
        name = namespace_id, key
        return self._waiting.get(name) or self._leaving.get(name)

    def add(self, noted: Noted) -> bool:
        """Let a text wait; False if there is no room for it."""
        name = noted.namespace.id, noted.key
        before = self.get(*name)
        if before is not None:
            if noted.only_new:
                return True
            if not noted.entry.text and before.entry.tokens == noted.entry.tokens:
                noted = replace(noted, entry=replace(noted.entry, text=before.entry.text))
        if self._nbytes + noted.entry.memory_bytes > self._most_bytes:
            return False
        if name in self._waiting:
            self._remove(name, self._waiting)
        self._insert(name, noted)
        return True

    def take(self, most: int, most_bytes: int) -> list[Noted]:
        """Those that have waited longest, to be written; then `taken` or `put_back`."""
        assert not self._leaving
        for name, noted in self._waiting.items():
            if len(self._leaving) == most or most_bytes < 0:
                break
            self._leaving[name] = noted
            most_bytes -= noted.entry.memory_bytes
        for name in self._leaving:
            del self._waiting[name]
        return list(self._leaving.values())

    def taken(self) -> None:
        """What was taken is at rest."""
        for name in list(self._leaving):
            self._remove(name, self._leaving)

    def put_back(self) -> None:
        """What was taken was not written; what was noted meanwhile stands."""
        for name in [name for name in self._leaving if name in self._waiting]:
            self._remove(name, self._leaving)
        self._waiting = self._leaving | self._waiting
        self._leaving = {}

    def drop(self, namespace_id: bytes, keys: Iterable[bytes]) -> set[bytes]:
        """Forget those of `keys`, and of blobs that continue them; which those were."""
        dropped: set[bytes] = set()
        reached = list(keys)
        for key in reached:
            name = namespace_id, key
            reached += self._children.get(name, ())
            for texts in (self._waiting, self._leaving):
                if name in texts:
                    self._remove(name, texts)
                    dropped.add(key)
        return dropped

    def _insert(self, name: Name, noted: Noted) -> None:
        self._waiting[name] = noted
        self._nbytes += noted.entry.memory_bytes
        self._children.setdefault(_above(noted), set()).add(noted.key)

    def _remove(self, name: Name, texts: dict[Name, Noted]) -> None:
        noted = texts.pop(name)
        self._nbytes -= noted.entry.memory_bytes
        other = self.get(*name)
        if other is not None and _above(other) == _above(noted):
            return
        siblings = self._children[_above(noted)]
        siblings.discard(noted.key)
        if not siblings:
            del self._children[_above(noted)]


def _above(noted: Noted) -> Name:
    return noted.namespace.id, noted.entry.parent
