"""Blobs whose bytes follow from their keys, so that every process knows what is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blobstore.clients import Client, Keys, KVLayout, Namespace

TOKENS = 4
"""In a blob: few, since nobody looks at them."""


def opaque(nbytes: int, model: str = "m") -> Namespace:
    """A namespace of blobs of `nbytes`."""
    return Namespace(model=model, layout=KVLayout.opaque(nbytes), tokens_per_blob=TOKENS)


def chain(namespace: Namespace, seed: int, n: int) -> Keys:
    """Keys of a context of `n` blobs; contexts of different seeds share none."""
    return namespace.keys(np.r_[seed, 1 : TOKENS * n])


def payload_of(key: bytes, nbytes: int) -> bytes:
    """The bytes of the blob with this key and size."""
    return np.random.default_rng(int.from_bytes(key[:16], "little")).bytes(nbytes)


def payloads_of(keys: Sequence[bytes], nbytes: int) -> list[bytes]:
    """`payload_of` for each key."""
    return [payload_of(key, nbytes) for key in keys]


def put(kv: Client, namespace: Namespace, keys: Keys, retention: str = "standard") -> list[str]:
    """Put the blobs of `keys`; what became of each."""
    ns = kv.namespace(namespace)
    contents = payloads_of(keys, namespace.layout.nbytes(TOKENS))
    return kv.put_from(ns, keys, contents, retention=retention)


def count_right(kv: Client, namespace: Namespace, keys: Keys, timeout_s: float = 20.0) -> int:
    """How many leading blobs a get gives; AssertionError if any of them has wrong bytes."""
    nbytes = namespace.layout.nbytes(TOKENS)
    with kv.get(kv.namespace(namespace), keys, timeout_s=timeout_s) as lease:
        for key, payload in zip(keys, lease, strict=False):
            assert payload == payload_of(key, nbytes), f"wrong bytes under {key.hex()[:12]}"
        return len(lease)
