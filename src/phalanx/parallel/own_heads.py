"""The heads of somebody's attention, by the attributes in which its code keeps their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

HEADS = (
    "n_head",
    "n_heads",
    "num_heads",
    "num_attention_heads",
    "nhead",
    "heads",
)
KEYS = (
    "n_kv_head",
    "n_kv_heads",
    "num_kv_heads",
    "num_key_value_heads",
    "kv_heads",
)


@dataclass(frozen=True)
class Heads:
    """How many heads of queries, and of keys and values, an attention has. `owner` is the module that says
    so; without one there is one of each."""

    query: int = 1
    key: int = 1
    owner: nn.Module | None = None


def heads_of(module: nn.Module) -> Heads:
    """The heads that a module, or the first one inside of it, keeps in an attribute."""
    # From the outside in: an attention's own attribute counts before its children's.
    for each in module.modules():
        for own in (vars(each), _config_of(each)):
            # No number of KV heads means as many as query heads.
            if query := _number(own, HEADS):
                return Heads(query, _number(own, KEYS) or query, each)
    return Heads()


def _config_of(module: nn.Module) -> Mapping[str, Any]:
    """The configuration of an attention that reads its numbers of heads there, as those of transformers."""
    # Only attention's own configuration: an MLP may have the same one.
    attends = (
        "attn" in (name := type(module).__name__.lower())
        or "attention" in name
    )
    config = getattr(module, "config", None)
    return vars(config) if attends and hasattr(config, "__dict__") else {}


def _number(own: Mapping[str, Any], names: tuple[str, ...]) -> int:
    # `type is int`: True is an int too, and a flag `heads=True` counts nothing.
    found = (own[name] for name in names if type(own.get(name)) is int)
    return next((number for number in found if number > 0), 0)
