"""The time of a record, in terms that survive a clock that is set and a machine that sleeps."""

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_read_once = cache(Path.read_text)


def clock() -> float:
    """Seconds since the machine was started, also while it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def stamp() -> dict[str, Any]:
    """The time of a record; `boot` identifies the boot of the machine whose clock it uses."""
    boot = f"process {os.getpid()}"
    with suppress(OSError):
        boot = _read_once(Path("/proc/sys/kernel/random/boot_id"))[:13]
    return {"time": round(time.time(), 3), "clock": round(clock(), 3), "boot": boot}
