"""torch and transformers, imported when they are needed: nothing else here imports them."""

from __future__ import annotations

import importlib
from typing import Any

HINT = (
    "blobstore.clients.transformers needs torch and transformers 5: "
    "pip install 'kv-blobstore[transformers]'"
)

Tensor = Any
"""A torch.Tensor. Its type is not named, so that type checkers need no torch."""


def torch() -> Any:
    """The module; ImportError that says what to install if there is none."""
    return _load("torch")


def cache_utils() -> Any:
    """The module of transformers that holds its caches; ImportError as `torch`."""
    module = _load("transformers.cache_utils")
    if not hasattr(module, "DynamicSlidingWindowLayer"):
        raise ImportError(f"{HINT} (this transformers is too old)")
    return module


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{HINT} ({error})") from error
