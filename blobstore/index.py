"""What the daemon knows about each blob, in memory: one record per blob, linked to its parent.

The index answers "is it held, and where"; it moves no bytes. It is used on the
event loop only. Two invariants carry the rest of the service:

- a blob that is held has its parent held (or is a root), so a chain is present
  exactly up to some blob and match may gallop;
- a blob that was readable in DRAM counts in its parent's `dram_children` until
  its bytes there are freed, and such a parent does not leave DRAM, so that
  pinning a leaf keeps all its ancestors.

A blob whose bytes were lost (corrupt, with no other copy) but which others
continue stays as a *hole*: matches end there until somebody puts it again.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.fill import Fill
from blobstore.key_order import KeyOrder
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.tiering.tier import Extent

_pack_extent = struct.Struct("<QQ").pack


class Retention(IntEnum):
    """How long a blob must be kept; a later put may raise it, never lower it."""

    VOLATILE = 0
    STANDARD = 1
    DURABLE = 2

    @classmethod
    def parse(cls, name: str) -> Retention:
        """The retention called `name`; InvalidRequest if there is none."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise InvalidRequest(
                f"unknown retention {name!r}: use volatile, standard or durable"
            ) from None


class Record:
    """One blob: identity, sizes, digests, and where its bytes are."""

    __slots__ = (
        "_kids",
        "counted",
        "depth",
        "digest",
        "dirty",
        "dram",
        "dram_children",
        "fill",
        "gone",
        "heirs",
        "hole",
        "key",
        "last_used",
        "nbytes",
        "ns",
        "packed",
        "parent",
        "pieces",
        "pins",
        "retention",
        "ssd",
        "stub",
        "tokens",
        "unsaved",
    )

    def __init__(
        self, ns: NamespaceState, key: bytes, parent: Record | None, nbytes: int, tokens: int
    ) -> None:
        self.ns = ns
        self.key = key
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        """Number of blobs from the root to this one."""
        self.nbytes = nbytes
        self.tokens = tokens
        self.retention = Retention.STANDARD
        self.digest = b""
        self.pieces = b""
        self.dram: Extent | None = None
        self.packed = b""
        """Offset and length in the arena as sent to clients; empty unless readable there."""
        self.ssd: Extent | bool = False
        """Extent on SSD, True if stored inside the catalogue, False if not on SSD."""
        self.stub = False
        """It has a row on SSD without payload, for what continues it: its copy there was lost."""
        self.fill: Fill | None = None
        """Bytes on their way into DRAM."""
        self.pins = 0
        """Leases, loans to writers and I/O in flight: DRAM bytes stay while any is left."""
        self.counted = False
        """Counts in its parent's `dram_children`: somebody may read its bytes in DRAM."""
        self.dram_children = 0
        """Blobs that continue this one and have bytes in DRAM that somebody may read."""
        self.heirs = 0
        """Writers that continue or repeat this blob: it must not vanish meanwhile."""
        self.dirty = False
        """Waiting to be written to SSD."""
        self.unsaved = False
        """Was to be on SSD and could not be written."""
        self.gone = False
        """No longer in the index; its bytes are freed when the last pin goes."""
        self.hole = False
        """Its bytes were lost, while others continue it."""
        self.last_used = 0.0
        self._kids: Record | set[Record] | None = None

    @property
    def readable(self) -> bool:
        """Sealed bytes are in DRAM."""
        return bool(self.packed)

    @property
    def held(self) -> bool:
        """The bytes are in some tier (a hole is not held)."""
        return self.packed != b"" or self.ssd is not False

    @property
    def cold(self) -> bool:
        """Only a load can make it readable, and nobody reads what an earlier one left."""
        no_bytes = self.packed == b"" and self.dram is None
        return self.ssd is not False and no_bytes and self.fill is None

    @property
    def has_row(self) -> bool:
        """The catalogue knows it, so that blobs which continue it may be there too."""
        return self.ssd is not False or self.stub

    @property
    def has_children(self) -> bool:
        """Some indexed blob continues this one."""
        return self._kids is not None

    def path(self) -> list[Record]:
        """The chain from its root down to this blob, whatever of it is held."""
        chain = [self]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        chain.reverse()
        return chain

    def children(self) -> Iterator[Record]:
        """The indexed blobs that continue this one."""
        if isinstance(self._kids, set):
            yield from self._kids
        elif self._kids is not None:
            yield self._kids

    def adopt(self, child: Record) -> None:
        """Count `child` among the blobs that continue this one."""
        # Most blobs have one child: a set for each would triple a record's size.
        if self._kids is None:
            self._kids = child
        elif isinstance(self._kids, set):
            self._kids.add(child)
        else:
            self._kids = {self._kids, child}

    def disown(self, child: Record) -> None:
        """Undo `adopt`."""
        if isinstance(self._kids, set):
            self._kids.discard(child)
            if len(self._kids) == 1:
                self._kids = self._kids.pop()
        elif self._kids is child:
            self._kids = None

    def show_in_dram(self, extent: Extent) -> None:
        """Make the bytes at `extent` readable under this record."""
        if not (self.packed or self.gone):
            self.ns.dram_bytes += self.nbytes
        self.dram = extent
        self.packed = _pack_extent(extent.offset, self.nbytes)

    def hide_in_dram(self) -> None:
        """Undo `show_in_dram`; the extent stays until it is freed."""
        if self.packed and not self.gone:
            self.ns.dram_bytes -= self.nbytes
        self.packed = b""

    def show_on_ssd(self, place: Extent | bool) -> None:
        """The bytes are on SSD, in an extent or (True) inside the catalogue."""
        if self.ssd is False and not self.gone:
            self.ns.ssd_bytes += self.nbytes
        self.ssd = place

    def leave_ssd(self) -> None:
        """Undo `show_on_ssd`."""
        if self.ssd is not False and not self.gone:
            self.ns.ssd_bytes -= self.nbytes
        self.ssd = False

    def extent_bytes(self) -> bytes:
        """Where the bytes are or will be in the arena, as sent to clients."""
        assert self.dram is not None
        return self.packed or _pack_extent(self.dram.offset, self.nbytes)

    def place(self) -> str:
        """The fastest tier that holds the bytes, or "none"."""
        if self.packed:
            return "dram"
        return "ssd" if self.ssd is not False else "none"


