"""Small models of transformers with random weights, large enough for clear answers."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

WINDOW = 24
VOCABULARY = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", {}),
    "all heads": ("Llama", {"num_key_value_heads": 4}),
    "one head": ("Llama", {"num_key_value_heads": 1}),
    "learned positions": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
    "sliding": ("Mistral", {"sliding_window": WINDOW}),
    "sliding and full": ("Gemma2", {"head_dim": 32, "sliding_window": WINDOW}),
    "two ropes": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "chunked": (
        "Llama4",
        {
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    "with sinks": (
        "GptOss",
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4},
    ),
    "shared between layers": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "latent": ("DeepseekV3", _LATENT),
    "biased by distance": ("Bloom", {}),
}
"""Kinds that work: the model's family, and what is special about the configuration."""


def tiny(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of one of KINDS, ready to be asked."""
    family, special = KINDS[kind]
    return made(family, seed=seed, **{**special, **changes})


def made(family: str, *, seed: int = 0, **special: Any) -> Any:
    """A causal language model of a family of transformers."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    text = "Text" if hasattr(transformers, f"{family}TextConfig") else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}{text}Config")(**{**_SIZES, **special})
        head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{family}{head}")(config)
    torch.set_num_threads(1)  # so small that threads only wait for one another
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def prompt(n_tokens: int, seed: int) -> Any:
    """Token ids of one sequence, as a tensor with a batch of one."""
    torch = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (1, n_tokens), generator=generator)


def answer(model: Any, ids: Any, n_tokens: int, past: Any = None) -> Any:
    """`ids`, and the tokens that `model` goes on with."""
    torch = importlib.import_module("torch")
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=past,
        max_new_tokens=n_tokens,
        do_sample=False,
    )
