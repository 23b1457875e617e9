"""A watcher for multi-process programs.

It notices when they make no progress, finds the responsible rank, writes the stacks of
all ranks and ends them. It needs no torch, and starts in less than a tenth of a second.
"""

from .diagnosis import diagnose
from .hosted import Hosted
from .outside import Snapshot, ask_elsewhere, described, snapshot
from .positions import Positions
from .rank_state import RankState
from .torch_calls import torch_calls
from .watching import watched

__all__ = [
    "Hosted",
    "Positions",
    "RankState",
    "Snapshot",
    "ask_elsewhere",
    "described",
    "diagnose",
    "snapshot",
    "torch_calls",
    "watched",
]
