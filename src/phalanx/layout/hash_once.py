"""The hash of a frozen value, found once: layouts and shapes are keys of many caches and have many fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

_NAME = "_hash"


def hash_once(value: Any) -> int:
    """The hash of all fields of a dataclass: to be its `__hash__`."""
    known: int | None = value.__dict__.get(_NAME)
    if known is None:
        known = hash(tuple(getattr(value, each.name) for each in fields(value)))
        value.__dict__[_NAME] = known
    return known


def state_without_hash(value: Any) -> dict[str, Any]:
    """All that is copied or sent of a dataclass: to be its `__getstate__`. Text has another hash in another
    process."""
    return {name: each for name, each in value.__dict__.items() if name != _NAME}
