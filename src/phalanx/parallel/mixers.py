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
