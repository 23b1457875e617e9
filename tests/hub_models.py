"""Small random models of Hugging Face's families, computed by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

VOCAB, TIME = 61, 24
PLAIN = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LONG = {"rope_theta": 5000.0, "factor": 4.0}
_LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 9, "qk_rope_head_dim": 6, "qk_nope_head_dim": 7,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
# By name: model type, and the settings that differ from `PLAIN`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "smollm": ("llama", {"num_attention_heads": 4, "tie_word_embeddings": True, "rope_theta": 1e5}),
    "llama3": ("llama", {"rope_parameters": _LONG | {
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "linear": ("llama", {"rope_parameters": _LONG | {"rope_type": "linear"}}),
    "dynamic": ("llama", {
        "rope_parameters": _LONG | {"rope_type": "dynamic"}, "max_position_embeddings": 12,
    }),
    "yarn": ("qwen3", {"head_dim": 16, "rope_parameters": _LONG | {
        "rope_type": "yarn", "original_max_position_embeddings": 128, "beta_fast": 4.0,
    }}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    }),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {
        "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "hidden_size": 64,
    }),
    "gemma3": ("gemma3_text", {
        "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "hidden_size": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }),
    "phi3": ("phi3", {"sliding_window": 9}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    }),
    # Latent queries, keys and values; values narrower than keys; grouped experts.
    "deepseek_v3": ("deepseek_v3", _LATENTS | {"q_lora_rank": 10, "rope_parameters": _LONG | {
        "rope_type": "yarn", "original_max_position_embeddings": 128, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }}),
    "deepseek_wide": ("deepseek_v3", _LATENTS | {
        "q_lora_rank": None, "v_head_dim": 20, "rope_interleave": False, "norm_topk_prob": False,
    }),
    # Sinks, biases everywhere, windows in every second block, clamped experts.
    "gpt_oss": ("gpt_oss", {
        "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5,
        "rope_parameters": _LONG | {
            "rope_type": "yarn", "original_max_position_embeddings": 128, "truncate": False,
            "beta_fast": 4.0,
        },
    }),
    # Delta layers beside attention, gated attention and shared experts, rope on a
    # part of each head.
    "qwen3_next": ("qwen3_next", {
        "head_dim": 12, "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 20,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        },
    }),
    "gpt2": ("gpt2", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
}  # fmt: skip
# The same for families that our decoder does not cover; their own code computes each
# piece.
CODE: dict[str, tuple[str, dict[str, Any]]] = {
    # Scaled embeddings, residuals, scores and logits; padded vocabulary rows; tied.
    "granite": ("granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
        "logits_scaling": 2.0, "pad_token_id": 0, "tie_word_embeddings": True,
    }),
    # Fused projections with biases, rope on part of each head, attention parallel to
    # the MLP.
    "gpt_neox": ("gpt_neox", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    }}),
}  # fmt: skip
MORE_CODE: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "cohere2": ("cohere2", {"sliding_window": 6, "num_hidden_layers": 4, "logit_scale": 1.0}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "exaone4": ("exaone4", {"sliding_window": 5, "num_hidden_layers": 4}),
    "glm": ("glm", {"head_dim": 8}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "olmo": ("olmo", {"clip_qkv": 0.3}),
    "olmo3": ("olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "nemotron": ("nemotron", {}),
    "phi": ("phi", {}),
    "arcee": ("arcee", {"rope_parameters": _LONG | {
        "rope_type": "yarn", "original_max_position_embeddings": 128,
    }}),
}  # fmt: skip


def theirs(name: str, **more: Any) -> Any:
    """Return a small random model of transformers, with every weight moved off its
    initial value."""
    kind, changed = (FAMILIES | CODE | MORE_CODE)[name]
    plain = {} if kind == "gpt2" else PLAIN
    config = transformers.AutoConfig.for_model(kind, **plain | changed | more)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    model = model.float().eval()
    with torch.no_grad():
        for weight in [*model.parameters(), *biases(model).values()]:
            weight += 0.1 * torch.randn_like(weight)
    return model


def adapter_name(name: str) -> str:
    """Our name of a peft adapter's weight in a model of llama's kind."""
    _, *_, layer, _, module, which, _, _ = name.split(".")
    ours = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
    own = ours.get(module, module.removesuffix("_proj"))
    part = "attn" if own[0] == "w" else "mlp"
    factor = which[-1].lower()
    return f"layers.{layer}.{part}.{own}.lora.{factor}.weight"


def biases(model: Any) -> dict[str, Tensor]:
    """Return the buffers that are added to experts' scores for routing only."""
    return {
        name: x
        for name, x in model.named_buffers()
        if name.endswith("correction_bias")
    }


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@contextmanager
def widened() -> Iterator[None]:
    """Compute in float64 whatever transformers computes in float32 regardless of the
    dtype."""
    # as a value: inside, torch.float means something else
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def in_float64(model: Any) -> Any:
    """Return the same model in float64; create and call it within `widened`."""
    wide: Any = transformers.AutoModelForCausalLM.from_config(
        model.config,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    wide.load_state_dict(
        {name: x.double() for name, x in model.state_dict().items()}
    )
    return wide
