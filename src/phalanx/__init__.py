"""Train one transformer over any mix of devices: plan, check, verify, measure and draw it.

    from phalanx import Run, join, train
    outcome = train(join(), Run.load("run.toml"))

`join()` is this process's rank: of a process group that is there already (Ray, Accelerate, a notebook),
of what torchrun or Slurm has started, or alone. Importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import train as train
    from .comm import join as join
    from .layout import Run as Run

_HOMES = {"Run": "layout", "join": "comm"}
__all__ = ["Run", "join", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
