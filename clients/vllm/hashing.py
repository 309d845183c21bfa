"""vLLM's block hashes: by what rule they are made, and whether other processes make the same.

Every hash follows from the one before it, and the first from a constant of the engine
that may be random. Then no other process ever finds what this one stores.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from blobstore.clients.vllm import libraries
from blobstore.errors import InvalidRequest

SEED = "PYTHONHASHSEED"
"""The variable of the environment from which vLLM derives the first hash, if it is set."""

_UTILS = "v1.core.kv_cache_utils"


@dataclass(frozen=True, slots=True)
class Hashing:
    """The rule, as a text for the identity, and the hash before the first block's."""

    scheme: str
    none_hash: bytes

    def check(self) -> None:
        """InvalidRequest unless vLLM began its hashes as expected.

        It sets them up after its connectors, so this is for later, before the first use.
        """
        found = getattr(libraries.vllm(_UTILS), "NONE_HASH", None)
        if found != self.none_hash:
            raise InvalidRequest(
                f"vLLM's block hashes begin with {_short(found)}, not with "
                f"{_short(self.none_hash)}: set {SEED} to the same number for all engines"
            )


def hashing_of(cache_config: Any, hash_tokens: int) -> Hashing:
    """How an engine hashes blocks of `hash_tokens` tokens.

    Raises InvalidRequest with the line that mends it if they begin with random bytes.
    """
    name = str(cache_config.prefix_caching_hash_algo)
    none_hash = none_hash_of(name)
    return Hashing(scheme_of(name, none_hash, hash_tokens), none_hash)


def none_hash_of(name: str) -> bytes:
    """The hash before the first block's, by the algorithm `name`.

    Raises InvalidRequest with the line that mends it if it is random; ImportError or
    ValueError if vLLM has no such algorithm, or not all that it needs.
    """
    hash_of = libraries.vllm("utils.hashing").get_hash_fn_by_name(name)
    seed = _seed(hash_of)
    if seed is None:
        raise random_hashes(f"block hashes by {name!r}")
    return bytes(hash_of(seed))


def random_hashes(what: str) -> InvalidRequest:
    """The error that `what` begins with random bytes, with the line that mends it."""
    return InvalidRequest(
        f"{what} begin with random bytes in every process, so that nothing stored would ever be "
        f"found again: export {SEED}=0 for every engine, or choose --prefix-caching-hash-algo "
        "sha256"
    )


def scheme_of(name: str, none_hash: bytes, hash_tokens: int) -> str:
    """The rule as a text: hashes by algorithm `name` that begin with `none_hash`."""
    scheme = f"vllm/{name}/{sha256(none_hash).hexdigest()[:32]}/{hash_tokens}"
    if not name.endswith("_cbor"):  # pickled, which every version of Python does in its own way
        scheme += f"/py{sys.version_info.major}.{sys.version_info.minor}"
    return scheme


def _seed(hash_of: Any) -> str | None:
    """From what vLLM derives the constant; None if that is random."""
    resolve = getattr(libraries.vllm(_UTILS), "resolve_none_hash_seed", None)
    if resolve is None:  # releases that take random bytes unless told otherwise
        return os.environ.get(SEED)
    seed = str(resolve(hash_of))
    return seed if seed == resolve(hash_of) else None


def _short(found: object) -> str:
    return f"{found.hex()[:12]}…" if isinstance(found, bytes) else "nothing"
