"""Progress of a GPU through the operations that the host has queued for it.

Over NCCL the host queues a whole step and then waits in one read, so its own position says nothing.
The executor records an event at the start and end of each operation; another thread asks which of
them the device has passed.
"""

from collections import deque
from typing import Any

import torch


class DeviceProgress:
    """The events that a device has not come past yet, each with the operation it belongs to. The rank's
    thread adds them, and the thread that beats looks."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._queued: deque[tuple[int, Any]] = deque()
        self._passed = 0

    def add(self, place: int, event: Any) -> None:
        """An event that has just been recorded; `place` is the number of the operation's text."""
        self._queued.append((place, event))

    def forget(self) -> None:
        """Counts all events as passed: the host has read what the device computed after them."""
        # The deque is replaced and not emptied: the other thread may be looking at it.
        queued, self._queued = self._queued, deque()
        self._passed += len(queued)

    def look(self) -> tuple[int, int]:
        """The operation that the device is at, -1 when it has come past all, and how many events it
        has passed so far."""
        if self._device is not None:
            # A thread's device is GPU 0 at first, and to ask there would use memory of that.
            torch.cuda.set_device(self._device)
            self._device = None
        queued = self._queued
        while queued:
            place, event = queued[0]
            try:
                passed = event.query()
            # the device has failed, which the rank's own thread will hear
            except RuntimeError:
                return place, self._passed
            if not passed:
                return place, self._passed
            queued.popleft()
            self._passed += 1
        return -1, self._passed
