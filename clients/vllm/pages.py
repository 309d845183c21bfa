"""Keys and values between vLLM's cache tensors and blobs: one copy each way.

A cache tensor is blocks x heads x tokens x content, with any strides. A payload has
each layer's heads apart and their tokens in order, whatever the engine's layout is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blobstore.clients.vllm.cache_memory import BlockRuns, checked_bytes, memory_of
from blobstore.clients.vllm.geometry import NULL_BLOCK, Layer
from blobstore.clients.vllm.identity import Identity
from blobstore.clients.vllm.libraries import Tensor
from blobstore.errors import InvalidRequest, SizeMismatch


class Pages:
    """The cache tensors of one rank, and where their bytes are in a blob.

    `blocks` are always those of one blob, for each of the identity's groups. Tensors of
    payloads are flat u8 on the caches' device, one for each span. Raises InvalidRequest
    naming the layer whose tensor is not as its configuration says.
    """

    def __init__(
        self, identity: Identity, kv_cache_config: Any, kv_caches: Mapping[str, Tensor]
    ) -> None:
        geometry = identity.geometry
        parts = geometry.parts()
        self._groups = geometry.groups
        self._blob_tokens = geometry.blob_tokens
        self._layers = geometry.layers
        self._n_blocks = int(kv_cache_config.num_blocks)
        tensors = [self._checked(layer, kv_caches) for layer in self._layers]
        self.device = tensors[0].device
        self.spans = tuple((part.offset, part.offset + part.nbytes) for part in parts)
        """This rank's bytes of a payload, one run per layer."""
        self.written = geometry.written()
        """Which of `spans` this rank fills: other ranks may hold the same bytes."""
        self._index = {layer.name: at for at, layer in enumerate(self._layers)}
        self._memory = memory_of(tensors, self._n_blocks)

    def index(self, layer_name: str) -> int | None:
        """The number of a layer's span; None if it is not stored."""
        return self._index.get(layer_name)

    def read(self, blocks: Sequence[Sequence[int]], into: Sequence[Tensor]) -> None:
        """Copy a blob's blocks to its spans; None in `into` for a span that is not wanted."""
        runs = self._runs(blocks, 0, reading=True)
        for at, target in enumerate(into):
            if target is not None:
                self._read(at, runs, target)

    def write(
        self, blocks: Sequence[Sequence[int]], source: Sequence[Tensor], first_token: int = 0
    ) -> None:
        """Copy a blob's spans to its blocks, from `first_token` of the blob on.

        Blocks before that are left alone, and so are those that a window has left behind.
        Raises InvalidRequest for a token inside a block: blocks are whole.
        """
        runs = self._runs(blocks, first_token, reading=False)
        for at, span in enumerate(source):
            self._write(at, runs, span)

    def _read(self, index: int, runs: Sequence[BlockRuns], into: Tensor) -> None:
        self._check_span(index, into)
        self._memory[index].read(runs[self._layers[index].group], into)

    def _write(self, index: int, runs: Sequence[BlockRuns], source: Tensor) -> None:
        self._check_span(index, source)
        self._memory[index].write(runs[self._layers[index].group], source)

    def _runs(
        self, blocks: Sequence[Sequence[int]], first_token: int, *, reading: bool
    ) -> list[BlockRuns]:
        if len(blocks) != len(self._groups):
            raise InvalidRequest(f"blocks of {len(blocks)} groups, there are {len(self._groups)}")
        found = []
        for group, ids in zip(self._groups, blocks, strict=True):
            if len(ids) * group.block_tokens != self._blob_tokens:
                raise InvalidRequest(
                    f"{len(ids)} blocks of {group.block_tokens} tokens are no blob of "
                    f"{self._blob_tokens}"
                )
            skipped, inside = divmod(first_token, group.block_tokens)
            if inside:
                raise InvalidRequest(
                    f"token {first_token} is inside a block of {group.block_tokens}: blocks are "
                    "copied whole"
                )
            may_be_null = bool(group.window) and not reading
            found.append(BlockRuns(self._placed(ids, skipped, may_be_null)))
        return found

    def _placed(self, ids: Sequence[int], skipped: int, may_be_null: bool) -> list[tuple[int, int]]:
        """Position in the blob and number of each block that is copied."""
        placed = []
        for at in range(skipped, len(ids)):
            if not NULL_BLOCK < ids[at] < self._n_blocks and not (
                ids[at] == NULL_BLOCK and may_be_null
            ):
                raise InvalidRequest(f"block {ids[at]} is none of 1 to {self._n_blocks - 1}")
            if ids[at] != NULL_BLOCK:
                placed.append((at, ids[at]))
        return placed

    def _check_span(self, index: int, span: Tensor) -> None:
        start, end = self.spans[index]
        if span.numel() != end - start:
            raise SizeMismatch(
                f"{span.numel()} bytes for {self._layers[index].name}, whose share of a blob has "
                f"{end - start}"
            )

    def _checked(self, layer: Layer, kv_caches: Mapping[str, Tensor]) -> Tensor:
        tensor = kv_caches.get(layer.name)
        if tensor is None:
            raise InvalidRequest(f"vLLM gave no cache tensor for {layer.name}")
        return checked_bytes(layer, tensor, self._n_blocks)
