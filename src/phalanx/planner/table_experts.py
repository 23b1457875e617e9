"""The sizes of experts in the rows of a table, and the models named without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..layout import Shape
from .device import MachineError

# The sizes, with the names of their columns.
_COLUMNS = {
    "experts": ("experts", "num_experts", "n_experts"),
    "top_k": ("top_k", "topk", "moe_top_k"),
    "expert_ffn": ("expert_ffn", "moe_ffn", "moe_ffn_hidden"),
    "shared_experts": ("shared_experts",),
    "dense_layers": ("dense_layers",),
}
# "8x7b", "235b-a22b" and "mixtral" name models with experts.
_NAMES = (
    r"moe|mixtral|\b\d+x\d+(\.\d+)?b|deepseek.?v[23]|-a\d+(\.\d+)?b\b|dbrx"
)


def routed_sizes(count: Callable[[Sequence[str]], int]) -> dict[str, Any]:
    """The keys of a shape that a row gives; empty if it has no experts.

    `count` returns the first number among some columns, or 0.
    """
    sizes: dict[str, Any] = {
        ours: count(names) for ours, names in _COLUMNS.items()
    }
    if not sizes["experts"]:
        return {}
    if not sizes["top_k"]:
        raise MachineError(
            "the row does not give the number of experts per token (top_k)"
        )
    return {**sizes, "bias": "none", "gated": True}


def named_as_routed(model: str) -> bool:
    """True for a model's name that says that it has experts."""
    return re.search(_NAMES, model, re.IGNORECASE) is not None


def unsized(title: str, known: Mapping[str, Shape]) -> str:
    """The error for a model whose sizes of experts are missing."""
    names = [name for name, each in known.items() if each.routed.count]
    return (
        f"model {title[:40]!r} has experts, but the row does not give their sizes: add columns"
        f" experts, top_k and expert_ffn, or name one of {', '.join(names)}"
    )
