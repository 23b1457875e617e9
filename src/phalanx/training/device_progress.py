"""Progress of a GPU through the operations that the host has queued for it.

With NCCL the host queues a whole step and then waits in one read, so the host's
position says nothing. The executor records an event at the start and end of each
operation; another thread asks which of them the device has passed.
"""

from collections import deque
from typing import Any

import torch


class DeviceProgress:
    """The events that a device has not passed yet, each with its operation.

    The rank's thread adds events, and the heartbeat thread queries them.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._queued: deque[tuple[int, Any]] = deque()
        self._passed = 0

    def add(self, place: int, event: Any) -> None:
        """Add an event that was just recorded; `place` is the index of the operation's
        text."""
        self._queued.append((place, event))

    def forget(self) -> None:
        """Count all events as passed, after the host has read a later result of the
        device."""
        # Replaced and not cleared: the other thread may be iterating over it.
        queued, self._queued = self._queued, deque()
        self._passed += len(queued)

    def look(self) -> tuple[int, int]:
        """Return the operation that the device is at (-1 if it has passed all) and the
        number of events passed."""
        if self._device is not None:
            # A new thread's device is GPU 0; querying there would allocate memory on
            # it.
            torch.cuda.set_device(self._device)
            self._device = None
        # The deque of this look: `forget` replaces it.
        queued = self._queued
        while queued:
            place, event = queued[0]
            try:
                passed = event.query()
            # the device failed; the rank's own thread will raise it
            except RuntimeError:
                return place, self._passed
            if not passed:
                return place, self._passed
            # Passed events are counted: the count shows that the device makes
            # progress.
            queued.popleft()
            self._passed += 1
        return -1, self._passed
