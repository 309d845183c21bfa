"""The memory of vLLM's cache tensors as bytes: checked once, then copied block by block.

On the host by NumPy, which copies in the calling thread and lets others run meanwhile:
torch would start a team of threads on the cores that compute. On a device by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple, Protocol

import numpy as np

from blobstore.clients.mapping import Bytes
from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.geometry import Layer
from blobstore.clients.vllm.libraries import Tensor
from blobstore.errors import InvalidRequest


class Run(NamedTuple):
    """`n` consecutive blocks from number `block` on, which are at place `at` of a blob."""

    at: int
    block: int
    n: int


class BlockRuns:
    """Which blocks are copied, and to or from which places of a blob."""

    def __init__(self, placed: Sequence[tuple[int, int]]) -> None:
        self._placed = placed
        self._indices: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbours joined."""
        found = []
        for _, run in groupby(enumerate(self._placed), lambda e: (e[1][0] - e[0], e[1][1] - e[0])):
            members = [place for _, place in run]
            found.append(Run(*members[0], len(members)))
        return tuple(found)

    def places(self, ratio: int, device: Any) -> Tensor:
        """Their places one by one, each made of `ratio` smaller ones; on a device, once made."""
        return self._index(0, ratio, device)

    def blocks(self, ratio: int, device: Any) -> Tensor:
        """As `places`, of the blocks."""
        return self._index(1, ratio, device)

    def _index(self, which: int, ratio: int, device: Any) -> Tensor:
        index = self._indices.get((which, ratio))
        if index is None:
            starts = (pair[which] * ratio for pair in self._placed)
            numbers = [start + n for start in starts for n in range(ratio)]
            index = self._indices[which, ratio] = _on_device(numbers, device)
        return index


class LayerMemory(Protocol):
    """The blocks of one layer. A span is flat: its heads apart, their blocks in order."""

    def read(self, runs: BlockRuns, into: Tensor) -> None:
        """Copy blocks to their places in a span."""

    def write(self, runs: BlockRuns, source: Tensor) -> None:
        """Copy blocks from their places in a span."""


class HostMemory:
    """Blocks in this process's memory."""

    def __init__(self, tensor: Tensor, n_blocks: int) -> None:
        kernel_blocks, heads, tokens, content = tensor.shape
        self._ratio = kernel_blocks // n_blocks
        self._shape = (heads, -1, tokens, content)
        self._blocks: Bytes = tensor.numpy().transpose(1, 0, 2, 3)

    def read(self, runs: BlockRuns, into: Tensor) -> None:
        """Copy blocks to their places in a span."""
        span = into.numpy().reshape(self._shape)
        for place, block in self._slices(runs):
            np.copyto(span[:, place], self._blocks[:, block])

    def write(self, runs: BlockRuns, source: Tensor) -> None:
        """Copy blocks from their places in a span."""
        span = source.numpy().reshape(self._shape)
        for place, block in self._slices(runs):
            np.copyto(self._blocks[:, block], span[:, place])

    def _slices(self, runs: BlockRuns) -> list[tuple[slice, slice]]:
        ratio = self._ratio
        return [
            (
                slice(run.at * ratio, (run.at + run.n) * ratio),
                slice(run.block * ratio, (run.block + run.n) * ratio),
            )
            for run in runs.runs
        ]


class DeviceMemory:
    """Blocks on a device. Copies are enqueued on the current stream."""

    def __init__(self, tensor: Tensor, n_blocks: int, word: Any) -> None:
        self._ratio = tensor.shape[0] // n_blocks
        self._device = tensor.device
        self._word = word
        self._blocks = tensor.view(word).transpose(0, 1)
        heads, _, tokens, words = self._blocks.shape
        self._shape = (heads, -1, tokens, words)

    def read(self, runs: BlockRuns, into: Tensor) -> None:
        """Copy blocks to their places in a span."""
        blocks = runs.blocks(self._ratio, self._device)  # to all places, in order
        libraries.torch().index_select(self._blocks, 1, blocks, out=self._span(into))

    def write(self, runs: BlockRuns, source: Tensor) -> None:
        """Copy blocks from their places in a span."""
        wanted = self._span(source).index_select(1, runs.places(self._ratio, self._device))
        self._blocks.index_copy_(1, runs.blocks(self._ratio, self._device), wanted)

    def _span(self, span: Tensor) -> Tensor:
        return span.view(self._word).view(self._shape)


def memory_of(tensors: Sequence[Tensor], n_blocks: int) -> list[LayerMemory]:
    """The memory of each layer's tensor, as `checked_bytes` made it."""
    if tensors[0].device.type == "cpu":
        return [HostMemory(tensor, n_blocks) for tensor in tensors]
    word = _widest(tensors)
    return [DeviceMemory(tensor, n_blocks, word) for tensor in tensors]


def checked_bytes(layer: Layer, tensor: Tensor, n_blocks: int) -> Tensor:
    """A cache tensor as blocks x heads x tokens x bytes.

    Where the attention kernel's blocks are smaller than the manager's, there are so many
    times more of them, one behind the other. InvalidRequest for any other shape.
    """
    shape = layer.shape
    found = f"the cache tensor of {layer.name} is {tensor.dtype} {tuple(tensor.shape)}"
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise InvalidRequest(f"{found}: known are blocks x heads x tokens x content")
    content = tensor.shape[3] * tensor.element_size()
    ratio, rest = divmod(tensor.shape[0], n_blocks)
    expected = (shape.heads, shape.block_tokens, shape.content)
    if rest or (tensor.shape[1], tensor.shape[2] * ratio, content) != expected:
        raise InvalidRequest(
            f"{found}, for {n_blocks} blocks of heads x tokens x bytes "
            f"{' x '.join(map(str, expected))}: this layout is not known"
        )
    _check_apart(found, tensor)
    return tensor.view(libraries.torch().uint8)


def _on_device(numbers: Sequence[int], device: Any) -> Tensor:
    """An index there. To CUDA its copy is enqueued: another one would wait for all work before."""
    torch = libraries.torch()
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _check_apart(found: str, tensor: Tensor) -> None:
    """InvalidRequest if strides let parts of a tensor lie on one another."""
    end = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step < end:
                raise InvalidRequest(f"{found} with strides {tensor.stride()}: they overlap")
            end = step * (n - 1) + end


def _widest(tensors: Sequence[Tensor]) -> Any:
    """The widest word in which all the tensors, of bytes, can be copied."""
    torch = libraries.torch()
    borders = (gcd(tensor.data_ptr(), tensor.shape[3], *tensor.stride()[:3]) for tensor in tensors)
    nbytes = gcd(8, *borders)
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[nbytes]
