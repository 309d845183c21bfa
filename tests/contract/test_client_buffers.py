"""The clients' contract: copies from and to the memory of callers."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, Client, Keys, KVLayout, LayerGroup, Namespace
from blobstore.errors import InvalidRequest, SizeMismatch
from tests.support.blobs import chain, opaque, payload_of, payloads_of

NBYTES = 24 << 10
N = 5


@pytest.fixture
def ns(kv: Any, model: str) -> BoundNamespace:
    bound: BoundNamespace = kv.namespace(opaque(NBYTES, model))
    return bound


@pytest.fixture
def keys(ns: BoundNamespace) -> Keys:
    return chain(ns.namespace, 1, N)


class Tensor:
    """Memory that is reached by DLPack alone, as a tensor of another library."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()

    def tobytes(self) -> bytes:
        return self.held.tobytes()


def of_dtype(dtype: str) -> Callable[[bytes], Any]:
    """Takes bytes to a table of this dtype."""
    return lambda data: np.frombuffer(bytearray(data), dtype).reshape(2, 4, -1)


MEMORY: dict[str, Callable[[bytes], Any]] = {
    **{dtype: of_dtype(dtype) for dtype in ("f2", "f4", ">f8", "i1", "u2", "i8", "c8", "V12")},
    "bytearray": bytearray,
    "memoryview": lambda data: memoryview(bytearray(data)),
    "memoryview of halves": lambda data: memoryview(of_dtype("f2")(data)),
    "array": lambda data: array("d", data),
    "dlpack": lambda data: Tensor(of_dtype("f4")(data)),
    "rows of a table": lambda data: np.frombuffer(bytearray(data) * 2, "f2").reshape(2, -1)[1],
}


def content(memory: Any) -> bytes:
    data: bytes = memory.tobytes() if hasattr(memory, "tobytes") else bytes(memory)
    return data


@pytest.mark.parametrize("name", MEMORY)
def test_bytes_are_the_same_whatever_held_them(
    kv: Any, ns: BoundNamespace, keys: Keys, other: Client, name: str
) -> None:
    contents = payloads_of(keys, NBYTES)
    assert kv.put_from(ns, keys, [MEMORY[name](data) for data in contents]) == ["stored"] * N
    assert [bytes(view) for view in other.get(ns, keys)] == contents
    targets = [MEMORY[name](bytes(NBYTES)) for _ in keys]
    assert kv.get_into(ns, keys, targets) == N
    assert [content(target) for target in targets] == contents


def test_what_can_only_be_read_can_be_put(kv: Any, ns: BoundNamespace, keys: Keys) -> None:
    contents = payloads_of(keys, NBYTES)
    assert kv.put_from(ns, keys[:3], contents[:3]) == ["stored"] * 3
    with kv.get(ns, keys[:3]) as lease:  # also what is leased itself
        copies = chain(ns.namespace, 2, 3)
        assert kv.put_from(ns, copies, list(lease)) == ["stored"] * 3
    assert [bytes(view) for view in kv.get(ns, copies)] == contents[:3]


@pytest.mark.parametrize(
    "target", [bytes(NBYTES), memoryview(bytes(NBYTES)), np.broadcast_to(np.uint8(0), NBYTES)]
)
def test_what_can_only_be_read_is_no_target(
    kv: Any, ns: BoundNamespace, keys: Keys, target: Any
) -> None:
    kv.put_from(ns, keys[:1], [bytes(NBYTES)])
    with pytest.raises(InvalidRequest, match=r"read-only|not contiguous"):
        kv.get_into(ns, keys[:1], [target])


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (np.zeros((2, NBYTES), np.uint8)[:, ::2], "not contiguous"),
        (np.zeros((96, 256), np.uint8, order="F"), "not contiguous"),
        (Tensor(np.zeros((2, NBYTES), np.uint8)[:, ::2]), "not contiguous"),
        (memoryview(bytearray(2 * NBYTES))[::2], "no contiguous memory"),
        ("x" * NBYTES, "no contiguous memory"),
        (None, "no contiguous memory"),
    ],
    ids=["strided", "columns first", "strided tensor", "strided view", "text", "None"],
)
def test_memory_that_is_not_in_one_run_is_refused(
    kv: Any, ns: BoundNamespace, keys: Keys, memory: Any, why: str
) -> None:
    for copy in (kv.put_from, kv.get_into):
        with pytest.raises(InvalidRequest, match=why):
            copy(ns, keys[:1], [memory])
    assert kv.exists(ns, keys) == [False] * N


def test_a_wrong_size_is_refused_with_both_numbers(kv: Any, ns: BoundNamespace, keys: Keys) -> None:
    right = bytearray(NBYTES)
    for copy in (kv.put_from, kv.get_into):
        for wrong in (NBYTES - 1, NBYTES + 1, 0):
            with pytest.raises(SizeMismatch, match=rf"\[3\] has {wrong} bytes.*{NBYTES}"):
                copy(ns, keys, [right, right, right, bytearray(wrong), right])
        with pytest.raises(SizeMismatch, match=rf"{4 * NBYTES} bytes.*{5 * NBYTES}"):
            copy(ns, keys, bytearray(4 * NBYTES))
        with pytest.raises(SizeMismatch, match="5 keys take 5 buffers, found 4"):
            copy(ns, keys, [right] * 4)
    assert kv.exists(ns, keys) == [False] * N
    assert kv.stats()["lent_bytes"] == 0


def test_one_table_holds_a_whole_context(kv: Any, ns: BoundNamespace, keys: Keys) -> None:
    table = np.frombuffer(b"".join(payloads_of(keys, NBYTES)), "f2").reshape(N, 3, -1)
    assert kv.put_from(ns, keys, table) == ["stored"] * N
    got = np.zeros_like(table)
    assert kv.get_into(ns, keys, got) == N
    assert got.tobytes() == table.tobytes()


def test_a_tail_takes_a_buffer_of_its_own_size(kv: Any, model: str) -> None:
    layout = KVLayout((LayerGroup.attention(layers=3, heads=2, head_size=8),))
    ns = kv.namespace(Namespace(model, layout, tokens_per_blob=16))
    keys = ns.keys(range(16 * 2 + 3), tail=True)
    sizes = [layout.nbytes(16), layout.nbytes(16), layout.nbytes(3)]
    contents = [payload_of(key, nbytes) for key, nbytes in zip(keys, sizes, strict=True)]
    assert kv.put_from(ns, keys, np.frombuffer(b"".join(contents), np.uint8)) == ["stored"] * 3
    targets = [bytearray(nbytes) for nbytes in sizes]
    assert kv.get_into(ns, keys, targets) == 3
    assert targets == contents
    whole = bytearray(sum(sizes))
    assert kv.get_into(ns, keys, whole) == 3
    assert whole == b"".join(contents)
    with pytest.raises(SizeMismatch, match=rf"{sizes[0]} bytes.*{sizes[2]}"):
        kv.get_into(ns, keys, [bytearray(sizes[0]) for _ in keys])
    with pytest.raises(SizeMismatch, match=rf"{sizes[2]} bytes.*{sizes[0]}"):
        kv.put_from(ns, list(keys), contents)
