"""Where each rank of a run is, and why the run makes no progress. No torch: the watcher is a process of
its own that starts in a few hundredths of a second."""

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