class NamespaceState:
    """A declared namespace and its blobs by key."""

    __slots__ = (
        "blobs", "drafts", "dram_bytes", "full_bytes", "id", "layout", "namespace", "order",
        "seed", "ssd_bytes",
    )  # fmt: skip

    def __init__(self, namespace: Namespace) -> None:
        self.id = namespace.id
        self.seed = int.from_bytes(namespace.id[:8], "little")
        """Keeps the identities of equal keys in different namespaces apart."""
        self.namespace = namespace
        self.layout: KVLayout = namespace.layout
        self.full_bytes = namespace.layout.nbytes(namespace.tokens_per_blob)
        """Payload size of a blob that is not a tail."""
        self.blobs: dict[bytes, Record] = {}
        self.order = KeyOrder()
        """The keys of `blobs`."""
        self.dram_bytes = 0
        """Payloads of `blobs` that are readable in DRAM."""
        self.ssd_bytes = 0
        """Payloads of `blobs` that are on SSD."""
        self.drafts: dict[bytes, list[Record]] = {}
        """Blobs being written, by key: several writers may write one key at once."""

    def nbytes(self, tokens: int) -> int:
        """Payload size of a blob of `tokens` tokens."""
        return self.layout.nbytes(tokens)


def identity(record: Record) -> int:
    """64 bits that stay with a blob's key and namespace for good, on any node."""
    return xxh3_64_intdigest(record.key, seed=record.ns.seed)


