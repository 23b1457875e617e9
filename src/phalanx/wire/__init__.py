"""Wires: the one way by which ranks send each other anything."""

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

__all__ = ["OPS", "RankFailed", "Report", "Wire", "WireError", "WireMisuse", "Work", "World"]
