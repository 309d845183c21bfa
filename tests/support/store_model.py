"""What the store's state machine puts, and what a reader may then find."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from hypothesis import strategies as st

from blobstore.index import NamespaceState
from blobstore.keys import ID_BYTES
from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace
from blobstore.text_entry import TextEntry
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
        return [payload_of(key, self.variant, nbytes_of(self.ns)) for key in self.keys]

    def write(self, but: Collection[int] = ()) -> None:
        """Write this rank's parts, and no other's, of all blobs `but` some."""
        for index, payload in enumerate(self.payloads()):
            if index in but:
                continue
            if self.ns != PARTS:
                self.writing.write(index, payload)
                continue
            for part in GRID.parts(NAMESPACES[PARTS].tokens_per_blob):
                if part.index in self.parts:
                    chunk = payload[part.offset : part.offset + part.nbytes]
                    self.writing.write(index, chunk, part.offset)


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
    inflight: Counter[tuple[int, bytes, int]] = field(default_factory=Counter)
    """Namespace, key and variant of seals under way."""
    drops: Counter[Name] = field(default_factory=Counter)
    """How often what is under a name may have been dropped."""
    rotten: set[Name] = field(default_factory=set)
    """Damaged on the disk, and not put again since."""

    def possible(self, name: Name) -> set[int]:
        """Variants that a reader may find under a key."""
        flying = {variant for variant in VARIANTS if self.inflight[(*name, variant)] > 0}
        return self.sealed.get(name, set()) | flying

    def check_digest(self, name: Name, digest: bytes) -> None:
        """What was found under a key is what somebody sealed."""
        nbytes = nbytes_of(name[0])
        wanted = {variant_digest(name[1], variant, nbytes) for variant in self.possible(name)}
        assert digest in wanted, f"{name}: nobody sealed this"

    def take_in(self, put: Put, name: Name, answer: tuple[str, str], *, dropped: bool) -> None:
        """A seal was answered; `dropped` if what it made may have been dropped meanwhile."""
        result, reason = answer
        sealed = self.sealed.setdefault(name, set())
        assert bool(reason) == (result in ("refused", "partial", "divergent"))
        if result == "stored" or (result == "refused" and put.retention == "durable"):
            sealed.add(put.variant)
        if result == "stored":
            self.rotten.discard(name)
        elif result == "exists":
            assert put.variant in self.possible(name)
        elif result == "divergent":
            assert self.possible(name) - {put.variant}
        kept = result in ("stored", "exists") and put.retention == "durable"
        if kept and not dropped and name not in self.rotten:
            self.durable[name] = put.variant

    def rebuild(self, put: Put) -> None:
        """A runner seals blobs: they may be of its bytes from now on, durable or not."""
        for key in put.keys:
            name = (put.ns, key)
            if self.durable.get(name, put.variant) != put.variant:
                del self.durable[name]

    def forget_below(self, ns: int, key: bytes) -> None:
        """A blob and what continues it were dropped."""
        path = PATHS[ns, key]
        for name, below in PATHS.items():
            if name[0] == ns and below[: len(path)] == path:
                self.drops[name] += 1
                self.durable.pop(name, None)

    def rot(self, name: Name) -> None:
        """The only copy of a blob was damaged."""
        self.rotten.add(name)
        self.drops[name] += 1
        self.durable.pop(name, None)

    def crash(self) -> None:
        """Seals under way may have published, and nobody will learn of it."""
        for (ns, key, variant), n in self.inflight.items():
            if n > 0:
                self.sealed.setdefault((ns, key), set()).add(variant)
        self.inflight.clear()


def nbytes_of(ns: int) -> int:
    """The size of a blob of a namespace."""
    return NAMESPACES[ns].layout.nbytes(NAMESPACES[ns].tokens_per_blob)


@functools.cache
def variant_digest(key: bytes, variant: int, nbytes: int) -> bytes:
    return digest_of(payload_of(key, variant, nbytes))


class EveryJob:
    """There is a rebuild under way of every blob."""

    def entry(self, job_id: int, ns: NamespaceState, key: bytes) -> TextEntry:
        number = NUMBERS[ns.id]
        digest = variant_digest(key, 0, nbytes_of(number))
        tokens = bytes(ID_BYTES * ns.namespace.tokens_per_blob)
        return TextEntry(b"", 0, tokens, nbytes_of(number), digest)

    def made(self, job_id: int, key: bytes) -> None:
        """Nobody waits for it."""
