"""Chains of blobs for tests of rebuilding: keys and text entries without bytes."""

from __future__ import annotations

import struct
from hashlib import sha256

from blobstore.text_entry import TextEntry

TOKENS = 4
"""Of each blob."""


def key_of(path: str) -> bytes:
    """The key of the blob at the end of `path`, of which each letter is a blob."""
    return sha256(path.encode()).digest() if path else b""


def entry_of(path: str) -> TextEntry:
    """What is known of it."""
    position = TOKENS * (len(path) - 1)
    tokens = struct.pack("<I", ord(path[-1])) * TOKENS
    return TextEntry(key_of(path[:-1]), position, tokens, 64, b"digest" + key_of(path))


def run_of(path: str, start: int = 0) -> tuple[list[bytes], list[TextEntry]]:
    """The blobs on `path`, from number `start` on."""
    paths = [path[: n + 1] for n in range(start, len(path))]
    return [key_of(each) for each in paths], [entry_of(each) for each in paths]
