"""One run of equal layers in a payload: its kind, its sizes, and how far back it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from blobstore.errors import InvalidRequest
from blobstore.fields import as_number, as_text, check_number, pack, unpack

Kind = Literal["attention", "latent", "sliding", "state", "opaque"]

DTYPE_BITS = {
    "fp32": 32, "bf16": 16, "fp16": 16,
    "fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "uint8": 8,
    "fp4": 4, "int4": 4,
}  # fmt: skip
"""Stored element types. A format with scales between its values is `uint8` of its real width."""

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_HEAD_SIZE = 1 << 20
MAX_STATE_BYTES = 1 << 40
_MAX_WINDOW = (1 << 32) - 1

_ALWAYS = 1 << 62

_TAG = b"blobstore/layer-group/1"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers of one kind; made by the constructors named after the kinds.

    A model that interleaves kinds has one group per run of equal layers, in the
    order of its layers. Sizes are those of the whole model, never of one rank.
    Raises InvalidRequest for values that the kind does not have.
    """

    kind: Kind
    layers: int
    heads: int = 1
    head_size: int = 0
    dtype: str = ""
    window: int = 0
    state_bytes: int = 0

    @staticmethod
    def attention(*, layers: int, heads: int, head_size: int, dtype: str = "bf16") -> LayerGroup:
        """Keys and values of every token, of `heads` KV heads per layer."""
        return LayerGroup("attention", layers, heads, head_size, dtype)

    @staticmethod
    def latent(*, layers: int, width: int, dtype: str = "bf16") -> LayerGroup:
        """One vector of `width` values per token and layer, the same on all ranks (MLA)."""
        return LayerGroup("latent", layers, 1, width, dtype)

    @staticmethod
    def sliding(
        *, layers: int, heads: int, head_size: int, window: int, dtype: str = "bf16"
    ) -> LayerGroup:
        """Attention over the last `window` tokens: of older blobs a reader needs nothing."""
        return LayerGroup("sliding", layers, heads, head_size, dtype, window)

    @staticmethod
    def state(*, layers: int, state_bytes: int, heads: int = 1) -> LayerGroup:
        """A recurrent state of `state_bytes` per layer, as it is after the blob's last token.

        `heads` is into how many equal runs of bytes tensor parallelism may cut it;
        1 means that every rank holds all of it.
        """
        return LayerGroup("state", layers, heads, state_bytes=state_bytes)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidRequest(f"kind is one of {', '.join(get_args(Kind))}, found {self.kind!r}")
        whole = self.kind in ("latent", "opaque")
        self._check("layers", 1, 1 if self.kind == "opaque" else MAX_LAYERS)
        self._check("heads", 1, 1 if whole else MAX_HEADS)
        self._check("window", *((1, _MAX_WINDOW) if self.kind == "sliding" else (0, 0)))
        if self.per_token:
            self._check("head_size", 1, MAX_HEAD_SIZE)
            self._check("state_bytes", 0, 0)
            self._check_elements()
        else:
            self._check("head_size", 0, 0)
            self._check("state_bytes", int(self.kind == "state"), MAX_STATE_BYTES)
            self._check_state()

    def _check(self, name: str, least: int, most: int) -> None:
        check_number(f"{name} of {self.kind!r} layers", getattr(self, name), least, most)

    def _check_elements(self) -> None:
        bits = DTYPE_BITS.get(self.dtype)
        if bits is None:
            raise InvalidRequest(f"dtype is one of {', '.join(DTYPE_BITS)}, found {self.dtype!r}")
        if self.head_size * bits % 8:
            raise InvalidRequest(
                f"head_size={self.head_size} of {self.dtype} is {self.head_size * bits} bits: "
                "no whole bytes"
            )

    def _check_state(self) -> None:
        if self.dtype != "":
            raise InvalidRequest(f"{self.kind!r} layers have no dtype, found {self.dtype!r}")
        if self.state_bytes % self.heads:
            raise InvalidRequest(
                f"state_bytes={self.state_bytes} cannot be cut into heads={self.heads} equal runs"
            )

    @property
    def per_token(self) -> bool:
        """Whether its bytes grow with the tokens of a blob."""
        return self.kind in ("attention", "latent", "sliding")

    def head_bytes(self, tokens: int) -> int:
        """Bytes of one head of one layer in a blob of `tokens` tokens."""
        if not self.per_token:
            return self.state_bytes // self.heads
        vectors = 1 if self.kind == "latent" else 2
        return vectors * tokens * (self.head_size * DTYPE_BITS[self.dtype] // 8)

    @property
    def reach(self) -> int:
        """A reader needs this group of a blob only if fewer tokens than this follow the blob."""
        return {"sliding": self.window, "state": 1}.get(self.kind, _ALWAYS)

    def encode(self) -> bytes:
        """The canonical bytes."""
        return pack(
            _TAG, self.kind, self.layers, self.heads, self.head_size, self.dtype, self.window,
            self.state_bytes,
        )  # fmt: skip

    @staticmethod
    def decode(data: bytes) -> LayerGroup:
        """The group that `data` encodes; InvalidRequest if there is none."""
        fields = unpack(_TAG, data)
        if len(fields) != 7:
            raise InvalidRequest(f"a layer group has 7 fields, found {len(fields)}")
        kind, layers, heads, head_size, dtype, window, state_bytes = fields
        return LayerGroup(
            cast("Kind", as_text(kind)), as_number(layers), as_number(heads), as_number(head_size),
            as_text(dtype), as_number(window), as_number(state_bytes),
        )  # fmt: skip
