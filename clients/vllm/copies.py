"""Keys and values between the engine's memory and the arena, whichever device the engine uses.

On the host they are copied in place. On a device they are gathered on the engine's
stream, so that no later step can change them, and cross to the host on another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.libraries import Tensor
from blobstore.clients.vllm.metadata import Blocks
from blobstore.clients.vllm.pages import Pages
from blobstore.clients.vllm.room import Room

STAGED_SHARE = 64
"""One part in so many of a device's memory may hold what waits to cross to the host.

vLLM leaves 8 in 100 to others (gpu_memory_utilization), of which libraries and graphs take most.
"""

Finish = Callable[[], None]
"""Brings the bytes to their place, where they are not there yet. Not on the engine's thread."""


class _Copies:
    """What both kinds know of a blob, as this rank holds it."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.layers = len(pages.spans)
        sizes = [end - start for start, end in pages.spans]
        self.read_bytes = sum(sizes)
        self.written_bytes = sum(n for n, w in zip(sizes, pages.written, strict=True) if w)
        """Less where others hold the same."""

    def move(self, aside: memoryview, payload: memoryview) -> None:
        """From a payload that `out` has filled to another one: what this rank writes of it."""
        for (start, end), written in zip(self._pages.spans, self._pages.written, strict=True):
            if written:
                payload[start:end] = aside[start:end]


class HostCopies(_Copies):
    """For an engine that computes on the CPU."""

    def fence(self) -> Any:
        """What a load must wait for: the engine's work up to now."""
        return None

    def has_room(self, layer: int | None = None) -> bool:
        """Whether one more blob, or a layer of it, may be copied out: it is, in place."""
        return True

    def out(self, blocks: Blocks, payload: memoryview, layer: int | None = None) -> Finish:
        """Copy a blob out of its blocks, or one layer of it."""
        memory = libraries.torch().frombuffer(payload, dtype=libraries.torch().uint8)
        into = [
            memory[start:end] if wanted else None
            for (start, end), wanted in zip(
                self._pages.spans, _wanted(self._pages, layer), strict=True
            )
        ]
        self._pages.read(blocks, into)
        return _nothing

    def into(self, blocks: Blocks, payload: memoryview, skip: int, fence: Any) -> None:
        """Copy a blob into its blocks, but for its first `skip` tokens."""
        memory = host_tensor(payload)
        self._pages.write(blocks, [memory[start:end] for start, end in self._pages.spans], skip)


class DeviceCopies(_Copies):
    """For an engine that computes on a CUDA device."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages)
        self._cuda = libraries.torch().cuda
        with self._cuda.device(pages.device):
            self._saves = self._cuda.Stream()
            self._loads = self._cuda.Stream()
        memory_bytes = self._cuda.get_device_properties(pages.device).total_memory
        self.staged = Room(int(memory_bytes) // STAGED_SHARE)
        """Memory of the device that holds copies which have not crossed to the host yet."""

    def fence(self) -> Any:
        """What a load must wait for: the engine's work up to now."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._pages.device))
        return event

    def has_room(self, layer: int | None = None) -> bool:
        """Whether one more blob, or a layer of it, may be gathered: if nothing waits, any may."""
        return not self.staged.held or self.staged.fits(self._staged_bytes(layer))

    def out(self, blocks: Blocks, payload: memoryview, layer: int | None = None) -> Finish:
        """Gather a blob on the engine's stream; what is returned copies it to the host.

        Until that is gone, used or not, it holds some of the device's memory.
        """
        nbytes = self._staged_bytes(layer)
        self.staged.hold(nbytes)
        try:
            finish = self._gathered(blocks, payload, layer)
        except BaseException:
            self.staged.give_back(nbytes)
            raise
        weakref.finalize(finish, self.staged.give_back, nbytes).atexit = False
        return finish

    def into(self, blocks: Blocks, payload: memoryview, skip: int, fence: Any) -> None:
        """Copy a blob into its blocks, but for its first `skip` tokens."""
        memory, device = host_tensor(payload), self._pages.device
        with self._cuda.device(device), self._cuda.stream(self._loads):
            self._loads.wait_event(fence)
            spans = [
                memory[start:end].to(device, non_blocking=True) for start, end in self._pages.spans
            ]
            self._pages.write(blocks, spans, skip)
            self._loads.synchronize()

    def _staged_bytes(self, layer: int | None) -> int:
        if layer is None:
            return self.written_bytes
        start, end = self._pages.spans[layer]
        return end - start

    def _gathered(self, blocks: Blocks, payload: memoryview, layer: int | None) -> Finish:
        torch, device = libraries.torch(), self._pages.device
        staged = [
            torch.empty(end - start, dtype=torch.uint8, device=device) if wanted else None
            for (start, end), wanted in zip(
                self._pages.spans, _wanted(self._pages, layer), strict=True
            )
        ]
        self._pages.read(blocks, staged)
        gathered = self.fence()

        def finish() -> None:
            memory = torch.frombuffer(payload, dtype=torch.uint8)
            with self._cuda.device(device), self._cuda.stream(self._saves):
                self._saves.wait_event(gathered)
                for (start, end), tensor in zip(self._pages.spans, staged, strict=True):
                    if tensor is not None:
                        memory[start:end].copy_(tensor, non_blocking=True)
                self._saves.synchronize()

        return finish


Copies = HostCopies | DeviceCopies


def copies_for(pages: Pages) -> Copies:
    """Those that the device of the engine's tensors needs."""
    return HostCopies(pages) if pages.device.type == "cpu" else DeviceCopies(pages)


def _wanted(pages: Pages, layer: int | None) -> list[bool]:
    """Which spans this rank writes, of all layers or one of them."""
    return [each and layer in (None, at) for at, each in enumerate(pages.written)]


def host_tensor(payload: memoryview) -> Tensor:
    """A tensor over `payload`, which may be read-only: DLPack, as other ways warn then."""
    return libraries.torch().from_dlpack(np.frombuffer(payload, np.uint8))


def _nothing() -> None:
    """It is done."""