class Index:
    """All namespaces and records of this node."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, NamespaceState] = {}
        self.order = KeyOrder()
        """The ids of `namespaces`."""
        self.n_holes = 0
        self.on_stub_gone: Callable[[Record], None] = lambda record: None
        """Called when a blob goes whose row on SSD is a stub."""
        self.on_discarded: Callable[[Record], None] = lambda record: None
        """Called when a blob has gone: no tier holds it any more."""
        self.on_added: Callable[[Record], None] = lambda record: None
        """Called when a blob has become visible."""

    def declare(self, namespace: Namespace) -> NamespaceState:
        """The state of `namespace`, made if new."""
        state = self.namespaces.get(namespace.id)
        if state is None:
            state = self.namespaces[namespace.id] = NamespaceState(namespace)
            self.order.add(namespace.id)
        return state

    def namespace(self, namespace_id: bytes) -> NamespaceState:
        """The declared namespace with this id; UnknownNamespace otherwise."""
        state = self.namespaces.get(namespace_id)
        if state is None:
            raise UnknownNamespace(
                f"namespace {namespace_id.hex()[:12]} is not declared to this daemon: "
                "declare it first"
            )
        return state

    def records(self) -> Iterator[Record]:
        """Every record of every namespace."""
        for state in self.namespaces.values():
            yield from state.blobs.values()

    def count(self) -> int:
        """How many records there are."""
        return sum(len(state.blobs) for state in self.namespaces.values())

    def add(self, record: Record) -> None:
        """Make `record` visible; its parent must be visible or None."""
        blobs = record.ns.blobs
        assert record.key not in blobs
        assert record.parent is None or not record.parent.gone
        blobs[record.key] = record
        record.ns.order.add(record.key)
        if record.parent is not None:
            record.parent.adopt(record)
        self.on_added(record)

    def discard(self, record: Record) -> Record | None:
        """Make `record`, which nothing continues, invisible; a hole left bare above goes too.

        Returns the nearest ancestor that stays, which may be a leaf now.
        """
        assert not record.has_children
        node = record
        while True:
            state = node.ns
            del state.blobs[node.key]
            state.order.discard(node.key)
            state.dram_bytes -= node.nbytes if node.packed else 0
            state.ssd_bytes -= node.nbytes if node.ssd is not False else 0
            node.gone = True
            self.n_holes -= node.hole
            if node.stub:
                self.on_stub_gone(node)
            self.on_discarded(node)
            parent = node.parent
            if parent is None or parent.gone:
                return None
            parent.disown(node)
            if parent.has_children or not parent.hole:
                return parent
            node = parent

    def lose(self, record: Record) -> Record | None:
        """The record's bytes are nowhere any more: it becomes a hole, or goes as by `discard`."""
        if not record.has_children:
            return self.discard(record)
        self.n_holes += not record.hole
        record.hole = True
        return None

    def mend(self, record: Record) -> None:
        """A hole has bytes again."""
        self.n_holes -= record.hole
        record.hole = False

    def subtree(self, record: Record) -> list[Record]:
        """`record` and all that continue it, leaves last."""
        found = [record]
        for node in found:
            found.extend(node.children())
        return found

    def leading(self, state: NamespaceState, keys: bytes, key_bytes: int) -> int:
        """How many leading keys are held, asking for a few of them only.

        A held blob at depth d has d - 1 held ancestors, so one probe answers
        for all keys before it; only chains that were put as separate roots
        are asked key by key.
        """
        n = len(keys) // key_bytes
        get = state.blobs.get

        def held(i: int) -> bool:
            record = get(keys[i * key_bytes : (i + 1) * key_bytes])
            return record is not None and record.held

        def held_with_ancestors(i: int) -> bool:
            record = get(keys[i * key_bytes : (i + 1) * key_bytes])
            return record is not None and record.depth > i and record.held

        found = first_false(n, held_with_ancestors)
        while found < n and held(found):
            found += 1
        if self.n_holes and found:
            leaf = state.blobs[keys[(found - 1) * key_bytes : found * key_bytes]]
            found = _up_to_hole(leaf, found)
        return found

    def warm(self, state: NamespaceState, keys: bytes, key_bytes: int, n: int) -> int:
        """How many of the `n` leading keys, which are held, are readable in DRAM.

        An estimate where a blob was appended to one that is on SSD alone: then the
        end of a chain may be readable and what it continues not, so the end tells nothing.
        """
        get = state.blobs.get

        def cold(i: int) -> bool:
            record = get(keys[i * key_bytes : (i + 1) * key_bytes])
            return record is None or not record.packed

        if n == 0 or cold(0):
            return 0
        return bisect_left(range(n), 1, lo=1, key=cold)


def first_false(n: int, test: Callable[[int], bool]) -> int:
    """The least i < n for which `test` is false, else n, if it never turns true again."""
    if n == 0 or test(n - 1):  # most chains are held to their end
        return n
    return bisect_left(range(n - 1), 1, key=lambda i: not test(i))


def _up_to_hole(leaf: Record, n: int) -> int:
    """`n`, the length of a chain that ends at `leaf`, cut at its first hole."""
    node: Record | None = leaf
    for length in range(n, 0, -1):
        if node is None:
            break
        if not node.held:
            n = length - 1
        node = node.parent
    return n
