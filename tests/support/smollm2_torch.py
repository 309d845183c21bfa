"""SmolLM2 as a model of transformers, with the weights that the NumPy runner reads."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from blobstore.bench.engine_vllm_model import named_weights
from blobstore.bench.model_file import MODEL, ModelFile


def load(file: ModelFile) -> Any:
    """The model in fp32, ready to be asked."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    weights = dict(named_weights(file))
    sizes = file.sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(
            name_or_path=MODEL,
            vocab_size=len(weights["model.embed_tokens.weight"]),
            hidden_size=sizes.width,
            intermediate_size=len(weights["model.layers.0.mlp.up_proj.weight"]),
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
    named = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    return model.eval()
