"""How a rank's caches lay numbers out inside a block: a label that belongs to the identity.

Between blocks the order follows from strides. Inside, a backend is free: that of CPUs
packs keys and values by instruction set, those of some GPUs in vectors. So blocks are
taken whole, and interchangeable only between engines that pack them alike. Which backend
computes a layer follows from no configuration (vLLM takes the first one that can be
imported and fits the machine): only the layers themselves say it, in a worker.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.libraries import Tensor
from blobstore.errors import InvalidRequest


def packing_of(vllm_config: Any, layers: Sequence[str], kv_caches: Mapping[str, Tensor]) -> str:
    """The label of the caches of `layers`, in a worker that has made them.

    vLLM's release, the machine's kind, each layer's backend, and the tokens of its kernel's
    blocks, in which it packs. Raises InvalidRequest for a layer that does not say its backend.
    """
    device = str(vllm_config.device_config.device_type)
    machine = _cpu() if device == "cpu" else _accelerator()
    each = [f"{_backend(vllm_config, name)}/{int(kv_caches[name].shape[2])}" for name in layers]
    return f"vllm {release()},{device},{machine},{_together(each)}"


def release() -> str:
    """vLLM's major and minor version: later fixes keep the layout."""
    return ".".join(str(libraries.vllm().__version__).split(".")[:2])


def what_decides() -> dict[str, str | bool]:
    """All but the configuration that decides which backend vLLM chooses by itself.

    For who cannot see the choice: other engines on such a machine may choose alike.
    """
    found: dict[str, str | bool] = {name: find_spec(name) is not None for name in _PACKAGES}
    found.update({name: os.environ[name] for name in os.environ if name.startswith(_VARIABLES)})
    return found


def _cpu() -> str:
    """What the CPU backend looks at. Head size and dtype are in the layout anyway."""
    cpu = libraries.torch().cpu
    has = [
        name
        for name, asked in (("amx", "_is_amx_tile_supported"), ("avx512", "_is_avx512_supported"))
        if getattr(cpu, asked, lambda: False)()
    ]
    return "+".join([platform.machine(), *has])


def _accelerator() -> str:
    """Its name, and what of the environment changes how one backend packs."""
    name = str(libraries.vllm("platforms").current_platform.get_device_name())
    shuffled = getattr(libraries.vllm("envs"), "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False)
    return f"{name}+shuffled" if shuffled else name


def _backend(vllm_config: Any, name: str) -> str:
    try:
        layer = vllm_config.compilation_config.static_forward_context[name]
        backend = layer.get_attn_backend()
        called = str(backend.get_name())
    except (AttributeError, KeyError) as error:
        raise InvalidRequest(
            f"which attention backend computes {name} is not to be seen ({error!r}), and so not "
            "how its blocks are packed: it is not stored"
        ) from error
    if backend.__module__.partition(".")[0] != "vllm":  # a plug-in's, under a name of its choice
        called = f"{backend.__module__}.{called}"
    kernel = getattr(layer, "isa", "")  # the CPU backend's choice of kernels
    return f"{called}.{kernel}" if kernel else called


def _together(each: Sequence[str]) -> str:
    """One word if all layers are alike; else a digest of all, for labels are short."""
    kinds = sorted(set(each))
    if len(kinds) == 1 and len(kinds[0]) <= _LONGEST:
        return kinds[0]
    return f"mixed {sha256(','.join(each).encode()).hexdigest()[:32]}"


_PACKAGES = ("flashinfer", "aiter", "flash_attn")
"""Backends that vLLM passes over where they cannot be imported."""

_VARIABLES = ("VLLM_ROCM_", "VLLM_BATCH_INVARIANT", "VLLM_KV_CACHE_LAYOUT")
"""What they begin with: of all others none chooses a backend, or the order in its blocks."""

_LONGEST = 100
"""Of 256 bytes that a layout's label may have, the rest is left to the machine's name."""
