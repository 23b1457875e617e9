"""Timestamps that remain comparable when the clock is set or the machine sleeps."""

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_read_once = cache(Path.read_text)


def clock() -> float:
    """Return the seconds since the machine booted, including sleep."""
    # CLOCK_BOOTTIME counts the time asleep, which CLOCK_MONOTONIC of Linux
    # leaves out.
    return time.clock_gettime(
        getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    )


def stamp() -> dict[str, Any]:
    """Return a timestamp; `boot` identifies the boot of the machine whose clock it
    uses."""
    # Without a boot id, times are comparable within one process only.
    boot = f"process {os.getpid()}"
    with suppress(OSError):
        boot = _read_once(Path("/proc/sys/kernel/random/boot_id"))[:13]
    return {
        "time": round(time.time(), 3),
        "clock": round(clock(), 3),
        "boot": boot,
    }
