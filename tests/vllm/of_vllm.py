"""What tests use of vLLM, and what of ours imports it: its own warnings are no errors here."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name, sha256_cbor, xxhash
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.kv_offload.base import (
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from blobstore.clients.vllm.connector import (
        BlobStoreConnector,
        BlobStoreHandshake,
        BlobStoreMetadata,
        BlobStoreWorkerMetadata,
    )
    from blobstore.clients.vllm.metrics import BlobStorePromMetrics, BlobStoreStats
    from blobstore.clients.vllm.tier import BlobStoreTier

__all__ = [
    "BlobStoreConnector",
    "BlobStoreHandshake",
    "BlobStoreMetadata",
    "BlobStorePromMetrics",
    "BlobStoreStats",
    "BlobStoreTier",
    "BlobStoreWorkerMetadata",
    "CPUAttentionBackend",
    "EngineArgs",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVConnectorFactory",
    "KVConnectorLogging",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVOutputAggregator",
    "KVTransferConfig",
    "LookupResult",
    "ModelRunnerOutput",
    "OffloadingCacheConfig",
    "OffloadingConfig",
    "OffloadingGroupConfig",
    "OffloadingModelConfig",
    "OffloadingParallelConfig",
    "ReqContext",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "ScheduleEndContext",
    "Scheduler",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "StructuredOutputManager",
    "TieringOffloadingSpec",
    "get_hash_fn_by_name",
    "kv_cache_utils",
    "kv_transfer_state",
    "make_offload_key",
    "sha256_cbor",
    "unregister_vllm_metrics",
    "xxhash",
]
