"""Memory of callers: what is taken, without copying, and what is refused."""

from __future__ import annotations

import array
import ctypes
import mmap
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blobstore.clients.buffers import buffer_of, buffers_for
from blobstore.errors import InvalidRequest, SizeMismatch

N = 24


def host_buffers() -> dict[str, Callable[[], Any]]:
    return {
        "bytearray": lambda: bytearray(N),
        "memoryview": lambda: memoryview(bytearray(N)),
        "memoryview of floats": lambda: memoryview(array.array("d", [0.0] * 3)),
        "array": lambda: array.array("H", [0] * 12),
        "ctypes": lambda: (ctypes.c_int16 * 12)(),
        "mmap": lambda: mmap.mmap(-1, N),
        "floats": lambda: np.zeros(6, np.float32),
        "halves": lambda: np.zeros((3, 4), np.float16),
        "table": lambda: np.zeros((2, 3), np.int32),
        "big-endian": lambda: np.zeros(3, ">u8"),
        "records": lambda: np.zeros(2, np.dtype([("a", "<u4"), ("b", "<f8")])),
        "scalar": lambda: np.zeros((), "V24"),
        "a contiguous slice": lambda: np.zeros((4, 24), np.uint8)[1],
        "dlpack": lambda: Tensor(np.zeros(6, np.float32)),
        "dlpack of old": lambda: OldTensor(np.zeros(6, np.float32)),
    }


class Tensor:
    """What has DLPack and no buffer, as tensors do."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()


class OldTensor(Tensor):
    """From before DLPack could say what is read-only."""

    def __dlpack__(self, **options: Any) -> Any:
        if "max_version" in options:
            raise TypeError("unexpected keyword argument")
        return self.held.__dlpack__()


def content(owner: Any) -> bytes:
    if isinstance(owner, Tensor):
        owner = owner.held
    data: bytes = owner.tobytes() if hasattr(owner, "tobytes") else bytes(owner)
    return data


@pytest.mark.parametrize("name", host_buffers())
def test_all_kinds_of_contiguous_memory_are_written_and_read_in_place(name: str) -> None:
    owner = host_buffers()[name]()
    buffer = buffer_of(owner, writable=True)
    assert buffer.nbytes == N
    data = np.arange(N, dtype=np.uint8)
    buffer.load(0, data)
    buffer.load(4, data[10:12])
    expected = bytes([0, 1, 2, 3, 10, 11, *range(6, N)])
    assert content(owner) == expected
    found = np.zeros(6, np.uint8)
    buffer.store(2, found)
    assert found.tobytes() == expected[2:8]
    assert bytes(buffer.on_host()) == expected
    cut = buffer.cut(4, 8)
    assert cut.nbytes == 4
    assert bytes(cut.on_host()) == expected[4:8]


@pytest.mark.parametrize(
    "source",
    [b"abc", memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)],
    ids=["bytes", "memoryview", "array"],
)
def test_read_only_memory_is_read_but_not_written(source: Any) -> None:
    assert bytes(buffer_of(source, writable=False).on_host()) == b"abc"
    with pytest.raises(InvalidRequest, match="is read-only"):
        buffer_of(source, writable=True)


def test_a_tensor_that_says_it_is_read_only_is_believed() -> None:
    held = np.zeros(3, np.float32)
    held.flags.writeable = False
    with pytest.raises(InvalidRequest, match="is read-only"):
        buffer_of(Tensor(held), writable=True)


def test_an_old_tensor_is_kept_while_its_memory_is_used() -> None:
    tensor = OldTensor(np.zeros(6, np.float32))
    buffer = buffer_of(tensor, writable=True)
    held = tensor.held
    before = sys.getrefcount(held)
    del tensor
    buffer.load(0, np.full(N, 255, np.uint8))
    assert held.tobytes() == b"\xff" * N
    del buffer
    assert sys.getrefcount(held) < before


@pytest.mark.parametrize("empty", [b"", bytearray(), np.zeros(0, np.float32), np.zeros((0, 3))])
def test_empty_memory_has_no_bytes(empty: Any) -> None:
    assert buffer_of(empty, writable=False).nbytes == 0


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (np.zeros((4, 4), np.uint8)[:, ::2], "not contiguous"),
        (np.asfortranarray(np.zeros((3, 4), np.uint8)), "not contiguous"),
        (memoryview(bytearray(8))[::2], "no contiguous memory"),
        (Tensor(np.zeros((4, 4), np.uint8)[:, ::2]), "not contiguous"),
        (np.array([object()]), "no contiguous memory"),
        ("text", "no contiguous memory"),
        (None, "no contiguous memory"),
        (5, "no contiguous memory"),
    ],
    ids=["strided", "columns first", "strided view", "strided tensor", "objects", "str", "None",
         "int"],
)  # fmt: skip
def test_other_things_are_refused(source: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        buffer_of(source, writable=False)


def test_a_list_gives_each_blob_its_buffer() -> None:
    found = buffers_for([b"ab", b"cde"], [2, 3], writable=False)
    assert [bytes(buffer.on_host()) for buffer in found] == [b"ab", b"cde"]


def test_one_buffer_is_cut_for_all_blobs() -> None:
    found = buffers_for(b"abcde", [2, 0, 3], writable=False)
    assert [bytes(buffer.on_host()) for buffer in found] == [b"ab", b"", b"cde"]
    with pytest.raises(SizeMismatch, match=r"5 bytes, the layout declares 6 for 2 blobs"):
        buffers_for(b"abcde", [3, 3], writable=False)


def test_memory_of_a_gpu_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'kv-blobstore\[gpu\]'"):
        buffer_of(FakeDeviceArray(np.zeros(4, np.uint8)), writable=True)


class FakeDeviceArray:
    """Stands for a cupy array: bytes that only `get` and `set` reach."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self._held = held
        self.flags = held.flags
        self.nbytes = held.nbytes
        self.shape = held.shape

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012  as found on instances

    def reshape(self, *shape: int) -> FakeDeviceArray:
        return FakeDeviceArray(self._held.reshape(*shape))

    def view(self, dtype: Any) -> FakeDeviceArray:
        return FakeDeviceArray(self._held.view(dtype))

    def __getitem__(self, at: slice) -> FakeDeviceArray:
        return FakeDeviceArray(self._held[at])

    def set(self, host: np.ndarray[Any, Any]) -> None:
        self._held[:] = host

    def get(self, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        if out is None:
            return self._held.copy()
        out[:] = self._held
        return out


class OnDeviceOnly:
    """A tensor on a CUDA device that has DLPack only."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self.held = held

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


@pytest.mark.parametrize("kind", [FakeDeviceArray, OnDeviceOnly])
def test_memory_of_a_gpu_is_reached_through_cupy(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy: Any = types.ModuleType("cupy")
    cupy.uint8 = np.uint8
    cupy.asarray = lambda source: source
    cupy.from_dlpack = lambda source: FakeDeviceArray(source.held)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    held = np.zeros((2, 3), np.uint16)
    buffer = buffer_of(kind(held), writable=True)
    assert buffer.nbytes == 12
    buffer.load(2, np.arange(4, dtype=np.uint8))
    assert held.tobytes() == bytes([0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0])
    found = np.zeros(3, np.uint8)
    buffer.store(3, found)
    assert found.tobytes() == bytes([1, 2, 3])
    assert bytes(buffer.cut(4, 6).on_host()) == bytes([2, 3])
    with pytest.raises(InvalidRequest, match="not contiguous"):
        buffer_of(kind(np.zeros((4, 4), np.uint8)[:, ::2]), writable=False)
