"""Keys of a chain of blobs: derived from token ids, or supplied by an engine.

    key = SHA-256("blobstore/key/1\\0" ‖ parent key ‖ token ids as u32 LE)

The parent of the first blob is the namespace id, so a key names the whole prefix and
all of the identity. A partial last blob is keyed alike: its preimage is shorter than
that of every full blob. Test vectors: docs/FORMAT.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from operator import index
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from blobstore.errors import InvalidRequest
from blobstore.fields import check_number

KEY_BYTES = 32
"""Length of the keys derived here."""
KEY_BYTES_MIN, KEY_BYTES_MAX = 8, 64
"""Lengths of keys that an engine may supply."""
ID_BYTES = 4
"""Token ids are u32 LE, wherever they travel or are kept."""

_TAG = b"blobstore/key/1\0"
_ID_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True, repr=False)
class Keys(Sequence[bytes]):
    """The keys of consecutive blobs, root side first, packed in one byte string.

    `tail_tokens` is the number of tokens of the last blob if that is partial, else 0.
    Slices are Keys again and keep it only while they hold the last key.
    """

    packed: bytes
    key_bytes: int = KEY_BYTES
    tail_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.packed, bytes):
            raise InvalidRequest(f"packed keys are bytes, found {type(self.packed).__name__}")
        check_number("key_bytes", self.key_bytes, KEY_BYTES_MIN, KEY_BYTES_MAX)
        check_number("tail_tokens", self.tail_tokens, 0, _ID_MAX if self.packed else 0)
        if len(self.packed) % self.key_bytes:
            raise InvalidRequest(
                f"{len(self.packed)} bytes of packed keys are no multiple of "
                f"key_bytes={self.key_bytes}"
            )

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Keys:
        """Keys from an engine: byte strings of 8 to 64 bytes, all of one length.

        Raises InvalidRequest naming the first position that is otherwise.
        """
        if isinstance(keys, Keys):
            return keys
        if isinstance(keys, str | bytes | bytearray | memoryview) or not isinstance(keys, Sequence):
            raise InvalidRequest(f"keys are a list of bytes, found {type(keys).__name__}")
        length = None
        for at, key in enumerate(keys):
            if not isinstance(key, bytes):
                raise InvalidRequest(f"keys[{at}] is {type(key).__name__}, not bytes")
            if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
                raise InvalidRequest(
                    f"keys[{at}] has {len(key)} bytes, keys have {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
                )
            if length is None:
                length = len(key)
            if len(key) != length:
                raise InvalidRequest(f"keys[{at}] has {len(key)} bytes, the others {length}")
        return cls(b"".join(keys), KEY_BYTES if length is None else length)

    def __len__(self) -> int:
        return len(self.packed) // self.key_bytes

    @overload
    def __getitem__(self, at: SupportsIndex) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Keys: ...
    def __getitem__(self, at: SupportsIndex | slice) -> bytes | Keys:
        """One key, or the keys of a slice of step 1."""
        size = self.key_bytes
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                raise InvalidRequest(f"a slice of a chain of keys has step 1, found {step}")
            stop = max(start, stop)
            tail = self.tail_tokens if start < stop == len(self) else 0
            return Keys(self.packed[start * size : stop * size], size, tail)
        start = range(len(self))[at] * size
        return self.packed[start : start + size]

    def __repr__(self) -> str:
        tail = f", tail of {self.tail_tokens} tokens" if self.tail_tokens else ""
        ends = f": {self[0].hex()[:12]}…{self[-1].hex()[:12]}" if self.packed else ""
        return f"<Keys {len(self)} of {self.key_bytes} bytes{ends}{tail}>"


def chain(parent: bytes, token_ids: object, tokens_per_blob: int, *, tail: bool = False) -> Keys:
    """Keys of the full blobs that `token_ids` fill after `parent`: a key, or a namespace id.

    With `tail`, a last partial run of tokens is keyed as well; nothing continues it.
    `token_ids` as in `packed_ids`.
    """
    if len(parent) != KEY_BYTES:
        raise InvalidRequest(f"a parent has {KEY_BYTES} bytes, found {len(parent)}")
    ids = packed_ids(token_ids)
    step = tokens_per_blob * ID_BYTES
    covered = ids.nbytes if tail else ids.nbytes - ids.nbytes % step
    start, keys = sha256(_TAG), []
    for at in range(0, covered, step):
        # A copy of the tagged state costs less than a new one.
        state = start.copy()
        state.update(parent)
        state.update(ids[at : at + step])
        parent = state.digest()
        keys.append(parent)
    return Keys(b"".join(keys), KEY_BYTES, covered % step // ID_BYTES)


def key_of(parent: bytes, ids: bytes) -> bytes:
    """The key of one blob with these token ids (u32 LE) after `parent`, as `chain` makes it."""
    return sha256(b"".join((_TAG, parent, ids))).digest()


def packed_ids(token_ids: object) -> memoryview:
    """Token ids as u32 LE bytes: equal for equal ids, however they were held.

    Takes sequences of ints, and one-dimensional buffers and arrays of any integer
    type, byte order and stride. Raises InvalidRequest for anything else (text, floats,
    booleans in an array, tables) and for ids beyond 32 bits, naming the first bad one.
    """
    if isinstance(token_ids, np.ndarray):
        return _packed_array(token_ids)
    if isinstance(token_ids, str | bytes | bytearray):
        raise InvalidRequest(f"token ids are ints, found {type(token_ids).__name__}")
    if isinstance(token_ids, list | tuple | range):
        return _packed_ints(token_ids)
    array_of_ids = _foreign_array(token_ids)
    if array_of_ids is not None:
        return _packed_array(array_of_ids)
    if isinstance(token_ids, Sequence):
        return _packed_ints(list(token_ids))
    raise InvalidRequest(
        f"token ids are a sequence of ints or an array, found {type(token_ids).__name__}"
    )


def _packed_ints(ids: Sequence[int]) -> memoryview:
    try:
        packed = array("I", ids)  # three times as fast as NumPy, and strict
    except (TypeError, OverflowError) as error:
        raise _first_bad(ids) from error
    return _little_endian(np.frombuffer(packed, dtype=np.uintc))


def _first_bad(ids: Sequence[Any]) -> InvalidRequest:
    for at, value in enumerate(ids):
        try:
            in_range = 0 <= index(value) <= _ID_MAX
        except TypeError:
            return InvalidRequest(f"token_ids[{at}] is {type(value).__name__}, not an int")
        if not in_range:
            return _out_of_range(at, value)
    return InvalidRequest("token ids changed while they were read")


def _out_of_range(at: int, value: object) -> InvalidRequest:
    return InvalidRequest(f"token_ids[{at}]={value} does not fit: ids are from 0 to {_ID_MAX}")


def _foreign_array(token_ids: Any) -> NDArray[Any] | None:
    """An array over another library's buffer or tensor; None if it is neither."""
    try:
        return np.asarray(memoryview(token_ids))
    except TypeError:
        if not hasattr(token_ids, "__array__"):
            return None
    except ValueError as error:
        raise InvalidRequest(f"token ids cannot be read from this buffer: {error}") from error
    try:
        return np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor on a device
        raise InvalidRequest(f"token ids cannot be read as an array: {error}") from error


def _packed_array(ids: NDArray[Any]) -> memoryview:
    if ids.size and ids.dtype.kind not in "iu":  # NumPy's arrays of nothing are of floats
        raise InvalidRequest(f"token ids are ints, found an array of {ids.dtype}")
    if ids.ndim != 1:
        raise InvalidRequest(f"token ids have one dimension, found shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() > _ID_MAX):
        at = int(np.flatnonzero((ids < 0) | (ids > _ID_MAX))[0])
        raise _out_of_range(at, ids[at])
    return _little_endian(ids)


def _little_endian(ids: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(ids, dtype="<u4").view(np.uint8).data
