"""torch and vLLM, imported when they are needed: the modules that use them import without."""

from __future__ import annotations

import importlib
from typing import Any

HINT = "blobstore.clients.vllm runs inside vLLM (0.32 or later)"

Tensor = Any
"""A torch.Tensor. Its type is not named, so that type checkers need no torch."""


def torch() -> Any:
    """The module; ImportError that says what is missing."""
    return load("torch")


def vllm(module: str = "") -> Any:
    """vLLM, or a module of it by its name inside; ImportError as `torch`."""
    return load(f"vllm.{module}" if module else "vllm")


def load(name: str) -> Any:
    """Any module that vLLM brings along; ImportError as `torch`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{HINT} ({error})") from error
