"""A text as a row of a table: what is told of it in the clear, and the text, encrypted.

Each is encrypted (AES-256-GCM) under a key of its own, and bound to all that is in the
clear. That has a checksum as well: a row that names a wrong slot would have another text's
key wiped. The bytes are described in docs/FORMAT-disk.md.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_intdigest

from blobstore.text_entry import Noted, TextEntry, decode, encode

_NAMESPACE_BYTES = 16
"""Of a namespace's id, before a blob's key: what is encrypted is bound to all of it."""
ROW_BYTES = 200
"""What a row takes beside its own bytes: its key, its names in the tables, parts of pages."""
_NONCE = bytes(12)
"""A key is used once."""
_CHECKSUM = struct.Struct("<Q")
# slot of the key, payload bytes, when noted (wall), flags, bytes of key and parent
_HEAD = struct.Struct("<QQdBBB")
_NAME_START = _CHECKSUM.size + _HEAD.size
_HAS_TEXT = 1


class Row(NamedTuple):
    """A row, taken apart; of a damaged one nothing but its size is known."""

    slot: int
    """Of its key; below 0 if it is damaged."""
    nbytes: int
    """Of the payload that the text stands for."""
    noted_wall_s: float
    name: bytes
    """As of `name_of`; b"" if it is damaged."""
    parent: bytes
    """Name of the blob that it continues; b"" at the root."""
    bound: bytes
    """All of it that is not encrypted."""
    sealed: bytes
    size: int
    """Of the row and all that belongs to it."""

    @property
    def stored(self) -> bytes:
        """Its bytes in a table."""
        return _checksum(self.bound) + self.bound + self.sealed

    def open(self, secret: bytes, namespace_id: bytes) -> TextEntry | None:
        """The text, with its key; None if it is not to be had with that one."""
        try:
            body = AESGCM(secret).decrypt(_NONCE, self.sealed, namespace_id + self.bound)
            return decode(body, key_in(self.parent), self.nbytes)
        except (InvalidTag, ValueError):
            return None


def name_of(namespace_id: bytes, key: bytes) -> bytes:
    """What a blob is called in the tables."""
    return namespace_id[:_NAMESPACE_BYTES] + key


def key_in(name: bytes) -> bytes:
    """The key of the blob called `name`."""
    return name[_NAMESPACE_BYTES:]


def seal(
    noted: Noted, slot: int, secret: bytes, wall_s: float, compressor: zstandard.ZstdCompressor
) -> Row:
    """The row of a text that is encrypted with the key `secret`, which is in `slot`."""
    entry, namespace_id = noted.entry, noted.namespace.id
    flags = _HAS_TEXT if entry.text else 0
    head = _HEAD.pack(slot, entry.nbytes, wall_s, flags, len(noted.key), len(entry.parent))
    bound = head + name_of(namespace_id, noted.key) + entry.parent
    body = encode(entry, compressor)
    sealed = AESGCM(secret).encrypt(_NONCE, body, namespace_id + bound)
    return parse(_checksum(bound) + bound + sealed)


def parse(stored: bytes) -> Row:
    """Take a row's bytes apart."""
    size = len(stored) + ROW_BYTES
    damaged = Row(-1, 0, 0.0, b"", b"", b"", b"", size)
    if len(stored) < _NAME_START:
        return damaged
    slot, nbytes, noted, _, n_key, n_parent = _HEAD.unpack_from(stored, _CHECKSUM.size)
    middle = _NAME_START + _NAMESPACE_BYTES
    end = middle + n_key + n_parent
    bound = stored[_CHECKSUM.size : end]
    if stored[: _CHECKSUM.size] != _checksum(bound):
        return damaged
    prefix = stored[_NAME_START:middle]
    parent = prefix + stored[middle + n_key : end] if n_parent else b""
    name = stored[_NAME_START : middle + n_key]
    return Row(slot, nbytes, noted, name, parent, bound, stored[end:], size)


def _checksum(bound: bytes) -> bytes:
    return _CHECKSUM.pack(xxh3_64_intdigest(bound))
