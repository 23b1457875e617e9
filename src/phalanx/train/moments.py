"""When the operations of a step begin and end: by the host's clock, or on a GPU by events.

An event stands in the stream that computes, behind what was launched before it. It has a time once the
device has come past it, so times are asked for after the step, when its numbers have been read.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Moments are seconds already."""

    def begin(self) -> None:
        """A step begins."""

    def moment(self) -> Any:
        return time.perf_counter()

    def seconds(self, moment: Any) -> float:
        """A moment of this step, as `time.perf_counter` counts. After the step."""
        return float(moment)


class EventClock(HostClock):
    """Moments are events, counted from one that stands where the step begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        # The device is idle: the numbers of the step before have been read.
        self.begun, self.at = self.moment(), time.perf_counter()

    def moment(self) -> Any:
        made: Any = torch.cuda.Event  # its stubs are not typed
        event = made(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, moment: Any) -> float:
        return self.at + float(self.begun.elapsed_time(moment)) / 1e3


def clock_of(device: torch.device) -> HostClock:
    return EventClock(device) if device.type == "cuda" else HostClock()
