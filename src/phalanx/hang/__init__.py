"""Where each rank of a run is, and why the run does not go on. No torch: the watcher is a process of
its own that starts in a few hundredths of a second."""

from .diagnosis import RankState, diagnose
from .positions import Positions
from .watcher import Hosted, ask_elsewhere, snapshot

__all__ = ["Hosted", "Positions", "RankState", "ask_elsewhere", "diagnose", "snapshot"]
