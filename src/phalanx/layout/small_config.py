"""A small form of a Hugging Face config.json, in the proportions of the real one.

`verify run.toml` computes it with transformers' code. Layers of every kind stay, with
the ratio of heads and the reach of windows. Widths, vocabulary and positions shrink.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

HEAD = 16  # features of a head
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
# inner widths, in their ratio to the hidden one
INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "n_inner",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
# tokens, which a smaller vocabulary must contain
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
Table = Mapping[str, Any]


def small_config(table: Table, words: int, tokens: int) -> dict[str, Any]:
    """Return the table with few narrow layers, `words` words and `tokens` positions.

    Unknown keys stay as they are, so transformers may refuse the result.
    """
    heads, kv_heads = _heads(table)
    hidden = heads * HEAD
    long = _number(table, POSITIONS)
    wide = _number(table, HIDDEN)
    sizes: dict[str, Any] = dict.fromkeys(HIDDEN, hidden)
    sizes |= dict.fromkeys(HEADS, heads)
    sizes |= dict.fromkeys(KV_HEADS, kv_heads)
    sizes |= dict.fromkeys(POSITIONS, tokens)
    sizes |= {"head_dim": HEAD, "vocab_size": words}
    sizes |= {name: min(words - 1, _whole(table, name)) for name in TOKENS}
    if window := _whole(table, "sliding_window"):
        part = ceil(window * tokens / max(1, long))
        sizes["sliding_window"] = min(tokens, max(2, part))
    for name in INNER:
        width = hidden * _whole(table, name) / max(1, wide)
        sizes[name] = min(4 * hidden, max(16, 8 * round(width / 8)))
    sizes |= dict.fromkeys(EXPERTS, 8)
    sizes |= {name: min(2, _whole(table, name)) for name in CHOSEN}
    known = {k: x for k, x in sizes.items() if table.get(k) is not None}
    return {**table, **known, **_layers(table)}


def _heads(table: Table) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads, with the ratio of the
    table's."""
    heads = _number(table, HEADS)
    kv_heads = _number(table, KV_HEADS) or heads
    if kv_heads == 1:
        return min(4, heads), 1
    few = min(2, kv_heads)
    per_group = min(4, max(1, heads // kv_heads))
    # without groups there are four, which tp of four divides
    return (few * per_group, few) if per_group > 1 else (2 * few, 2 * few)


def _layers(table: Table) -> dict[str, Any]:
    """Return a smaller number of layers, and the lists with an entry for each one.

    The first layers have every kind of entry that occurs, and three layers remain if
    possible.
    """
    name = next((n for n in LAYERS if _whole(table, n)), "")
    count = _whole(table, name)
    lists = {
        key: value
        for key, value in table.items()
        if isinstance(value, list) and len(value) == count
    }
    few = max([min(3, count), *map(_every_kind, lists.values())])
    # the first period of the layers that a key counts
    for key in _PERIODS:
        few = max(few, min(count, _whole(table, key)))
    cut = {key: value[:few] for key, value in lists.items()}
    return {name: few, **cut} if name else {}


_PERIODS = (
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "interleave_moe_layer_step",
    "decoder_sparse_step",
    "attn_layer_period",
    "expert_layer_period",
)


def _every_kind(entries: list[Any]) -> int:
    """Return the length of the shortest beginning with every entry that occurs."""
    firsts = [entries.index(entry) for entry in entries]
    return max(firsts, default=-1) + 1


def _number(table: Table, names: tuple[str, ...]) -> int:
    return next((_whole(table, n) for n in names if _whole(table, n)), 0)


def _whole(table: Table, name: str) -> int:
    """Return an integer of the table; 0 for anything else."""
    value = table.get(name)
    return value if type(value) is int else 0
