"""When the operations of a step begin and end: by the host's clock, or on a GPU by events.

An event stands in the stream that computes, behind what was launched before it. It has a time once the
device has come past it, so times are asked for after the step, when its numbers have been read.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Moments are seconds, as `time.perf_counter` counts; on a GPU they are events, counted from one
    that stands where the step begins."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events = device, device.type == "cuda"

    def begin(self) -> None:
        # The device is idle: the numbers of the step before have been read.
        self.begun, self.at = self.moment(), time.perf_counter()

    def moment(self) -> Any:
        if not self.events:
            return time.perf_counter()
        made: Any = torch.cuda.Event  # its stubs are not typed
        event = made(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, moment: Any) -> float:
        """A moment of this step. After the step."""
        return self.at + self.begun.elapsed_time(moment) / 1e3 if self.events else float(moment)
