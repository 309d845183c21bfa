"""SmolLM2 as a Hugging Face directory, which is what vLLM reads: out of the same GGUF.

So that all runners compute with the same weights. Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.bench.chat import Chat
from blobstore.bench.kv_cache import round_to_bf16
from blobstore.bench.model_file import Array, ModelFile, ModelSizes

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def model_directory(layers: int = 0) -> Path:
    """The directory of the model, or of its first `layers` layers; made when it is not there.

    Kept under the user's cache, whole or not at all, whoever else makes it at the same time.
    Raises SetupError, which says what to install, without the GGUF.
    """
    file = ModelFile(layers=layers)
    name = f"smollm2-{file.digest[:12]}-{file.sizes.layers}"
    directory = _cache() / name
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
    try:
        write_model(file, beside)
        beside.rename(directory)
    except OSError:
        if not directory.is_dir():  # else another one was sooner
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return directory


def write_model(file: ModelFile, directory: Path) -> None:
    """Write configuration, bf16 weights (270 MB) and vocabulary into `directory`."""
    _write_json(directory / "config.json", _config(file))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(file))
    Chat(file).save(directory / "tokenizer.json")
    _write_weights(directory / "model.safetensors", dict(named_weights(file)))


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "blobstore"


def _config(file: ModelFile) -> dict[str, Any]:
    sizes = file.sizes
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.width,
        "intermediate_size": file.field("llama.feed_forward_length"),
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "max_position_embeddings": sizes.context_tokens,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rope_base,
        "vocab_size": file.field("llama.vocab_size"),
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sizes.end_token,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _tokenizer_config(file: ModelFile) -> dict[str, Any]:
    tokens = file.field("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[file.field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[file.sizes.end_token],
        "chat_template": file.field("tokenizer.chat_template"),
        "model_max_length": file.sizes.context_tokens,
    }


def named_weights(file: ModelFile) -> Iterator[tuple[str, Array]]:
    """All weights, by the names and in the order of rows that transformers has them."""
    for name, values in file.weights().items():
        if name in _OUTSIDE:
            yield _OUTSIDE[name], values
            continue
        _, number, kind, _ = name.split(".")
        yield f"model.layers.{number}.{_LAYER[kind]}.weight", _unpermuted(kind, values, file.sizes)


def _unpermuted(kind: str, values: Array, sizes: ModelSizes) -> Array:
    """GGUF rotates neighbouring rows of a head, Hugging Face those half a head apart."""
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(kind)
    if heads is None:
        return values
    pairs = values.reshape(heads, sizes.head_size // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_weights(path: Path, tensors: dict[str, Array]) -> None:
    """The safetensors format: the header's length, the header as JSON, the bytes."""
    header, end = {}, 0
    for name, values in tensors.items():
        start, end = end, end + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            bits = round_to_bf16(values).view(np.uint32) >> 16
            out.write(bits.astype("<u2").tobytes())


def _write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(f"{model_directory(*map(int, sys.argv[1:]))}\n")
