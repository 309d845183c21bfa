"""How an attention backend lays numbers out inside a block: a label that belongs to the identity.

Between blocks the order follows from strides. Inside, a backend is free: that of CPUs
packs keys and values by instruction set, those of some GPUs in vectors. So blocks are
taken whole, and interchangeable only between engines that pack them alike.
"""

from __future__ import annotations

import platform
from typing import Any

from blobstore.clients.vllm import libraries


def packing_of(vllm_config: Any) -> str:
    """The label: vLLM's release, the machine's kind and the backend, where one was asked for.

    An engine that chooses by itself chooses by release and machine.
    """
    device = str(vllm_config.device_config.device_type)
    machine = _cpu() if device == "cpu" else _accelerator()
    return f"vllm {_release()},{device},{machine},{_backend(vllm_config)}"


def _release() -> str:
    """Major and minor version: later fixes keep the layout."""
    return ".".join(str(libraries.vllm().__version__).split(".")[:2])


def _cpu() -> str:
    """What the CPU backend looks at. Head size, block size and dtype are in the layout anyway."""
    cpu = libraries.torch().cpu
    has = [
        name
        for name, asked in (("amx", "_is_amx_tile_supported"), ("avx512", "_is_avx512_supported"))
        if getattr(cpu, asked, lambda: False)()
    ]
    return "+".join([platform.machine(), *has])


def _accelerator() -> str:
    return str(libraries.vllm("platforms").current_platform.get_device_name())


def _backend(vllm_config: Any) -> str:
    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(attention, "backend", None)
    by_kind = getattr(attention, "backend_per_kind", None) or {}
    names = [_name(backend), *(f"{kind}={_name(each)}" for kind, each in sorted(by_kind.items()))]
    return " ".join(names)


def _name(backend: Any) -> str:
    return "auto" if backend is None else str(getattr(backend, "name", backend))
