"""Sizes and rates as people write them: `64M` to bytes, bytes to `64 MiB`, rates to `3352 GB/s`."""

from __future__ import annotations

import re

from .device import MachineError

__all__ = ["bytes_of", "rate", "seconds", "size", "sizes_of", "tera"]

_BINARY = ("", "K", "M", "G", "T", "P")


def bytes_of(text: str) -> int:
    """`1K` is 1,024 bytes, `64M` 64 MiB."""
    found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", text.strip())
    if not found or not int(found[1]):
        raise MachineError(f"{text[:60]!r} is not a size; write 4096, 64K, 512M or 1G.")
    return int(found[1]) << 10 * _BINARY.index(found[2])


def sizes_of(text: str) -> tuple[int, ...]:
    """`1K:64M` from one to the other in steps of 4, `1K:64M:2` in steps of 2, or a list `1K,8M`."""
    if ":" not in text:
        return tuple(sorted({bytes_of(part) for part in text.split(",")}))
    first, last, *step = text.split(":")
    low, high = bytes_of(first), bytes_of(last)
    factor = (
        int(step[0]) if len(step) == 1 and re.fullmatch("[0-9]{1,9}", step[0]) else 0 if step else 4
    )
    if low > high or factor < 2:
        raise MachineError(
            f"{text[:60]!r} is not a range of sizes; write FIRST:LAST or FIRST:LAST:STEP."
        )
    found = [low]
    while found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return (*found, high) if found[-1] < high else tuple(found)


def size(count: float) -> str:
    """Bytes with a binary unit, as memory is sold: 80 GiB, 1.875 PiB, 96 B."""
    for unit in _BINARY:
        if abs(count) < 1024 or unit == "P":
            return f"{count:.4g} {unit}{'i' if unit else ''}B"
        count /= 1024
    raise AssertionError


def rate(per_second: float) -> str:
    """Bytes a second with GB = 1e9 bytes, as links and memories are sold."""
    if not per_second:
        return "unknown"
    power, unit = next(
        ((p, u) for p, u in ((1e12, "TB/s"), (1e9, "GB/s")) if per_second >= 10 * p), (1e9, "GB/s")
    )
    x = per_second / power
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.3g} {unit}"


def seconds(time: float) -> str:
    """A time in the unit that leaves one to three digits before the point."""
    for power, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if time >= power:
            return f"{time / power:.3g} {unit}"
    return f"{time / 1e-9:.3g} ns"


def tera(per_second: float) -> str:
    """Operations a second in TFLOP/s; GFLOP/s where there are few, EFLOP/s where many."""
    for power, unit in ((1e18, "E"), (1e12, "T")):
        x = per_second / power
        if x >= 0.1:
            return f"{x:.1f} {unit}FLOP/s" if x >= 100 else f"{x:.3g} {unit}FLOP/s"
    return f"{per_second / 1e9:.3g} GFLOP/s"
