"""Wires: the one way by which ranks send each other anything."""

from phalanx.wire.alone import AloneWorld
from phalanx.wire.base import (
    OPS,
    RankFailed,
    Report,
    Wire,
    WireError,
    WireMisuse,
    Work,
    World,
)
from phalanx.wire.join import join
from phalanx.wire.launch import WIRES, Run, choose, launch, workers
from phalanx.wire.tally import Message, Tally, TallyWorld

__all__ = [
    "Wire",
    "World",
    "Work",
    "OPS",
    "WireError",
    "WireMisuse",
    "RankFailed",
    "Report",
    "launch",
    "workers",
    "join",
    "choose",
    "WIRES",
    "Run",
    "AloneWorld",
    "Tally",
    "TallyWorld",
    "Message",
]
