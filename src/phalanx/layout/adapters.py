"""The table of adapters, and their keys in a shape and in a run file."""

from __future__ import annotations

from dataclasses import dataclass

from .adapter_row import AdapterRow
from .codec import key
from .lora import LORA, LoraChoice, LoraSizes

ADAPTERS: tuple[AdapterRow, ...] = (LORA,)
ADAPTER_NAMES = " or ".join(row.name for row in ADAPTERS)
_MARKS = tuple(row.mark for row in ADAPTERS)


@dataclass(frozen=True, kw_only=True)
class AdapterSizes(LoraSizes):
    """The keys of a shape about adapters."""


@dataclass(frozen=True, kw_only=True)
class AdapterTables:
    """The tables of a run file about adapters."""

    lora: LoraChoice = key(
        LoraChoice(), "LoRA: adapters are trained, and nothing else"
    )


def adapts(weight: str) -> bool:
    """True if a weight's name is that of an adapter."""
    return any(mark in weight for mark in _MARKS)
