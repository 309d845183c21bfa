"""Packed keys of a call: checked once, where it comes in, and taken apart."""

from __future__ import annotations

from blobstore.errors import InvalidRequest
from blobstore.index import Index, NamespaceState
from blobstore.keys import KEY_BYTES_MAX, KEY_BYTES_MIN
from blobstore.protocol import KEYS_MAX


def checked(index: Index, namespace_id: bytes, keys: bytes, key_bytes: int) -> NamespaceState:
    """The namespace that a call names, if it may name these keys.

    Raises UnknownNamespace, or InvalidRequest for keys of other lengths or too many.
    """
    state = index.namespaces.get(namespace_id)
    if state is None:
        state = index.namespace(namespace_id)  # raises
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX or len(keys) % key_bytes or not keys:
        raise InvalidRequest(
            f"{len(keys)} bytes are not one or more keys of {key_bytes} bytes "
            f"({KEY_BYTES_MIN} to {KEY_BYTES_MAX} each)"
        )
    if len(keys) > KEYS_MAX * key_bytes:
        raise InvalidRequest(f"{len(keys) // key_bytes} keys in a call that takes {KEYS_MAX}")
    return state


def split(keys: bytes, key_bytes: int) -> list[bytes]:
    """The keys one by one."""
    return [keys[start : start + key_bytes] for start in range(0, len(keys), key_bytes)]
