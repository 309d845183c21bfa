"""What the store's state machine puts, and what a reader may then find."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace
from blobstore.units import KIB
from tests.support.store_client import Reading, Writing, digest_of

SEGMENT_BYTES = 160 * KIB
"""Goes to a segment file; six fit into DRAM, fifteen onto the SSD."""

GRID = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=64),), head_groups=2)
"""Four parts of 16 KiB for 64 tokens."""

NAMESPACES = (
    Namespace("segments", KVLayout.opaque(SEGMENT_BYTES), tokens_per_blob=16),
    Namespace("inline", KVLayout.opaque(20_000), tokens_per_blob=16),
    Namespace("parts", GRID, tokens_per_blob=128),
    Namespace("empty", KVLayout.opaque(0), tokens_per_blob=16),
)
PARTS = 2
"""Index of the namespace with parts."""

RANKS = ((0, 2), (1, 3))
"""Part numbers of each of two ranks."""

Path_ = tuple[int, ...]
"""A branch of the prefix tree: which child was taken at each level."""

Name = tuple[int, bytes]
"""Namespace number and key."""


def key_of(ns: int, path: Path_) -> bytes:
    return hashlib.sha256(NAMESPACES[ns].id + bytes(path)).digest()


def chain_of(ns: int, path: Path_, start: int = 0) -> list[bytes]:
    return [key_of(ns, path[: end + 1]) for end in range(start, len(path))]


def payload_of(key: bytes, variant: int, nbytes: int) -> bytes:
    """What a writer puts under `key`; another variant is another rebuild of it."""
    seed = hashlib.sha256(key + bytes([variant])).digest()
    return (seed * (nbytes // 32 + 1))[:nbytes]


DEPTH_MAX = 6
NUMBERS = {namespace.id: number for number, namespace in enumerate(NAMESPACES)}
VARIANTS = (0, 1, 10, 11, 12)
PATHS: dict[Name, Path_] = {
    (ns, key_of(ns, path)): path
    for ns in range(len(NAMESPACES))
    for depth in range(1, DEPTH_MAX + 1)
    for path in itertools.product((0, 1), repeat=depth)
}

paths = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=DEPTH_MAX).map(tuple)
spaces = st.sampled_from([0, 0, 0, 0, 2, 2, 1, 3])
variants = st.sampled_from([0, 0, 0, 1])
starts = st.sampled_from([0, 0, 0, 1, 2, 3])
"""Where in its path a put begins: mostly at the root."""
retentions = st.sampled_from(["standard", "standard", "durable", "volatile"])
clients = st.integers(0, 1)
choices = st.integers(0, 1000)


@dataclass(eq=False)
class Put:
    """A reservation of the machine's, from reserve to its last view."""

    writing: Writing
    ns: int
    keys: list[bytes]
    variant: int
    parts: tuple[int, ...]
    retention: str
    client: int

    def payloads(self) -> list[bytes]:
        nbytes = NAMESPACES[self.ns].layout.nbytes(NAMESPACES[self.ns].tokens_per_blob)
        return [payload_of(key, self.variant, nbytes) for key in self.keys]


@dataclass(eq=False)
class Held:
    """A lease of the machine's, and what it showed when it was given."""

    reading: Reading
    ns: int
    keys: list[bytes]
    payloads: list[bytes] | None
    """None: it follows what was not readable yet."""


@dataclass(eq=False)
class Call:
    """A request under way."""

    task: asyncio.Task[object]
    done: Callable[[], None]
    """Looks at the outcome."""


@dataclass
class Model:
    """What may be found, and what must be."""

    sealed: dict[Name, set[int]] = field(default_factory=dict)
    """Variants that a seal published, or may have."""
    durable: dict[Name, int] = field(default_factory=dict)
    """Acknowledged as durable, and neither dropped nor damaged since."""
    written: dict[Name, set[int]] = field(default_factory=dict)
    """Variants that anybody ever meant to put; a reader may follow a writer who loses."""


@functools.cache
def variant_digest(key: bytes, variant: int, nbytes: int) -> bytes:
    return digest_of(payload_of(key, variant, nbytes))
