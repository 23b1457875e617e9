"""Prefetches the next step's batch to a GPU while it computes the current step.

The host queues a whole step and then waits for its results. In between it reads the
next rows and starts their copies from pinned memory, on a separate stream, so that the
device need not wait between steps. Without a GPU nothing is prefetched: reading would
take time from the computation.
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
    """A batch whose copies have been started, and the event recorded after the last of
    them."""

    step: int
    microbatches: Microbatches
    copied: Any


class NextBatch:
    """The batches of one rank by step. `read` loads a step's batch to the device."""

    def __init__(
        self, read: Callable[[int], Microbatches], device: torch.device
    ) -> None:
        self._read, self._device = read, device
        stream: Any = torch.cuda.Stream  # torch's stubs are untyped
        self._stream = stream(device) if device.type == "cuda" else None
        self._ready: _Ready | None = None
        self.seconds = 0.0  # spent by the host on the last prefetch

    def take(self, step: int) -> Microbatches:
        """Return the batch of a step, for use on the compute stream: prefetched, or
        read now."""
        ready, self._ready = self._ready, None
        if ready is None or ready.step != step:
            return self._read(step)
        computing = torch.cuda.current_stream(self._device)
        # The device waits, not the host.
        computing.wait_event(ready.copied)
        for microbatch in ready.microbatches:
            for tensor in microbatch.values():
                # Allocated on the copy stream, whose allocator would reuse the memory
                # too early.
                if tensor.is_cuda:
                    tensor.record_stream(computing)
        return ready.microbatches

    def read_ahead(self, step: int) -> None:
        """Read the batch of a step and start its copies, if there is a GPU."""
        self.seconds = 0.0
        if self._stream is None:
            return
        started = time.perf_counter()
        # An unreadable batch raises in its own step, which reads it again.
        with torch.cuda.stream(self._stream), suppress(DataError):
            microbatches = self._read(step)
            # Recorded after the last copy of this batch.
            copied = self._stream.record_event()
            self._ready = _Ready(step, microbatches, copied)
        self.seconds = time.perf_counter() - started
