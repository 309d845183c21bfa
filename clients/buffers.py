"""Memory of callers: anything with the buffer protocol, DLPack or a CUDA array interface."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from blobstore.clients.mapping import Bytes
from blobstore.errors import InvalidRequest, SizeMismatch

GPU_HINT = "memory of a GPU needs cupy: pip install 'kv-blobstore[gpu]'"

_DLPACK_CUDA = 2  # DLDeviceType


class Buffer(Protocol):
    """Contiguous bytes on the host or on a device. The owner keeps them alive and in place."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def load(self, start: int, source: Bytes) -> None:
        """Copy `source` to its bytes from `start` on."""

    def store(self, start: int, target: Bytes) -> None:
        """Copy its bytes from `start` on to `target`, filling that."""

    def cut(self, start: int, end: int) -> Buffer:
        """Its bytes from `start` to `end`, as a buffer."""

    def on_host(self) -> memoryview:
        """Its bytes, to be read: in place if it is host memory, else a copy."""


class HostBuffer:
    """Bytes in this process's memory. Copies release the GIL."""

    __slots__ = ("_array",)

    def __init__(self, array: Bytes) -> None:
        self._array = array

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._array.nbytes

    def load(self, start: int, source: Bytes) -> None:
        """Copy `source` to its bytes from `start` on."""
        np.copyto(self._array[start : start + source.nbytes], source)

    def store(self, start: int, target: Bytes) -> None:
        """Copy its bytes from `start` on to `target`, filling that."""
        np.copyto(target, self._array[start : start + target.nbytes])

    def cut(self, start: int, end: int) -> Buffer:
        """Its bytes from `start` to `end`, as a buffer."""
        return HostBuffer(self._array[start:end])

    def on_host(self) -> memoryview:
        """Its bytes, to be read, in place."""
        return self._array.data


class DeviceBuffer:
    """Bytes on a GPU, as a cupy array of u8. Copies are done when the call returns."""

    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self._array.nbytes)

    def load(self, start: int, source: Bytes) -> None:
        """Copy `source` to its bytes from `start` on."""
        self._array[start : start + source.nbytes].set(source)

    def store(self, start: int, target: Bytes) -> None:
        """Copy its bytes from `start` on to `target`, filling that."""
        self._array[start : start + target.nbytes].get(out=target)

    def cut(self, start: int, end: int) -> Buffer:
        """Its bytes from `start` to `end`, as a buffer."""
        return DeviceBuffer(self._array[start:end])

    def on_host(self) -> memoryview:
        """A copy of its bytes, to be read."""
        return memoryview(self._array.get())


def buffers_for(buffers: object, sizes: Sequence[int], *, writable: bool) -> list[Buffer]:
    """A buffer for each of `sizes`: from a list of as many, or cut from one for all.

    Raises SizeMismatch with both numbers where a size differs, and InvalidRequest for
    objects that are no contiguous memory, or read-only where `writable`.
    """
    if not isinstance(buffers, list | tuple):
        return _cut(buffer_of(buffers, writable=writable), sizes)
    if len(buffers) != len(sizes):
        raise SizeMismatch(f"{len(sizes)} keys take {len(sizes)} buffers, found {len(buffers)}")
    found = [buffer_of(buffer, writable=writable) for buffer in buffers]
    for at, (buffer, nbytes) in enumerate(zip(found, sizes, strict=True)):
        if buffer.nbytes != nbytes:
            raise SizeMismatch(
                f"buffers[{at}] has {buffer.nbytes} bytes, the layout declares {nbytes}"
            )
    return found


def _cut(whole: Buffer, sizes: Sequence[int]) -> list[Buffer]:
    total = sum(sizes)
    if whole.nbytes != total:
        raise SizeMismatch(
            f"the buffer has {whole.nbytes} bytes, the layout declares {total} for {len(sizes)} "
            "blobs"
        )
    cut: list[Buffer] = []
    start = 0
    for nbytes in sizes:
        cut.append(whole.cut(start, start + nbytes))
        start += nbytes
    return cut


def buffer_of(source: Any, *, writable: bool) -> Buffer:
    """The bytes of `source`, without copying; InvalidRequest if it has none that can be used."""
    if hasattr(source, "__cuda_array_interface__") or _on_cuda(source):
        return DeviceBuffer(_device_bytes(source))
    try:
        array = _host_bytes(source, writable=writable)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(
            f"{type(source).__name__} is no contiguous memory: {error} (wanted: a buffer, a NumPy "
            "array, a tensor with DLPack; of a dtype unknown to NumPy, its view as bytes)"
        ) from error
    if writable and not array.flags.writeable:
        raise InvalidRequest(f"{type(source).__name__} is read-only, and is to be written to")
    return HostBuffer(array)


def _host_bytes(source: Any, *, writable: bool) -> Bytes:
    if isinstance(source, np.ndarray):
        return _flat(source)
    try:
        memoryview(source)
    except TypeError:
        if not hasattr(source, "__dlpack__"):
            raise
    else:
        # Not the view's own cast to bytes, which refuses formats that Python does not know.
        return np.frombuffer(source, np.uint8)
    return _from_dlpack(source, writable=writable)


def _flat(array: np.ndarray[Any, Any]) -> Bytes:
    if not array.flags.c_contiguous:
        raise InvalidRequest(
            f"an array of shape {array.shape} and strides {array.strides} is not contiguous: "
            "make a contiguous copy"
        )
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def _from_dlpack(source: Any, *, writable: bool) -> Bytes:
    flat = _flat(np.from_dlpack(source))
    if flat.flags.writeable or not writable or _tells_writability(source):
        return flat
    # NumPy takes memory for read-only that comes without word on it; a tensor is not.
    memory = (ctypes.c_uint8 * flat.nbytes).from_address(flat.ctypes.data)
    memory._exporter = flat  # type: ignore[attr-defined]  # lives as long as the memory is used
    writable_flat: Bytes = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    return writable_flat


def _tells_writability(source: Any) -> bool:
    """Whether the exporter speaks DLPack 1.0, which has a flag for read-only memory."""
    try:
        return "versioned" in repr(source.__dlpack__(max_version=(1, 0)))
    except TypeError:
        return False


def _on_cuda(source: Any) -> bool:
    where = getattr(source, "__dlpack_device__", None)
    return where is not None and where()[0] == _DLPACK_CUDA


def _device_bytes(source: Any) -> Any:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise InvalidRequest(GPU_HINT) from error
    if hasattr(source, "__cuda_array_interface__"):
        array = cupy.asarray(source)
    else:
        array = cupy.from_dlpack(source)
    if not array.flags.c_contiguous:
        raise InvalidRequest(f"a device array of shape {array.shape} is not contiguous")
    return array.reshape(-1).view(cupy.uint8)
