"""A connector for vLLM: what any engine has read is restored by the next one, not computed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BlobStoreConnector",
        "kv_connector_module_path": "blobstore.clients.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

vLLM is imported when the connector is looked up here: nothing else needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blobstore.clients.vllm.connector import BlobStoreConnector

__all__ = ["BlobStoreConnector"]


def __getattr__(name: str) -> object:
    if name != "BlobStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from blobstore.clients.vllm.connector import BlobStoreConnector

    return BlobStoreConnector
