"""This host's memory: its total, and what this process may still allocate."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def machine_memory() -> float:
    """The bytes of memory in this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def limited_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """The bytes that processes in this control group may have, those in use included."""
    limits = (group.limit for group in _of_groups(proc, cgroups))
    return min([machine_memory(), *limits])


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """The bytes that this process may still allocate within all limits."""
    # MemAvailable counts page caches that the kernel would give back.
    free = re.search(
        r"^MemAvailable: +(\d+) kB", _text(proc / "meminfo"), re.M
    )
    of_machine = 1024.0 * int(free[1]) if free else machine_memory()
    left = (group.left for group in _of_groups(proc, cgroups))
    return max(0.0, min([of_machine, *left]))


class _GroupMemory(NamedTuple):
    """The bytes of a control group's limit, and those of them that are not in use."""

    limit: float
    left: float


def _of_groups(proc: Path, cgroups: Path) -> Iterator[_GroupMemory]:
    """The memory under each limit, from this control group to the root.

    For cgroup v1 and v2.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        # "4:cpu,memory:/slurm/job" in v1, "0::/slurm/job" in v2.
        kinds, _, path = line.partition(":")[2].partition(":")
        if not kinds:
            # Cgroup v2: one hierarchy, whose line names no controllers.
            root, limit, usage, cache = (
                cgroups,
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in kinds.split(","):
            root, cache = cgroups / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.strip("/")
        # A limit of any group above applies as well.
        for folder in (group, *group.parents):
            most, used = (
                _text(folder / limit).strip(),
                _text(folder / usage).strip(),
            )
            # Otherwise there is no limit here, or it is "max".
            if most.isdigit() and used.isdigit():
                stat = dict(
                    re.findall(
                        r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.M
                    )
                )
                # Inactive file pages count as used, but are freed when memory
                # is needed.
                cached = float(stat.get(cache, 0))
                left = float(most) - float(used) + cached
                yield _GroupMemory(float(most), left)
            if folder == root:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
