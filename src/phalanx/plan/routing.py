"""How tokens are spread over experts: evenly, by a power law, or as somebody has counted them.

What it costs is that of the rank whose experts have most tokens: others wait for it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..layout import LayoutError, Shape
from ..layout.files import parse_json, read_text

BALANCED = "balanced"
_ZIPF = re.compile(r"zipf:([0-9]{1,2}(?:\.[0-9]{1,6})?)")
_WAYS = "balanced, zipf:1.0 (the n-th expert has n^-1.0 of the first's), or a JSON file of counts"


@dataclass(frozen=True)
class Routing:
    """The part of all choices that each expert has; none: all as many. They stand in the order of
    experts, as ranks of ep have them."""

    text: str = BALANCED
    loads: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str, shape: Shape) -> Routing:
        """From `balanced`, `zipf:S`, or a file with a list of counts. Of zipf the busiest experts are
        neighbours: no other placement is worse."""
        if text == BALANCED:
            return cls()
        if not shape.experts:
            raise LayoutError(f"routing {text[:60]!r}: {shape.name} has no experts. Leave it out.")
        if law := _ZIPF.fullmatch(text):
            counts = [n ** -float(law[1]) for n in range(1, 1 + shape.experts)]
        elif text.endswith(".json"):
            counts = _counts(text, shape)
        else:
            raise LayoutError(f"routing {text[:60]!r}: write {_WAYS}.")
        total = math.fsum(counts)
        return cls(text, tuple(count / total for count in counts))

    def busiest(self, ep: int) -> float:
        """The tokens of the rank that has most, where one is the mean."""
        if not self.loads or ep == 1:
            return 1.0
        each = -(-len(self.loads) // ep)
        parts = (self.loads[n : n + each] for n in range(0, len(self.loads), each))
        return ep * max(map(math.fsum, parts))


def _counts(file: str, shape: Shape) -> list[float]:
    text = read_text(file, "counts of experts", LayoutError)
    counts = parse_json(f'{{"counts": {text}}}', file, LayoutError)["counts"]
    numbers = isinstance(counts, list) and all(type(n) in (int, float) and n >= 0 for n in counts)
    if not numbers or len(counts) != shape.experts or not any(counts):
        raise LayoutError(
            f"{file}: is no list of {shape.experts} counts, one for each expert of {shape.name}."
        )
    return [float(n) for n in counts]
