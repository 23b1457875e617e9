"""The small form of a config.json keeps every kind of layer and the ratios of the real one."""

from __future__ import annotations

import pytest

from phalanx.layout.small_config import small_config

LARGE = {
    "model_type": "exaone4",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 361,
}


def test_a_small_config_by_hand() -> None:
    assert small_config(LARGE, words=257, tokens=24) == LARGE | {
        # 5 query heads for each key head become 4
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "head_dim": 16,
        # 27392 / 5120 of 128, which would be 684.8: at most four times as wide
        "intermediate_size": 512,
        "vocab_size": 257,
        "max_position_embeddings": 24,
        "sliding_window": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "eos_token_id": 256,
    }


@pytest.mark.parametrize(
    ("heads", "kv_heads", "small"),
    [(32, 32, (4, 4)), (71, 1, (4, 1)), (32, 8, (8, 2)), (1, 1, (1, 1))],
)
def test_a_small_config_keeps_the_kind_of_attention(
    heads: int, kv_heads: int, small: tuple[int, int]
) -> None:
    """Every head with a key of its own, one key for all, groups of heads, a single head."""
    table = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    found = small_config(table, words=257, tokens=24)
    names = "num_attention_heads", "num_key_value_heads"
    assert tuple(found[name] for name in names) == small


def test_a_small_config_keeps_names_of_other_families() -> None:
    table = {"n_embd": 4096, "n_layer": 30, "n_head": 32, "n_positions": 2048}
    assert small_config(table, words=257, tokens=24) == {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 24,
    }
