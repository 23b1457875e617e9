"""A rule that a layout breaks, and the divisors that its way out names."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule: its name, the conflict with its numbers, and a way out."""

    rule: str
    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.what}\n  {self.way_out}"


def divisors(n: int) -> list[int]:
    """All divisors, in ascending order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [*low, *(n // d for d in reversed(low) if d * d < n)]


def divisor_list(n: int) -> str:
    """The divisors as a text, the largest left out if there are many."""
    every = divisors(n)
    shown = every if len(every) <= 8 else [*every[:7], "..."]
    return ", ".join(map(str, shown))
