"""Groups: the one way by which ranks send each other anything."""

from phalanx.comm.agree import PeerFailed, RanksDiffer, agreement
from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import (
    OPS,
    CommError,
    CommMisuse,
    Group,
    RankFailed,
    Report,
    Work,
    World,
)
from phalanx.comm.join import join
from phalanx.comm.launch import Runner, choose, launch, workers
from phalanx.comm.tally import Message, Tally, TallyWorld
from phalanx.layout.choices import BACKENDS

__all__ = [
    "Group",
    "World",
    "Work",
    "OPS",
    "CommError",
    "CommMisuse",
    "RankFailed",
    "PeerFailed",
    "RanksDiffer",
    "Report",
    "launch",
    "workers",
    "join",
    "agreement",
    "choose",
    "BACKENDS",
    "Runner",
    "AloneWorld",
    "Tally",
    "TallyWorld",
    "Message",
]
