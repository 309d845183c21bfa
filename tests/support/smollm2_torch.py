"""SmolLM2 as a model of transformers, with the weights that the NumPy runner reads."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from blobstore.bench.model_file import MODEL, Array, ModelFile, ModelSizes

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
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def load(file: ModelFile) -> Any:
    """The model in fp32, ready to be asked."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    weights = file.weights()
    sizes = file.sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(
            name_or_path=MODEL,
            vocab_size=len(weights["token_embd.weight"]),
            hidden_size=sizes.width,
            intermediate_size=len(weights["blk.0.ffn_up.weight"]),
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            max_position_embeddings=sizes.context_tokens,
            rms_norm_eps=sizes.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_base},
            tie_word_embeddings=True,
            eos_token_id=sizes.end_token,
            pad_token_id=sizes.end_token,
        )
        with importlib.import_module("transformers.initialization").no_init_weights():
            model = transformers.LlamaForCausalLM(config)
    named = {
        name: torch.from_numpy(array.copy())
        for name, array in (_named(name, array, sizes) for name, array in weights.items())
    }
    named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    return model.eval()


def _named(name: str, array: Array, sizes: ModelSizes) -> tuple[str, Array]:
    if name in _WHOLE:
        return _WHOLE[name], array
    _, layer, part, _ = name.split(".")
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(part)
    if heads is not None:  # the file pairs neighbours for rotation, transformers halves
        pairs = array.reshape(heads, -1, 2, array.shape[1])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return f"model.layers.{layer}.{_LAYER[part]}.weight", array
