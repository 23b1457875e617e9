"""The table of mixers whose core keeps its tokens under cp.

Other cores attend to all tokens: `context.py` gives them a ring or Ulysses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..comm import Group
from ..models.delta import DeltaCore
from .delta import SpreadDeltaCore

# Makes a core from one that holds whole sequences, for the groups of a ring and of
# Ulysses.
Spread = Callable[[Any, Group, Group], nn.Module]

SPREAD: dict[type[nn.Module], Spread] = {DeltaCore: SpreadDeltaCore}


def spread_of(core: nn.Module) -> Spread | None:
    """The maker of a core that keeps its tokens, for a class of the table or a subclass."""
    rows = (SPREAD[base] for base in type(core).__mro__ if base in SPREAD)
    return next(rows, None)


def replaced_methods(core: nn.Module) -> tuple[str, ...]:
    """Methods of a subclass's own, which the core of the table's class does not have."""
    found: dict[str, None] = {}
    for base in type(core).__mro__:
        if base in SPREAD:
            break
        found |= {name: None for name, x in vars(base).items() if callable(x)}
    return tuple(name for name in found if name != "__init__")
