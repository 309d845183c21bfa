"""What is known of one blob's tokens, and its bytes at rest.

Token ids compress best by the planes of their bytes: the high ones are nearly all equal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import zstandard

from blobstore.keys import ID_BYTES, key_of
from blobstore.namespace import HASH_SCHEME, Namespace

OBJECT_BYTES = 500
"""What one takes in memory beside its tokens and text, its key and its place in tables included."""

# position, bytes of token ids, bytes of text, bytes of the digest
_HEAD = struct.Struct("<QIIB")


@dataclass(frozen=True, slots=True, repr=False)
class TextEntry:
    """The tokens that a blob stands for, and what its payload was when it was last sealed."""

    parent: bytes
    """Key of the blob that it continues; empty at the root."""
    position: int
    """Tokens before it."""
    tokens: bytes
    """Its token ids as u32 LE."""
    nbytes: int
    """Of the payload."""
    digest: bytes
    """Of the payload."""
    text: str = ""
    """The caller's, of the run that this blob begins."""

    @property
    def n_tokens(self) -> int:
        """How many tokens it stands for."""
        return len(self.tokens) // ID_BYTES

    @property
    def memory_bytes(self) -> int:
        """About what it takes in memory."""
        return OBJECT_BYTES + len(self.tokens) + len(self.text)

    def belongs_to(self, namespace: Namespace, key: bytes) -> bool:
        """Whether its tokens are those of `key`; believed where an engine made the key."""
        if namespace.hash_scheme != HASH_SCHEME:
            return True
        return key_of(self.parent or namespace.id, self.tokens) == key

    def __repr__(self) -> str:  # never the tokens: it may end in a log
        return f"<TextEntry of {self.n_tokens} tokens at {self.position}>"


@dataclass(frozen=True, slots=True)
class Noted:
    """A text to be kept."""

    namespace: Namespace
    key: bytes
    entry: TextEntry
    only_new: bool
    """Nothing is to be done if one is known."""


def encode(entry: TextEntry, compressor: zstandard.ZstdCompressor) -> bytes:
    """All of `entry` but its parent and size, which are kept beside it."""
    planes = np.frombuffer(entry.tokens, np.uint8).reshape(-1, ID_BYTES).T.tobytes()
    text = entry.text.encode()
    head = _HEAD.pack(entry.position, len(planes), len(text), len(entry.digest))
    return head + entry.digest + compressor.compress(planes + text)


def decode(body: bytes, parent: bytes, nbytes: int) -> TextEntry:
    """Undo `encode`. Raises ValueError for bytes that are not its own."""
    try:
        position, n_planes, n_text, n_digest = _HEAD.unpack_from(body)
        start = _HEAD.size + n_digest
        plain = zstandard.decompress(body[start:], max_output_size=n_planes + n_text)
    except (struct.error, zstandard.ZstdError) as error:
        raise ValueError("not an entry") from error
    if len(plain) != n_planes + n_text or n_planes % ID_BYTES:
        raise ValueError("not an entry: its lengths are wrong")
    planes = np.frombuffer(plain, np.uint8, n_planes).reshape(ID_BYTES, -1)
    digest = body[_HEAD.size : start]
    text = plain[n_planes:].decode()
    return TextEntry(parent, position, planes.T.tobytes(), nbytes, digest, text)
