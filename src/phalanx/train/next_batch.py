"""The next step's batch, read and copied to a GPU while that computes the present step.

The host queues a whole step and then waits for its results. Between the two it reads the next rows
and begins their copies, from pinned memory and on a stream of their own, so that the device goes
from one step to the next without waiting for either. Without a GPU nothing is read ahead: the host
would read in the time in which it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .data.token_files import DataError

Microbatches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class _Ready:
    """A batch whose copies have begun, and the event that follows the last of them."""

    step: int
    microbatches: Microbatches
    copied: Any


class NextBatch:
    """Batches of one rank by step; `read` brings those of a step to the device."""

    def __init__(
        self, read: Callable[[int], Microbatches], device: torch.device
    ) -> None:
        self._read, self._device = read, device
        stream: Any = torch.cuda.Stream  # its stubs are not typed
        self._stream = stream(device) if device.type == "cuda" else None
        self._ready: _Ready | None = None
        self.seconds = 0.0  # in which the host last read ahead

    def take(self, step: int) -> Microbatches:
        """The batch of a step, for the stream that computes: read ahead, or now."""
        ready, self._ready = self._ready, None
        if ready is None or ready.step != step:
            return self._read(step)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(ready.copied)
        for microbatch in ready.microbatches:
            for tensor in microbatch.values():
                # Its memory is of the other stream, which would give it away too early.
                if tensor.is_cuda:
                    tensor.record_stream(computing)
        return ready.microbatches

    def read_ahead(self, step: int) -> None:
        """Reads the batch of a step and begins its copies, if a GPU computes meanwhile."""
        self.seconds = 0.0
        if self._stream is None:
            return
        started = time.perf_counter()
        # A batch that cannot be read is an error of its own step, which reads it again.
        with torch.cuda.stream(self._stream), suppress(DataError):
            microbatches = self._read(step)
            copied = self._stream.record_event()
            self._ready = _Ready(step, microbatches, copied)
        self.seconds = time.perf_counter() - started
