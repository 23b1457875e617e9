"""Finds the position of each rank of a run, and the reason why the run makes no progress. It needs
no torch: the watcher is a separate process that starts in a few hundredths of a second."""

from .diagnosis import diagnose
from .hosted import Hosted
from .outside import Snapshot, ask_elsewhere, snapshot
from .positions import Positions
from .rank_state import RankState

__all__ = [
    "Hosted",
    "Positions",
    "RankState",
    "Snapshot",
    "ask_elsewhere",
    "diagnose",
    "snapshot",
]
