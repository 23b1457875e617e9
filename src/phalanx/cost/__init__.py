"""FLOPs, bytes and messages of operations, counted without running them on data.

What needs torch is imported when it is asked for: a plan from costs that are kept starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..program.flops import OpFlops, StepFlops, forward_flops, step_flops
from .cache import cached_costs, cost_of_row

if TYPE_CHECKING:
    from .live import Live
    from .pieces import piece_costs
    from .sizes import sizes_of

__all__ = [
    "Live",
    "OpFlops",
    "StepFlops",
    "forward_flops",
    "sizes_of",
    "step_flops",
    "piece_costs",
    "cached_costs",
    "cost_of_row",
]

_WITH_TORCH = {"Live": "live", "sizes_of": "sizes", "piece_costs": "pieces"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported at the first use, so that cached costs need no torch.
    return getattr(
        importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name
    )
