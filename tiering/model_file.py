"""What was learned, kept over restarts: named arrays and plain values, in one sealed file.

The body is a head (msgpack) and the arrays' bytes, one after the other, little-endian.
Nothing in it is run: whoever reads it gets arrays of the types and shapes it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from blobstore.tiering.sealed_file import Unusable, read_sealed, write_sealed

Arrays = Mapping[str, npt.NDArray[np.generic]]
Values = Mapping[str, str | int | float]
LoadedArrays = dict[str, npt.NDArray[np.generic]]
LoadedValues = dict[str, str | int | float]

_KIND = b"tiering\0"
_FORMAT = 1
_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")


class _Array(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: list[int]


class _Head(msgspec.Struct, array_like=True):
    model_version: int
    values: LoadedValues
    arrays: list[_Array]


def save_model(path: Path, model_version: int, arrays: Arrays, values: Values) -> None:
    """Replace the file at `path`, as `write_sealed` does. Blocks; raises OSError."""
    plain = {name: array.astype(array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    assert all(array.dtype.str in _DTYPES for array in plain.values())
    heads = [_Array(name, array.dtype.str, list(array.shape)) for name, array in plain.items()]
    head = msgspec.msgpack.encode(_Head(model_version, dict(values), heads))
    parts = [len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in plain.values())]
    write_sealed(path, _KIND, _FORMAT, b"".join(parts))


def load_model(path: Path, model_version: int) -> tuple[LoadedArrays, LoadedValues]:
    """The arrays and values of the file at `path`. Raises Unusable, which says why."""
    body = read_sealed(path, _KIND, _FORMAT)
    n_head = int.from_bytes(body[:4], "little")
    try:
        head = msgspec.msgpack.decode(body[4 : 4 + n_head], type=_Head)
        if head.model_version != model_version:
            raise Unusable(
                f"the model is of version {head.model_version}, this program's is {model_version}"
            )
        return _arrays(head.arrays, memoryview(body)[4 + n_head :]), head.values
    except (msgspec.MsgspecError, ValueError) as error:
        raise Unusable(f"the model cannot be read: {error}") from error


def _arrays(heads: list[_Array], body: memoryview) -> LoadedArrays:
    arrays: LoadedArrays = {}
    start = 0
    for head in heads:
        if head.dtype not in _DTYPES or any(length < 0 for length in head.shape):
            raise ValueError(f"array {head.name} has no type or shape that is known")
        dtype = np.dtype(head.dtype)
        end = start + dtype.itemsize * prod(head.shape)
        if end > len(body):
            raise ValueError(f"array {head.name} is cut short")
        arrays[head.name] = np.frombuffer(body[start:end], dtype).reshape(head.shape).copy()
        start = end
    if start != len(body):
        raise ValueError("there is more than the arrays")
    return arrays
