"""Which keys and values are interchangeable: the namespaces of one vLLM engine.

A block hash says which tokens led to a block, and nothing else. All else that its
bytes depend on is in the namespace: weights, adapter, dtypes, quantisation, parallel
sizes, the layout of blobs and of blocks, and how the hashes are made. How blocks are
packed is seen by the workers alone, once they have made their caches.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.vllm.adapters import Adapters
from blobstore.clients.vllm.agreement import Agreement
from blobstore.clients.vllm.geometry import Geometry, Group, geometry_of
from blobstore.clients.vllm.hashing import Hashing, hashing_of
from blobstore.clients.vllm.layers import DTYPES
from blobstore.clients.vllm.libraries import Tensor
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.packing import packing_of
from blobstore.clients.vllm.weights import Weights, config_digest, weights_of
from blobstore.errors import InvalidRequest
from blobstore.keys import Keys
from blobstore.layout import Shard
from blobstore.namespace import Namespace, WriterGroup


def identify(vllm_config: Any, kv_cache_config: Any, options: Options) -> Identity:
    """The identity of an engine, in either role of a connector.

    Raises InvalidRequest for an engine whose state cannot be stored, or not found again,
    with what mends it. Reads no weights yet.
    """
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise InvalidRequest(
            "calculate_kv_scales makes the bytes of tokens depend on the first request: use a "
            "checkpoint with scales, or none"
        )
    geometry = geometry_of(vllm_config, kv_cache_config, options.tokens_per_blob)
    hashing = hashing_of(vllm_config.cache_config, geometry.hash_tokens)
    weights = weights_of(vllm_config, options.weights_digest)
    return Identity(vllm_config, geometry, hashing, weights, options)


class Identity:
    """What an engine's blobs are called, and which blocks they are made of. For all threads."""

    def __init__(
        self,
        vllm_config: Any,
        geometry: Geometry,
        hashing: Hashing,
        weights: Weights,
        options: Options,
    ) -> None:
        self.geometry = geometry
        self._config = vllm_config
        self._hashing = hashing
        self._weights = weights
        self._options = options
        self._adapters = Adapters(getattr(vllm_config, "lora_config", None))
        self._packing = Agreement(self.ranks)
        self._lock = threading.Lock()
        self._digest = ""
        self._bound = lru_cache(maxsize=256)(self._bind)

    @property
    def ranks(self) -> int:
        """Of the engine, which fill blobs together."""
        return int(self._config.parallel_config.tensor_parallel_size)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of layers that share a block table."""
        return self.geometry.groups

    @property
    def blob_tokens(self) -> int:
        """Tokens per blob."""
        return self.geometry.blob_tokens

    @property
    def blob_bytes(self) -> int:
        """Of a whole blob, of all ranks."""
        return self.geometry.layout.nbytes(self.blob_tokens)

    @property
    def hash_tokens(self) -> int:
        """Tokens per block hash of a request."""
        return self.geometry.hash_tokens

    @property
    def shard(self) -> Shard | None:
        """This rank's share of each blob; None if that is all of it."""
        return self.geometry.shard

    @property
    def writer_group(self) -> WriterGroup | None:
        """The ranks that fill blobs together, of this start of the engine."""
        if self.shard is None:
            return None
        engine = self._config.kv_transfer_config.engine_id
        return WriterGroup(f"{engine}/{getattr(self._config, 'instance_id', '')}")

    def adapter_of(self, lora_request: Any) -> str:
        """What a request's adapter is called, for `bound`; see Adapters.name_of."""
        return self._adapters.name_of(lora_request)

    def packing(self, kv_caches: Mapping[str, Tensor]) -> dict[int, str]:
        """How this rank's caches pack blocks, by its number: a worker says it to `hear`.

        Raises InvalidRequest if that cannot be told.
        """
        names = [layer.name for layer in self.geometry.layers]
        rank = self.shard.tp_rank if self.shard is not None else 0
        return {rank: packing_of(self._config, names, kv_caches)}

    def hear(self, packings: Mapping[int, str]) -> None:
        """What `packing` said in some of the ranks. Without all of them nothing is `bound`."""
        self._packing.hear(packings)

    def bound(self, adapter: str = "") -> BoundNamespace:
        """The namespace of the model with an adapter, and this rank's share of it.

        The first call reads all weights, unless their digest is known otherwise. Raises
        OSError, or InvalidRequest, if they cannot be read; InvalidRequest if ranks pack blocks
        differently, or have not said how, for which it waits a moment.
        """
        return self._bound(self._namespace(adapter).encode())

    def bound_of(self, encoded: bytes) -> BoundNamespace:
        """As `bound`, of a namespace that another role of the connector encoded."""
        return self._bound(encoded)

    def keys(self, block_hashes: Sequence[bytes]) -> Keys:
        """One key per whole blob: the hash of its last block, which covers all before it."""
        step = self.blob_tokens // self.hash_tokens
        return Keys.of([bytes(each) for each in block_hashes[step - 1 :: step]])

    def check_hashes(self) -> None:
        """InvalidRequest if vLLM's hashes are others than declared; before the first is used."""
        self._hashing.check()

    def _bind(self, encoded: bytes) -> BoundNamespace:
        return BoundNamespace(Namespace.decode(encoded), self.shard)

    def _namespace(self, adapter: str) -> Namespace:
        model = self._config.model_config
        weights = self._weights_digest()  # may take long: ranks say how they pack meanwhile
        layout = self.geometry.layout
        return Namespace(
            model=self._weights.model,
            layout=replace(layout, order=f"{layout.order};{self._packing.agreed()}"),
            revision=self._options.revision or str(getattr(model, "revision", None) or ""),
            weights_digest=weights,
            dtype=self._dtype(),
            tokens_per_blob=self.blob_tokens,
            adapter=adapter,
            salt=self._options.salt,
            hash_scheme=self._hashing.scheme,
        )

    def _weights_digest(self) -> str:
        with self._lock:
            if not self._digest:
                config = config_digest(self._config.model_config)
                self._digest = f"{self._weights.digest()} config {config}"
            return self._digest

    def _dtype(self) -> str:
        """In what the engine computes. Ranks add up in another order, so their number counts."""
        model, dtype = self._config.model_config, str(self._config.model_config.dtype)
        cache = getattr(self._config.cache_config, "cache_dtype", "auto")
        words = [DTYPES.get(dtype, dtype), f"cache={cache}"]
        words.append(f"weights={getattr(model, 'quantization', None) or 'plain'}")
        words.append(f"ranks={self.ranks}")
        return " ".join(words)
