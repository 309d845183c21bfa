"""Frames that no client of ours sends: garbage, damaged ones, right ones with absurd fields."""

from __future__ import annotations

import math
import random
import struct
from typing import Any, get_args, get_type_hints

import msgspec

from blobstore import protocol as p
from blobstore.keys import Keys
from blobstore.namespace import Namespace
from blobstore.transports.framing import HEADER_BYTES, MAGIC, MAX_BODY_BYTES, pack

REQUESTS: tuple[type[p.Request], ...] = get_args(p.AnyRequest)

NUMBERS = (0, 1, 2, 3, 8, 32, 64, 65, 4096, 2**31 - 1, 2**32, 2**53 + 1, 2**63, 2**64 - 1)
SECONDS = (0.0, 0.001, -0.0, -1.0, 3600.1, 1e300, math.inf, -math.inf, math.nan, 5e-324)
TEXTS = (
    "",
    "dram",
    "ssd",
    "durable",
    "standard",
    "volatile",
    "eternal",
    "\0",
    "ü" * 300,
    "x" * 70000,
)
LENGTHS = (MAX_BODY_BYTES + 1, 2**31, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1)


class Fuzzer:
    """Makes frames at random around a namespace and keys that the daemon knows."""

    def __init__(self, seed: int, boot_id: int, namespace: Namespace, keys: Keys) -> None:
        self._rng = random.Random(seed)
        self._boot_id = boot_id
        self._namespace = namespace
        self._keys = keys
        self._known = [namespace.id, namespace.encode(), *keys]

    def whole_frame(self) -> bytes:
        """One frame of a right length; its body may be anything."""
        body = self._rng.choice((self._noise, self._tree, self._damaged, *3 * [self._absurd]))()
        return pack(self._rng.choice((0, 1, 7, 2**32 - 1)), self._boot(), body)

    def broken_frame(self) -> bytes:
        """Bytes after which nothing of the stream can be told: half frames, wrong headers."""
        rng = self._rng
        frame = bytearray(self.whole_frame())
        match rng.randrange(4):
            case 0:
                return bytes(frame[: rng.randrange(1, len(frame))])
            case 1:
                return struct.pack("<4sIQQ", MAGIC, 1, self._boot_id, rng.choice(LENGTHS))
            case 2:
                frame[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
                return bytes(frame)
            case _:
                return self._noise()

    def request(self, kind: type[p.Request]) -> p.Request:
        """A message of this kind whose fields have their types, and some of them absurd values."""
        hints = get_type_hints(kind)
        fields = {name: self._value(hints[name]) for name in kind.__struct_fields__}
        if self._rng.random() < 0.8:  # one field absurd, or none: this gets further in
            right = self._right_fields()
            absurd = self._rng.choice((*fields, ""))
            fields |= {name: right[name] for name in fields if name in right and name != absurd}
        return kind(**fields)

    def _right_fields(self) -> dict[str, Any]:
        """By name, values of which most are right whatever the message is."""
        rng = self._rng
        n = rng.randint(1, len(self._keys))
        some_id = rng.randint(1, 60)
        return {
            "version": p.VERSION,
            "client": "fuzz",
            "namespace": self._namespace.encode(),
            "namespace_id": self._namespace.id,
            "keys": self._keys[:n].packed,
            "key_bytes": self._keys.key_bytes,
            "timeout_s": rng.choice((0.0, 0.002)),
            "ttl_s": rng.choice((0.0, 0.5)),
            "lease_id": some_id,
            "lease_ids": [some_id, some_id + 1],
            "reservation_id": some_id,
            "index": rng.randrange(n),
            "start": 0,
            "end": 10,
            "parent": b"",
            "tail_tokens": 0,
            "retention": rng.choice(("durable", "standard", "volatile")),
            "group": rng.choice(("", "g")),
            "epoch": rng.randrange(2),
            "parts": rng.choice(([], [0])),
            "hint": rng.choice(({}, {"session": "s", "turn": 3, "kind": "main", "finish": "stop"})),
            "terms": rng.choice(({}, {"text": "off"}, {"text": "text", "recall": "never"})),
            "tokens": rng.choice((b"", bytes(4 * n * self._namespace.tokens_per_blob))),
            "text": rng.choice(("", "said")),
            "tier": rng.choice(("", "dram")),
            "digests": [],
            "alive": [],
            "extents": [],
        }

    def _boot(self) -> int:
        return self._boot_id if self._rng.random() < 0.9 else self._rng.getrandbits(64)

    def _noise(self) -> bytes:
        return self._rng.randbytes(self._rng.choice((1, 3, 24, 25, 200, 5000)))

    def _absurd(self) -> bytes:
        return p.encode(self.request(self._rng.choice(REQUESTS)))

    def _damaged(self) -> bytes:
        body = bytearray(self._absurd())
        for _ in range(self._rng.randint(1, 4)):
            body[self._rng.randrange(len(body))] = self._rng.randrange(256)
        return bytes(body)

    def _tree(self) -> bytes:
        """Well-formed msgpack that is no message, or one of the wrong types or number of fields."""
        rng = self._rng
        if rng.random() < 0.1:  # arrays in arrays, behind the fields of a Ping
            return b"\x93\x02\xc4\x00" + b"\x91" * rng.choice((100, 10_000)) + b"\xc0"
        kind = rng.choice(REQUESTS)
        tag: Any = kind.__struct_config__.tag
        return msgspec.msgpack.encode([tag, *(self._any() for _ in range(rng.randrange(8)))])

    def _any(self) -> object:
        return self._value(self._rng.choice((int, float, str, bytes, bool, list, dict, None)))

    def _value(self, kind: Any) -> Any:
        rng = self._rng
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return rng.choice(NUMBERS)
        if kind is float:
            return rng.choice(SECONDS)
        if kind is str:
            return rng.choice(TEXTS)
        if kind is bytes:
            return self._bytes()
        if kind is None:
            return None
        if getattr(kind, "__origin__", kind) is dict:
            values = TEXTS if get_args(kind) == (str, str) else NUMBERS
            return {rng.choice(TEXTS): rng.choice(values) for _ in range(rng.randrange(4))}
        item = (get_args(kind) or (int,))[0]
        return [self._value(item) for _ in range(rng.randrange(5))]

    def _bytes(self) -> bytes:
        rng = self._rng
        match rng.randrange(8):
            case 0:
                return b""
            case 1:
                return rng.randbytes(rng.choice((1, 7, 16, 31, 32, 33, 64, 65)))
            case 2:
                return bytes(rng.choice(self._known)) * rng.randint(1, 3)
            case 3:
                return b"".join(rng.sample(self._known, rng.randint(1, len(self._known))))
            case _:
                return bytes(rng.choice(self._known))
