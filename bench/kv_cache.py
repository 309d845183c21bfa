"""One context's keys and values, in chunks of one blob, and their stored form.

Kept as fp32 for the arithmetic, but every value is one that the stored dtype
can hold: it was rounded before anything attended to it. So a chunk that was
stored and restored is, bit for bit, the chunk that was computed.

The payload of a chunk is, layer by layer, the keys and then the values, each
as heads x tokens x head size in the stored dtype, little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blobstore.bench.model_file import Array, ModelSizes
from blobstore.errors import InvalidRequest, SizeMismatch

StoredDtype = Literal["bf16", "fp32"]
ITEM_BYTES: dict[StoredDtype, int] = {"bf16": 2, "fp32": 4}


def round_to_bf16(values: Array) -> Array:
    """`values` rounded to the nearest bf16, ties to even, still as fp32.

    For finite values only: a NaN could round to infinity.
    """
    bits = values.astype(np.float32, order="C").view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    bits &= 0xFFFF0000
    return bits.view(np.float32)


class KVCache:
    """The state of one context.

    `chunks` leading chunks are settled: computed whole, or restored. Behind
    them is the open chunk with the ids `open_ids`, whose state is never stored.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        *,
        chunk_tokens: int = 64,
        capacity_tokens: int | None = None,
        dtype: StoredDtype = "bf16",
    ) -> None:
        capacity = -(-(capacity_tokens or sizes.context_tokens) // chunk_tokens) * chunk_tokens
        if not 0 < capacity <= sizes.context_tokens:
            raise InvalidRequest(
                f"{capacity} tokens do not fit the model's context of {sizes.context_tokens}"
            )
        self.chunk_tokens = chunk_tokens
        self.capacity_tokens = capacity
        self.dtype = dtype
        # Zeros, because a masked value still enters a product (as 0 x value), and
        # because the low halves of bf16 values, which imports skip, must be zero.
        shape = (sizes.layers, 2, sizes.kv_heads, capacity, sizes.head_size)
        self._state = np.zeros(shape, np.float32)
        self._state.fill(0)  # touches every page now, as an engine's pool is, not during a restore
        self.chunks = 0
        self.open_ids: list[int] = []

    @property
    def n_tokens(self) -> int:
        """How many tokens the state covers."""
        return self.chunks * self.chunk_tokens + len(self.open_ids)

    @property
    def chunk_nbytes(self) -> int:
        """The size of one chunk's payload."""
        layers, _, heads, _, head_size = self._state.shape
        return layers * 2 * heads * self.chunk_tokens * head_size * ITEM_BYTES[self.dtype]

    def keys(self, layer: int, head: int, end: int) -> Array:
        """The keys of the positions before `end`: a view of positions x head size."""
        return self._state[layer, 0, head, :end]

    def values(self, layer: int, head: int, end: int) -> Array:
        """The values of the positions before `end`: a view of positions x head size."""
        return self._state[layer, 1, head, :end]

    def write(self, layer: int, start: int, keys: Array, values: Array) -> None:
        """Set the state from position `start` on, rounded to the stored dtype.

        `keys` and `values` are positions x heads x head size.
        """
        end = start + keys.shape[0]
        for which, fresh in enumerate((keys, values)):
            rounded = round_to_bf16(fresh) if self.dtype == "bf16" else fresh
            self._state[layer, which, :, start:end] = rounded.transpose(1, 0, 2)

    def truncate(self, chunks: int) -> None:
        """Forget all but the first `chunks` settled chunks."""
        self.chunks = min(chunks, self.chunks)
        self.open_ids = []

    def export_chunk(self, chunk: int, out: memoryview) -> None:
        """Write settled chunk number `chunk` to `out` in its stored form; one pass, no copy."""
        if not 0 <= chunk < self.chunks:
            raise InvalidRequest(f"chunk {chunk} is not settled: {self.chunks} are")
        stored = self._as_payload(out, self._state.shape[0])
        np.copyto(stored, self._stored(chunk, 0, self._state.shape[0]))

    def import_layers(self, chunk: int, layers: tuple[int, int], part: memoryview) -> None:
        """Take layers `layers[0]` to `layers[1]` of chunk number `chunk` from its payload.

        `part` is only read, and not kept. The chunk counts once `settle` says so.
        """
        first, end = layers
        np.copyto(self._stored(chunk, first, end), self._as_payload(part, end - first))

    def import_chunk(self, chunk: int, payload: memoryview) -> None:
        """Take all layers of chunk number `chunk`; as `import_layers`."""
        self.import_layers(chunk, (0, self._state.shape[0]), payload)

    def settle(self, chunks: int, open_ids: Sequence[int] = ()) -> None:
        """Declare the first `chunks` chunks whole, and `open_ids` the ids behind them."""
        self.chunks, self.open_ids = chunks, list(open_ids)

    def _stored(self, chunk: int, first_layer: int, end_layer: int) -> NDArray[Any]:
        """A view of one chunk's state as stored: the high halves of fp32 are bf16."""
        start = chunk * self.chunk_tokens
        state = self._state[first_layer:end_layer, :, :, start : start + self.chunk_tokens]
        return state.view(np.uint16)[..., 1::2] if self.dtype == "bf16" else state

    def _as_payload(self, data: memoryview, layers: int) -> NDArray[Any]:
        _, _, heads, _, head_size = self._state.shape
        shape = (layers, 2, heads, self.chunk_tokens, head_size)
        expected = int(np.prod(shape)) * ITEM_BYTES[self.dtype]
        if data.nbytes != expected:
            raise SizeMismatch(
                f"{layers} layers of {self.chunk_tokens} tokens take {expected} bytes in "
                f"{self.dtype}, but the buffer has {data.nbytes}"
            )
        return np.frombuffer(data, np.uint16 if self.dtype == "bf16" else np.float32).reshape(shape)
