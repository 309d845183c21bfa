"""Which weights an engine computes with: a name and a digest that follow from them.

A model's name says too little: weights are trained on, merged and quantised under one
name. What the hub has is known by its commit, what lies in a folder by reading it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from blobstore.clients.vllm.files import path_digest
from blobstore.errors import InvalidRequest

_SAYS_NOTHING = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Of a configuration: what does not change keys and values, or is in the namespace anyway."""

_OF_PICTURES = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
"""What changes how pictures are read, beside their digests, which are in the block hashes."""

_ROPES_OF_LENGTH = ('"longrope"', '"su"')
"""Rotary embeddings for which vLLM chooses factors by the longest context it is to serve."""

_SNAPSHOT = re.compile(r"models--(.+)/snapshots/([0-9a-f]{40,64})$")
"""A folder of the hub's cache: names cannot hold "--", which stands for a slash."""


class Weights(NamedTuple):
    """The model's name, and what digests its weights, which may read all of them."""

    model: str
    digest: Callable[[], str]


def weights_of(vllm_config: Any, given: str = "") -> Weights:
    """The weights of an engine's model; `given` stands for their digest if it is not empty.

    Reads nothing yet. Raises InvalidRequest if they are somewhere else than in files or
    on the hub, saying what to do. `digest` raises OSError, or InvalidRequest for a
    folder without weights.
    """
    name, _ = place_of(str(vllm_config.model_config.model))
    return Weights(name, _source(vllm_config, given))


def place_of(model: str) -> tuple[str, str]:
    """The name of what is at `model`, a path or a name on the hub, and its commit if it tells."""
    path = Path(model)
    snapshot = _SNAPSHOT.search(path.as_posix())
    if snapshot:
        return snapshot[1].replace("--", "/"), snapshot[2]
    return (path.name if path.exists() else model), ""


def digest_of(model: str, given: str, commit: str = "") -> Callable[[], str] | None:
    """What digests the weights at `model`: `given`, or a commit in its path, or its files.

    Else `commit`, if that is known from elsewhere; None if nothing tells them from others.
    """
    path, (_, in_path) = Path(model), place_of(model)
    if given:
        return lambda: given
    if not in_path and path.exists():
        return lambda: f"files {path_digest(path)}"
    commit = in_path or commit
    return (lambda: f"commit {commit}") if commit else None


def config_digest(model_config: Any) -> str:
    """Of the model's configuration, with all that was overridden at the start."""
    config = model_config.hf_config.to_dict()
    told: dict[str, Any] = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key not in _SAYS_NOTHING
    }
    facts = [told, getattr(model_config, "quantization_config", None)]
    multimodal = getattr(model_config, "multimodal_config", None)
    facts += [getattr(multimodal, name, None) for name in _OF_PICTURES]
    text = json.dumps(facts, sort_keys=True, default=str)
    if any(rope in text for rope in _ROPES_OF_LENGTH):
        text += f" {getattr(model_config, 'max_model_len', None)}"
    return sha256(text.encode()).hexdigest()


def _source(vllm_config: Any, given: str) -> Callable[[], str]:
    model, load = vllm_config.model_config, vllm_config.load_config
    if not given and str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        return lambda: f"dummy {model.seed}"
    elsewhere = str(getattr(model, "model_weights", "") or "")
    commit = str(getattr(model.hf_config, "_commit_hash", None) or "")
    digest = digest_of(str(model.model), given, commit)
    if digest is None or (elsewhere and not given):
        raise InvalidRequest(
            f"the weights {elsewhere or model.model!r} are neither a file, a folder nor a commit "
            'of the hub: name them by "weights_digest", which is to change when they do'
        )
    return digest
