"""Which chunks of vLLM's offloading are interchangeable: the namespace of a tier.

All that the engine's own tier of files is named by, and what that leaves out: the weights
as they are, vLLM's release, the device, the layout in memory, and where block hashes begin.
A tier sees less of its engine than a connector: what is decided when weights are loaded
(dummy weights, quantisation on the fly, overrides) is for `weights_digest` or `salt` to tell,
and so is an attention backend that is named in the configuration. Of the one that vLLM
chooses by itself the tier has what the choice depends on.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.hashing import SEED, none_hash_of, random_hashes, scheme_of
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.packing import release, what_decides
from blobstore.clients.vllm.weights import digest_of, place_of
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.layer_group import LayerGroup
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_WHAT = "the tier stores and reads nothing"


class TierIdentity:
    """Knows the namespace once the weights were read and the engine has begun its hashes.

    Raises InvalidRequest if the weights cannot be told apart from others.
    """

    def __init__(self, spec: Any, options: Options, row_bytes: int, faults: Faults) -> None:
        self._options = options
        self._row_bytes = row_bytes
        self._faults = faults
        self._config = spec.config
        self._chunk_tokens = max(chunk_tokens(spec).values())
        self._model, _ = place_of(str(spec.config.model.name))
        self._digest = _weights(str(spec.config.model.name), options)
        self._fields = {**_engine_fields(spec), "model_name": self._model}
        self._weights = ""
        self._refused = False
        self._lock = threading.Lock()
        self._bound: BoundNamespace | None = None
        self._reading = threading.Thread(target=self._read, name="blobstore-weights", daemon=True)
        self._reading.start()

    def now(self) -> BoundNamespace | None:
        """The namespace; None if it is not known yet, or never will be, which is said once."""
        if self._bound is None and self._weights and not self._refused:
            with self._lock:
                try:
                    self._bound = self._bound or self._bind()
                except BlobStoreError as error:
                    self._refuse(error)
        return self._bound

    def close(self, timeout_s: float) -> None:
        """Wait for the weights, if they are still being read; no longer than `timeout_s`."""
        self._reading.join(timeout_s)

    def _read(self) -> None:
        try:
            self._weights = self._digest()
        except (BlobStoreError, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._refused = True
        self._faults.note(_WHAT, str(error))

    def _bind(self) -> BoundNamespace | None:
        scheme = _hash_scheme(int(self._config.cache.tokens_per_hash))
        if not scheme:
            return None
        told = json.dumps(self._fields, sort_keys=True, default=str)
        order = f"vllm-tier/{sha256(told.encode()).hexdigest()}"
        row = LayerGroup("opaque", 1, state_bytes=self._row_bytes)
        namespace = Namespace(
            model=self._model,
            layout=KVLayout((row,), order=order),
            revision=self._options.revision,
            weights_digest=self._weights,
            dtype=str(self._config.model.dtype),
            tokens_per_blob=self._chunk_tokens,
            salt=self._options.salt,
            hash_scheme=scheme,
        )
        return BoundNamespace(namespace)


def chunk_tokens(spec: Any) -> dict[int, int]:
    """Tokens of a chunk, of each cache group by its number."""
    return {
        int(group.group_id): int(group.tokens_per_block) * int(spec.blocks_per_chunk)
        for group in spec.config.groups
    }


def _engine_fields(spec: Any) -> dict[str, Any]:
    """What names the folder of the engine's own tier, and what it leaves out."""
    config, platform = spec.config, libraries.vllm("platforms").current_platform
    canonical = bool(getattr(config, "canonical_layout", False))
    mapper = libraries.vllm("v1.kv_offload.file_mapper").FileMapper.from_offloading_spec(
        root_dir="/",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=canonical,  # otherwise a row is cut by ranks
    )
    return {
        **mapper.get_run_config(),
        "rank": mapper.rank,
        "kv_cache_layout": getattr(config, "kv_cache_layout", None),
        "release": release(),
        "device": f"{platform.device_type} {platform.get_device_name()}",
        "attention": what_decides(),
    }


def _weights(model: str, options: Options) -> Callable[[], str]:
    """Makes the digest of the weights, which may take long."""
    commit = options.revision if _COMMIT.fullmatch(options.revision) else ""
    digest = digest_of(model, options.weights_digest, commit)
    if digest is None:
        raise InvalidRequest(
            f"which weights of {model!r} are loaded is not to be seen from a tier: say their "
            'commit, "revision": "…", or name them by "weights_digest", which is to change when '
            "they do"
        )
    return digest


def _hash_scheme(hash_tokens: int) -> str:
    """The rule of the engine's block hashes; "" as long as it has not begun them.

    It does not tell a tier which algorithm it uses, but that is the one which makes its first
    hash. InvalidRequest if that is random.
    """
    none_hash = getattr(libraries.vllm("v1.core.kv_cache_utils"), "NONE_HASH", None)
    if none_hash is None:
        return ""
    for name in ALGORITHMS:
        if _first_hash(name) == none_hash:
            return scheme_of(name, none_hash, hash_tokens)
    if SEED in os.environ:
        raise InvalidRequest(f"block hashes are of none of {', '.join(ALGORITHMS)}")
    raise random_hashes("block hashes")


def _first_hash(algorithm: str) -> bytes | None:
    """None if it is random, or needs a package that is not there."""
    try:
        return none_hash_of(algorithm)
    except (ImportError, ValueError):
        return None
