"""A hash computed once per frozen value: layouts and shapes are keys of caches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

_NAME = "_hash"


def hash_once(value: Any) -> int:
    """The hash of all fields of a dataclass, for use as `__hash__`."""
    known: int | None = value.__dict__.get(_NAME)
    if known is None:
        known = hash(
            tuple(getattr(value, each.name) for each in fields(value))
        )
        # Past the frozen class's `__setattr__`, and not a field, so equality
        # ignores it.
        value.__dict__[_NAME] = known
    return known


def state_without_hash(value: Any) -> dict[str, Any]:
    """The state of a dataclass to copy or send, for use as `__getstate__`.

    The hash is left out, because text hashes differently in another process.
    """
    return {
        name: each for name, each in value.__dict__.items() if name != _NAME
    }
