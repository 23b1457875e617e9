"""Where each rank of a run is, and why the run does not go on. No torch: the watcher is a process of
its own that starts in a few hundredths of a second."""

from .diagnosis import Diagnosis, RankState, diagnose
from .positions import PositionReader, Positions
from .watcher import Hosted, ask_elsewhere, snapshot

__all__ = [
    "Diagnosis",
    "Hosted",
    "PositionReader",
    "Positions",
    "RankState",
    "ask_elsewhere",
    "diagnose",
    "snapshot",
]
