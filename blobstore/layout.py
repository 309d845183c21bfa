"""What a payload looks like: its size, its parts in order, and who needs which.

A layout belongs to the identity of a blob; a shard, a rank's view, does not.
Order of parts, canonical bytes and test vectors: docs/FORMAT.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blobstore import storage_grid
from blobstore.errors import InvalidRequest
from blobstore.fields import as_number, as_text, check_number, check_text, pack, unpack
from blobstore.layer_group import MAX_HEADS, MAX_LAYERS, LayerGroup
from blobstore.shard import Shard
from blobstore.storage_grid import Part, StorageGrid

__all__ = ["KVLayout", "LayerGroup", "Part", "Shard"]

MAX_PAYLOAD_BYTES = 1 << 40
"""A larger blob is a mistake in the declaration."""

_TAG = b"blobstore/layout/1"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of every payload in a namespace.

    Args:
        groups: the model's layers, in order.
        layers_per_part: layers that travel together; the last part of a group may have fewer.
        head_groups: KV-head ranges of the storage grid. Ranks can fill a blob together if
            their tensor-parallel degree divides it, or if it is the number of heads.
            A group with fewer heads is cut into single heads.
        order: how values lie inside a part. A label: blobs are interchangeable only if it
            is equal, but it is never interpreted.

    Raises InvalidRequest for values that contradict each other.
    """

    groups: tuple[LayerGroup, ...]
    layers_per_part: int = 1
    head_groups: int = 1
    order: str = "layer,kv,token,head"
    _grid: StorageGrid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = self.groups
        if not isinstance(groups, tuple | list) or not groups:
            raise InvalidRequest(f"groups are one or more LayerGroup, found {groups!r}")
        for group in groups:
            if not isinstance(group, LayerGroup):
                raise InvalidRequest(f"groups are LayerGroup, found {group!r}")
        if len(groups) > 1 and any(group.kind == "opaque" for group in groups):
            raise InvalidRequest("an opaque layout has one group: its bytes have no structure")
        check_text("order", self.order, max_bytes=256)
        object.__setattr__(self, "groups", tuple(groups))
        check_number("layers_per_part", self.layers_per_part, 1, MAX_LAYERS)
        check_number("head_groups", self.head_groups, 1, MAX_HEADS)
        grid = storage_grid.shared_grid(self.groups, self.layers_per_part, self.head_groups)
        object.__setattr__(self, "_grid", grid)

    @staticmethod
    def opaque(nbytes: int) -> KVLayout:
        """Blobs of `nbytes` (0 or more) without structure: one part, however many tokens."""
        check_number("nbytes of an opaque layout", nbytes, 0, MAX_PAYLOAD_BYTES)
        return KVLayout((LayerGroup("opaque", 1, state_bytes=nbytes),))

    @property
    def n_layers(self) -> int:
        """Layers of all groups."""
        return self._grid.n_layers

    @property
    def n_parts(self) -> int:
        """Parts of every payload."""
        return len(self._grid.cells)

    def nbytes(self, tokens: int) -> int:
        """Size of the payload of `tokens` tokens."""
        return sum(group.layers * group.heads * group.head_bytes(tokens) for group in self.groups)

    def parts(self, tokens: int) -> tuple[Part, ...]:
        """The parts of a payload of `tokens` tokens: contiguous, in order, covering it exactly.

        Layers ascend, and heads within equal layers, so that a prefix of the payload
        is a prefix of the layers.
        """
        return storage_grid.parts(self._grid, tokens)

    def shard_parts(self, shard: Shard | None = None) -> tuple[int, ...]:
        """Numbers of the parts that a rank reads: those that hold any of its layers and heads.

        A grid coarser than the rank's share gives whole parts; `Part.layers` and
        `Part.heads` tell what to take. Raises InvalidRequest if the rank does not
        fit the grid, saying what would.
        """
        return storage_grid.needed(self._grid, shard, followed_by=0)

    def shard_writes(self, shard: Shard | None = None) -> tuple[int, ...]:
        """Numbers of the parts that a rank writes: over all ranks, every part exactly once.

        Ranks that hold the same bytes take turns by layer range. Raises InvalidRequest
        if the rank does not fit the grid, or holds only some of a part's bytes.
        """
        return storage_grid.writing(self._grid, shard)

    def needed_parts(
        self,
        blob: int,
        n_blobs: int,
        tokens_per_blob: int,
        shard: Shard | None = None,
        *,
        tail_tokens: int = 0,
    ) -> tuple[int, ...]:
        """Numbers of the parts that a rank needs of blob number `blob` to continue `n_blobs`.

        Sliding layers only within the window before the end, states only of the last
        blob. `tail_tokens` are the tokens of the last blob if it is partial, else 0.
        Raises InvalidRequest as shard_parts does.
        """
        check_number("tokens_per_blob", tokens_per_blob, 1, MAX_PAYLOAD_BYTES)
        check_number("blob", blob, 0, n_blobs - 1)
        check_number("tail_tokens", tail_tokens, 0, tokens_per_blob - 1)
        end = n_blobs * tokens_per_blob
        if tail_tokens:
            end -= tokens_per_blob - tail_tokens
        followed_by = max(0, end - (blob + 1) * tokens_per_blob)
        return storage_grid.needed(self._grid, shard, followed_by)

    def encode(self) -> bytes:
        """The canonical bytes."""
        groups = (group.encode() for group in self.groups)
        return pack(_TAG, self.layers_per_part, self.head_groups, self.order, *groups)

    @staticmethod
    def decode(data: bytes) -> KVLayout:
        """The layout that `data` encodes; InvalidRequest if there is none."""
        fields = unpack(_TAG, data)
        if len(fields) < 4:
            raise InvalidRequest(f"a layout has 4 or more fields, found {len(fields)}")
        layers_per_part, head_groups, order, *groups = fields
        return KVLayout(
            tuple(LayerGroup.decode(group) for group in groups),
            as_number(layers_per_part), as_number(head_groups), as_text(order),
        )  # fmt: skip
