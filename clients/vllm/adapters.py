"""LoRA adapters: each has a namespace of its own, named by what is in its files.

vLLM's block hashes know an adapter's name and path, not its weights.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.files import path_digest
from blobstore.errors import InvalidRequest


class Adapters:
    """What adapters are called in namespaces. For all threads.

    Args:
        lora_config: the engine's, of which the dtype says how it computes with them.
    """

    def __init__(self, lora_config: Any) -> None:
        self._dtype = str(getattr(lora_config, "lora_dtype", ""))
        self._lock = threading.Lock()
        self._names: dict[tuple[str, str, int], str] = {}

    def name_of(self, lora_request: Any) -> str:
        """Name, digest and dtype of an adapter; "" for None.

        Reads its files the first time, and never again: vLLM does not load them twice
        either. Raises InvalidRequest or OSError if they cannot be read, or if the request
        says that what goes by this name has changed.
        """
        if lora_request is None:
            return ""
        key = lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id
        if getattr(lora_request, "load_inplace", False):
            raise InvalidRequest(f"the adapter {key[0]!r} is loaded anew under the same name")
        with self._lock:
            name = self._names.get(key)
            if name is None:
                digest = path_digest(_folder(key[1]))
                name = self._names[key] = " ".join((key[0], digest, self._dtype))
        return name


def _folder(path: str) -> Path:
    """Where the files are: a folder, or what the hub's cache has of a repository."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder
    try:
        hub = libraries.load("huggingface_hub")
        return Path(hub.snapshot_download(path, local_files_only=True))
    except (ImportError, ValueError, OSError) as error:
        raise InvalidRequest(f"the adapter {path!r} is not on this machine ({error})") from error
