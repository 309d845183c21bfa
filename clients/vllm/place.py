"""What a rank knows of the blobs that it reads and writes: their sizes, blocks and namespace."""

from __future__ import annotations

from typing import Protocol

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.vllm.geometry import Group, blocks_of
from blobstore.clients.vllm.metadata import Blocks
from blobstore.namespace import WriterGroup


class Place(Protocol):
    """As Identity: what a rank reads and writes."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of the stored layers."""

    @property
    def blob_tokens(self) -> int:
        """Tokens per blob."""

    @property
    def blob_bytes(self) -> int:
        """Of a whole blob."""

    def bound_of(self, encoded: bytes) -> BoundNamespace:
        """The namespace that the scheduler names."""


class SavePlace(Place, Protocol):
    """As Identity: with whom a rank fills blobs together, too."""

    @property
    def writer_group(self) -> WriterGroup | None:
        """None if it fills them alone."""


def blocks_at(place: Place, blocks: Blocks, blob: int) -> list[list[int]]:
    """Those of blob number `blob` of a run of blobs whose `blocks` are given."""
    return blocks_of(place.groups, place.blob_tokens, blocks, range(blob, blob + 1))
