"""The storage grid: a payload's parts in order, and which of them a rank reads and writes.

A part is a range of layers by a range of KV heads. Sizes and part numbers only: nothing
here touches bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from blobstore.errors import InvalidRequest
from blobstore.fields import check_number
from blobstore.layer_group import MAX_HEADS, MAX_LAYERS, LayerGroup
from blobstore.shard import Shard

MAX_PARTS = 1 << 14
"""A declared layout costs the daemon memory for its parts, so their number is bounded."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part number `index` of a payload: layers `[a, b)` by KV heads `[c, d)` of the model.

    Layers are counted over all groups, heads within their group.
    """

    index: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    offset: int
    nbytes: int


class _Cell(NamedTuple):
    """A part before it has a size."""

    group: LayerGroup
    turn: int  # number of its layer range within the group
    layers: tuple[int, int]
    heads: tuple[int, int]


class StorageGrid:
    """How a layout cuts its payloads. Compared by identity, so that it keys caches.

    Raises InvalidRequest if the numbers do not go together.
    """

    __slots__ = ("cells", "groups", "head_groups", "layers_per_part", "n_layers", "reaches")

    def __init__(
        self, groups: tuple[LayerGroup, ...], layers_per_part: int, head_groups: int
    ) -> None:
        self.groups = groups
        self.layers_per_part = layers_per_part
        self.head_groups = head_groups
        self.n_layers = sum(group.layers for group in groups)
        self._check()
        self.cells = tuple(self._cut())
        self.reaches = sorted({group.reach for group in groups})

    def _check(self) -> None:
        check_number("layers of all groups", self.n_layers, 1, MAX_LAYERS)
        n_parts = 0
        for group in self.groups:
            columns = self.columns(group)
            if not columns:
                raise InvalidRequest(
                    f"head_groups={self.head_groups} neither divides heads={group.heads} nor is "
                    "a multiple of it"
                )
            n_parts += columns * -(-group.layers // self.layers_per_part)
        if n_parts > MAX_PARTS:
            raise InvalidRequest(
                f"the storage grid has {n_parts} parts, at most {MAX_PARTS} are allowed: raise "
                "layers_per_part"
            )

    def _cut(self) -> Iterator[_Cell]:
        first = 0
        for group in self.groups:
            stop, width = first + group.layers, group.heads // self.columns(group)
            for turn, start in enumerate(range(first, stop, self.layers_per_part)):
                layers = start, min(start + self.layers_per_part, stop)
                for head in range(0, group.heads, width):
                    yield _Cell(group, turn, layers, (head, head + width))
            first = stop

    def columns(self, group: LayerGroup) -> int:
        """Into how many head ranges `group` is cut."""
        return _columns(group.heads, self.head_groups)

    def check_reader(self, shard: Shard) -> None:
        """InvalidRequest unless the rank's heads and the grid's ranges nest."""
        if self.groups[0].kind == "opaque" and not shard.whole:
            raise InvalidRequest(
                "an opaque layout says nothing of ranks: declare layer groups, or a namespace "
                "for each rank (another salt)"
            )
        for group in self.groups:
            shard.own_heads(group.heads)
            columns = self.columns(group)
            if columns % shard.tp_size and shard.tp_size % columns:
                raise InvalidRequest(
                    f"tp_size={shard.tp_size} neither divides the grid's head_groups="
                    f"{self.head_groups} nor is a multiple of it; {self._fitting(shard)}"
                )

    def check_writer(self, shard: Shard) -> None:
        """InvalidRequest unless the rank holds all bytes of each part that it has a share in."""
        for group in self.groups:
            columns = self.columns(group)
            if shard.tp_size > columns and columns != group.heads:
                raise InvalidRequest(
                    f"a part holds {group.heads // columns} KV heads, a rank of tp_size="
                    f"{shard.tp_size} only {max(1, group.heads // shard.tp_size)}: it can read "
                    f"from head_groups={self.head_groups}, not write; {self._fitting(shard)}"
                )
        own = shard.own_layers(self.n_layers)
        for cell in self.cells:
            first, stop = cell.layers
            if first < own[0] < stop or first < own[1] < stop:
                raise InvalidRequest(
                    f"a part holds layers {first} to {stop}, this stage {own[0]} to {own[1]}: it "
                    f"can read from layers_per_part={self.layers_per_part}, not write; "
                    "layers_per_part=1 always fits"
                )

    def _fitting(self, shard: Shard) -> str:
        heads = {group.heads for group in self.groups}
        fitting = (
            str(head_groups)
            for head_groups in range(1, MAX_HEADS + 1)
            if all(_fills(n, head_groups, shard.tp_size) for n in heads)
        )
        some = " or ".join(islice(fitting, 3))
        return f"head_groups={some} would fit" if some else "no head_groups would fit"


def _columns(heads: int, head_groups: int) -> int:
    """Into how many ranges a grid of `head_groups` cuts `heads` heads; 0 if it cannot."""
    if heads % head_groups == 0:
        return head_groups
    return heads if head_groups % heads == 0 else 0


def _fills(heads: int, head_groups: int, tp_size: int) -> bool:
    """Whether each of `tp_size` ranks holds whole ranges, so that it can write them."""
    columns = _columns(heads, head_groups)
    if not columns:
        return False
    return columns % tp_size == 0 or (columns == heads and tp_size % heads == 0)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


@lru_cache(maxsize=64)
def shared_grid(
    groups: tuple[LayerGroup, ...], layers_per_part: int, head_groups: int
) -> StorageGrid:
    """A grid; equal layouts (of the tenants of one model) share one."""
    return StorageGrid(groups, layers_per_part, head_groups)


# The caches hold full and partial sizes, and ranks, of the layouts in use; a miss costs
# about a microsecond per part.


@lru_cache(maxsize=64)
def parts(grid: StorageGrid, tokens: int) -> tuple[Part, ...]:
    """The parts of a payload of `tokens` tokens."""
    found, offset = [], 0
    for index, (group, _, layers, heads) in enumerate(grid.cells):
        nbytes = (layers[1] - layers[0]) * (heads[1] - heads[0]) * group.head_bytes(tokens)
        found.append(Part(index, layers, heads, offset, nbytes))
        offset += nbytes
    return tuple(found)


def needed(grid: StorageGrid, shard: Shard | None, followed_by: int) -> tuple[int, ...]:
    """Numbers of the parts that `shard` needs of a blob with `followed_by` tokens behind it."""
    return _reading(grid, shard, bisect_right(grid.reaches, followed_by))


@lru_cache(maxsize=64)
def _reading(grid: StorageGrid, shard: Shard | None, n_passed: int) -> tuple[int, ...]:
    """As `needed`, of a blob beyond the `n_passed` shortest reaches."""
    reachable = set(grid.reaches[n_passed:])
    numbers = (number for number, cell in enumerate(grid.cells) if cell.group.reach in reachable)
    if shard is None:
        return tuple(numbers)
    grid.check_reader(shard)
    layers = shard.own_layers(grid.n_layers)
    return tuple(
        number
        for number in numbers
        if _overlap(grid.cells[number].layers, layers)
        and _overlap(grid.cells[number].heads, shard.own_heads(grid.cells[number].group.heads))
    )


@lru_cache(maxsize=64)
def writing(grid: StorageGrid, shard: Shard | None) -> tuple[int, ...]:
    """Numbers of the parts that `shard` writes; holders of equal bytes take turns by layers."""
    readable = _reading(grid, shard, 0)
    if shard is None:
        return readable
    grid.check_writer(shard)
    return tuple(number for number in readable if _takes_turn(grid.cells[number], shard))


def _takes_turn(cell: _Cell, shard: Shard) -> bool:
    heads = cell.group.heads
    return cell.turn % shard.holders(heads) == shard.among_holders(heads)
