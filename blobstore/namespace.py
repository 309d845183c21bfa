"""Identity: everything that must be equal for KV bytes to be interchangeable.

An engine's block hash says nothing of model, weights, dtype or layout; a namespace
says it all, once, and its id is in every later call. Canonical bytes and test
vectors: docs/FORMAT.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from blobstore.errors import InvalidRequest
from blobstore.fields import as_number, as_text, check_number, check_text, pack, unpack
from blobstore.keys import Keys, chain
from blobstore.layout import MAX_PAYLOAD_BYTES, KVLayout

HASH_SCHEME = "blobstore-sha256-v1"
"""The key derivation of blobstore.keys."""

MAX_TOKENS_PER_BLOB = 1 << 20

_TAG = b"blobstore/namespace/1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that identifies KV bytes besides the tokens; any field that differs gives another id.

    Args:
        model: its name; any text.
        layout: the shape of a payload.
        revision: of the model.
        weights_digest: of its weights, so that one name with other weights is another id.
        dtype: in which the model computes; what is stored says the layout.
        tokens_per_blob: in a full blob.
        adapter: LoRA or other adapter, with its version.
        salt: keeps tenants apart.
        hash_scheme: how keys are made; engines that supply their own name theirs.

    Text is compared by its UTF-8 bytes, without normalization. Raises InvalidRequest
    for values out of bounds.
    """

    model: str
    layout: KVLayout
    revision: str = ""
    weights_digest: str = ""
    dtype: str = "bf16"
    tokens_per_blob: int = 256
    adapter: str = ""
    salt: str = ""
    hash_scheme: str = HASH_SCHEME
    _encoded: bytes = field(init=False, repr=False, compare=False)
    _id: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "model", "revision", "weights_digest", "dtype", "adapter", "salt", "hash_scheme",
        ):  # fmt: skip
            check_text(name, getattr(self, name))
        for name in ("model", "dtype", "hash_scheme"):
            if not getattr(self, name):
                raise InvalidRequest(f"{name} is empty")
        if not isinstance(self.layout, KVLayout):
            raise InvalidRequest(f"layout is a KVLayout, found {self.layout!r}")
        check_number("tokens_per_blob", self.tokens_per_blob, 1, MAX_TOKENS_PER_BLOB)
        check_number("bytes per blob", self.nbytes, 0, MAX_PAYLOAD_BYTES)
        encoded = pack(
            _TAG, self.model, self.revision, self.weights_digest, self.dtype, self.layout.encode(),
            self.tokens_per_blob, self.adapter, self.salt, self.hash_scheme,
        )  # fmt: skip
        object.__setattr__(self, "_encoded", encoded)
        object.__setattr__(self, "_id", sha256(encoded).digest())

    @property
    def id(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return self._id

    @property
    def nbytes(self) -> int:
        """Size of a full blob."""
        return self.layout.nbytes(self.tokens_per_blob)

    def encode(self) -> bytes:
        """The canonical bytes, which any party can decode and compare."""
        return self._encoded

    @classmethod
    def decode(cls, data: bytes) -> Namespace:
        """The namespace whose canonical bytes are `data`; InvalidRequest for anything else."""
        fields = unpack(_TAG, data)
        if len(fields) != 9:
            raise InvalidRequest(f"a namespace has 9 fields, found {len(fields)}")
        model, revision, weights_digest, dtype, layout, tokens, adapter, salt, scheme = fields
        namespace = cls(
            as_text(model), KVLayout.decode(layout), as_text(revision), as_text(weights_digest),
            as_text(dtype), as_number(tokens), as_text(adapter), as_text(salt), as_text(scheme),
        )  # fmt: skip
        assert namespace.encode() == data  # fields are framed and bounded: there is one encoding
        return namespace

    def keys(self, token_ids: object, *, tail: bool = False) -> Keys:
        """One key per full blob of `token_ids`; with `tail`, one for the partial rest too.

        Takes lists, tuples, and arrays of any integer type. Raises InvalidRequest for
        ids that are not from 0 to 2**32 - 1, and if `hash_scheme` is an engine's own.
        """
        if self.hash_scheme != HASH_SCHEME:
            raise InvalidRequest(
                f"keys of hash_scheme={self.hash_scheme!r} come from the engine (Keys.of); only "
                f"{HASH_SCHEME!r} is derived here"
            )
        return chain(self.id, token_ids, self.tokens_per_blob, tail=tail)


@dataclass(frozen=True, slots=True)
class WriterGroup:
    """The ranks of one engine instance that fill blobs together.

    `id` is the instance's, `epoch` rises when it restarts: parts of different groups
    or epochs never mix.
    """

    id: str
    epoch: int = 0

    def __post_init__(self) -> None:
        check_text("id of a writer group", self.id, max_bytes=256)
        if not self.id:
            raise InvalidRequest("id of a writer group is empty")
        check_number("epoch", self.epoch, 0, (1 << 63) - 1)
