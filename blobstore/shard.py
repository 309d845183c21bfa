"""A rank's view of a blob: which layers and KV heads are its own."""

from __future__ import annotations

from dataclasses import dataclass

from blobstore.errors import InvalidRequest
from blobstore.fields import check_number

MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of an engine, by tensor- and pipeline-parallel rank. Never part of an identity.

    Heads are split evenly over tensor parallelism; more ranks than heads means that
    neighbouring ranks hold the same head. Layers are split evenly over pipeline
    parallelism; an engine that splits them otherwise states this stage's `layers`
    as `(first, stop)`, counted over all groups. Raises InvalidRequest for ranks that
    do not exist.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    layers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            check_number(size, getattr(self, size), 1, MAX_RANKS)
            check_number(rank, getattr(self, rank), 0, getattr(self, size) - 1)
        if self.layers is not None:
            if not isinstance(self.layers, tuple) or len(self.layers) != 2:
                raise InvalidRequest(f"layers is a pair (first, stop), found {self.layers!r}")
            check_number("layers[0]", self.layers[0], 0, MAX_RANKS)
            check_number("layers[1]", self.layers[1], self.layers[0] + 1, MAX_RANKS)

    @property
    def whole(self) -> bool:
        """Whether this is the only rank."""
        return self.tp_size == 1 and self.pp_size == 1 and self.layers is None

    def own_layers(self, n_layers: int) -> tuple[int, int]:
        """This stage's layers of `n_layers`; InvalidRequest if they do not split evenly."""
        if self.layers is not None:
            if self.layers[1] > n_layers:
                raise InvalidRequest(f"layers={self.layers}, but the layout has {n_layers} layers")
            return self.layers
        if n_layers % self.pp_size:
            raise InvalidRequest(
                f"{n_layers} layers do not split evenly over pp_size={self.pp_size}: "
                "state this stage's, as in Shard(..., layers=(first, stop))"
            )
        share = n_layers // self.pp_size
        return self.pp_rank * share, (self.pp_rank + 1) * share

    def own_heads(self, heads: int) -> tuple[int, int]:
        """This rank's range of `heads` heads; InvalidRequest if they do not split evenly."""
        if heads % self.tp_size == 0:
            share = heads // self.tp_size
            return self.tp_rank * share, (self.tp_rank + 1) * share
        if self.tp_size % heads == 0:
            head = self.tp_rank // self.holders(heads)
            return head, head + 1
        raise InvalidRequest(
            f"{heads} KV heads do not split evenly over tp_size={self.tp_size}; no storage grid "
            "can hold this rank's share"
        )

    def holders(self, heads: int) -> int:
        """How many ranks hold the same head."""
        return max(1, self.tp_size // heads)

    def among_holders(self, heads: int) -> int:
        """This rank's number among the ranks that hold the same head."""
        return self.tp_rank % self.holders(heads)
