"""Which keys and values are interchangeable: the namespace of a loaded model.

A model's name says too little: weights are trained on, merged, quantised and loaded
from other folders under one name. So the namespace holds a digest of the weights as
they are in memory, unless the caller names the revision, and one of the
configuration in any case. What would make keys and values depend on more than that
and the tokens is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blobstore.clients.transformers import libraries
from blobstore.clients.transformers.layers import DTYPES, cache_argument, name_of
from blobstore.clients.transformers.libraries import Tensor
from blobstore.digest import payload_digest, piece_digests
from blobstore.errors import InvalidRequest

_SAYS_NOTHING = {
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "label2id", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Of a configuration: what does not change keys and values, or is in the namespace anyway."""


def check_model(model: Any, adapter: str) -> None:
    """InvalidRequest, with the reason, for a model whose keys and values cannot be stored."""
    config, name = model.config, name_of(model)
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidRequest(f"{name} is an encoder-decoder: only decoders are stored")
    if getattr(model, "_is_stateful", False):
        raise InvalidRequest(f"{name} keeps a state that is no keys and values of tokens")
    if config.get_text_config(decoder=True) is not config:
        raise InvalidRequest(
            f"{name} reads more than text: its keys and values do not follow from token ids alone"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise InvalidRequest(f"{name} is cut across {model.tp_size} ranks, which is not supported")
    if model.training:
        raise InvalidRequest(f"{name} is being trained: call model.eval() first")
    if _has_adapter(model) and not adapter:
        raise InvalidRequest(f"{name} has an adapter: name it and its version, adapter=…")
    cache_argument(model)


def _has_adapter(model: Any) -> bool:
    return bool(getattr(model, "peft_config", None)) or bool(
        getattr(model, "_hf_peft_config_loaded", False)
    )


def tokens_max(config: Any) -> int | None:
    """Beyond how many tokens keys and values depend on the context's whole length, if ever.

    Two kinds of rotary embeddings change with the length: "dynamic" from the trained
    length on, and "longrope" where it changes its factors.
    """
    limits = []
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if kind == "longrope":
            name = "original_max_position_embeddings"
            limits.append(int(rope.get(name) or getattr(config, name)))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings) - 1)
    return min(limits, default=None)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary embeddings of a configuration: one, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            yield found
            yield from (each for each in found.values() if isinstance(each, Mapping))


def padding(model: Any) -> int | None:
    """The token that generate masks wherever it stands in a prompt, if the model has one."""
    for config in (getattr(model, "generation_config", None), model.config):
        pad, ends = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos"))
        if isinstance(pad, int):
            return None if pad == ends or pad in (ends if isinstance(ends, list) else ()) else pad
    return None


def model_name(config: Any, revision: str) -> str:
    """What the model was loaded as, else its kind.

    Of a folder the last part, so that it may lie elsewhere on another machine: its
    weights tell it from others. Not with a `revision`, which takes their place.
    """
    name = str(getattr(config, "_name_or_path", "") or config.model_type)
    return Path(name).name if not revision and Path(name).is_dir() else name


def compute_dtype(model: Any) -> str:
    """In which the model computes."""
    return DTYPES.get(str(model.dtype), str(model.dtype))


def digest(model: Any, *, weights: bool) -> str:
    """Of the configuration, and with `weights` of all parameters and buffers.

    Reads them once: a few seconds for a model of 10 GB. InvalidRequest for weights
    that cannot be read as bytes.
    """
    parts = [f"config {_digest_of(_canonical(model.config))}"]
    if weights:
        parts += [f"{name} {_tensor_digest(name, tensor)}" for name, tensor in _weights(model)]
    return _digest_of("\n".join(parts).encode())


def _canonical(config: Any) -> bytes:
    told = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in _SAYS_NOTHING
    }
    return json.dumps(told, sort_keys=True, default=str).encode()


def _weights(model: Any) -> list[tuple[str, Tensor]]:
    return sorted((str(name), value) for name, value in model.state_dict().items())


def _tensor_digest(name: str, tensor: Any) -> str:
    torch = libraries.torch()
    if not isinstance(tensor, torch.Tensor):
        return _digest_of(repr(tensor).encode())
    try:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise InvalidRequest(
            f"the weights {name} cannot be read as bytes ({error}): name them, revision=…"
        ) from error
    return f"{tensor.dtype} {tuple(tensor.shape)} {_digest_of(memoryview(data))}"


def _digest_of(data: bytes | memoryview) -> str:
    view = memoryview(data)
    return payload_digest(view.nbytes, piece_digests(view)).hex()
