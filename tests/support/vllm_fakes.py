"""Stand-ins for vLLM's objects, as far as the connector looks at them: no vLLM, no torch."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.hit import Hit
from blobstore.clients.vllm.geometry import Group
from blobstore.errors import InvalidRequest
from blobstore.keys import Keys
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace, WriterGroup

BLOCK_TOKENS = 4
BLOB_TOKENS = 8
TOKEN_BYTES = 1024
BLOB_BYTES = BLOB_TOKENS * TOKEN_BYTES


def block_hashes(token_ids: Sequence[int]) -> list[bytes]:
    """One for each full block, over all tokens up to its end."""
    ends = range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS)
    return [hashlib.sha256(repr(list(token_ids[:end])).encode()).digest() for end in ends]


def content(token_ids: Sequence[int], block: int) -> bytes:
    """What the model makes of block number `block` of these tokens."""
    seen = token_ids[: (block + 1) * BLOCK_TOKENS]
    return hashlib.shake_128(repr(list(seen)).encode()).digest(BLOCK_TOKENS * TOKEN_BYTES)


@dataclass
class FakeRequest:
    """A vLLM request."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    session_id: str | None = None
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return block_hashes(self.token_ids)


@dataclass
class FakeLora:
    """An adapter's request."""

    lora_name: str


@dataclass
class FakeState:
    """Block tables of all requests."""

    tables: dict[str, tuple[list[int], ...]]

    def resolve_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.tables[request_id]


class FakeOutput:
    """One step of the scheduler: tokens and tables by request."""

    def __init__(self, tokens: dict[str, int], tables: dict[str, tuple[list[int], ...]]) -> None:
        self.num_scheduled_tokens = tokens
        self.kv_connector_block_state = FakeState(tables)


@dataclass
class FakeIdentity:
    """The identity of an engine with one group of full attention, unless told otherwise."""

    groups: tuple[Group, ...] = (Group(0, BLOCK_TOKENS, 0),)
    blob_tokens: int = BLOB_TOKENS
    hash_tokens: int = BLOCK_TOKENS
    blob_bytes: int = BLOB_BYTES
    writer_group: WriterGroup | None = None
    unnamed: set[str] = field(default_factory=set)
    """Adapters that have no name."""
    hashes_are_wrong: bool = False
    layout: KVLayout | None = None
    """Of a blob without structure, unless told."""

    def adapter_of(self, lora_request: Any) -> str:
        if lora_request is None:
            return ""
        if lora_request.lora_name in self.unnamed:
            raise InvalidRequest(f"{lora_request.lora_name} cannot be named")
        return str(lora_request.lora_name)

    def bound(self, adapter: str = "") -> BoundNamespace:
        return BoundNamespace(
            Namespace(
                "fake",
                self.layout or KVLayout.opaque(self.blob_bytes),
                tokens_per_blob=self.blob_tokens,
                adapter=adapter,
                hash_scheme="vllm/fake",
            )
        )

    def bound_of(self, encoded: bytes) -> BoundNamespace:
        return BoundNamespace(Namespace.decode(encoded))

    def keys(self, hashes: Sequence[bytes]) -> Keys:
        step = self.blob_tokens // self.hash_tokens
        return Keys.of(list(hashes[step - 1 :: step]))

    def check_hashes(self) -> None:
        if self.hashes_are_wrong:
            raise InvalidRequest("the hashes begin otherwise")


class FakeCopies:
    """The engine's memory: bytes by block id. `fails` makes every copy raise.

    Copies out are gathered at once, and brought to the payload when they are finished, unless
    that `breaks`. There is `room` for so many more, if it is told.
    """

    def __init__(self, layers: int = 1) -> None:
        self.layers = layers
        self.read_bytes = self.written_bytes = BLOB_BYTES
        self.blocks: dict[int, bytes] = {}
        self.fails = self.breaks = False
        self.room: int | None = None

    def fence(self) -> None:
        return None

    def has_room(self, layer: int | None = None) -> bool:
        return self.room is None or self.room > 0

    def out(
        self, blocks: Sequence[Sequence[int]], payload: memoryview, layer: int | None = None
    ) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError("the device is gone")
        if self.room is not None:
            self.room -= 1
        copied = b"".join(self.blocks[each] for each in blocks[0])
        span = len(payload) // self.layers
        layers = range(self.layers) if layer is None else [layer]

        def finish() -> None:
            if self.breaks:
                raise RuntimeError("the device was lost")
            for each in layers:
                payload[each * span : (each + 1) * span] = copied[each * span : (each + 1) * span]

        return finish

    def move(self, aside: memoryview, payload: memoryview) -> None:
        payload[:] = aside

    def into(
        self, blocks: Sequence[Sequence[int]], payload: memoryview, skip: int, fence: Any
    ) -> None:
        if self.fails:
            raise RuntimeError("the device is gone")
        size = BLOCK_TOKENS * TOKEN_BYTES
        for at, block in enumerate(blocks[0]):
            if at * BLOCK_TOKENS >= skip:
                self.blocks[block] = bytes(payload[at * size : (at + 1) * size])


class FakeClient:
    """Answers matches with `hit`, once `answers` is set; remembers what it was asked."""

    def __init__(self, hit: Hit) -> None:
        self.hit = hit
        self.tail = Hit(0, 0)
        """For questions about the end of a chain, which come without a hint."""
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.hints: list[dict[str, Any]] = []
        self.tails: list[int] = []
        self.prefetched: list[int] = []
        self.room = 1 << 20
        """For how many blobs DRAM has room."""
        self.declared: list[Namespace] = []

    def namespace(self, namespace: Namespace, shard: Any) -> None:
        self.declared.append(namespace)

    def match(self, ns: BoundNamespace, keys: Keys, *, hint: Any = None, timeout_s: float) -> Hit:
        self.asked.set()
        assert self.answers.wait(10.0)
        if hint is None:
            self.tails.append(len(keys))
            return self.tail
        self.hints.append(hint.as_dict())
        return self.hit

    def prefetch(self, ns: BoundNamespace, keys: Keys, *, timeout_s: float) -> int:
        self.prefetched.append(len(keys))
        return min(len(keys), self.room)


class FakeDaemon:
    """As Daemon, with a client of the test's choice."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.usable = True
        self.noted: list[str] = []

    def reach(self) -> Any:
        return self.client

    def note(self, reason: str) -> None:
        self.noted.append(reason)
