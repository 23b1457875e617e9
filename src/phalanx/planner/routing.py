"""Distribution of tokens over experts: even, by a power law, or as counted in a run.

The rank whose experts have the most tokens determines the cost: others wait for it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..layout import LayoutError, Shape
from ..layout.files import parse_json, read_text

BALANCED = "balanced"
_ZIPF = re.compile(r"zipf:([0-9]{1,2}(?:\.[0-9]{1,6})?)")
_WAYS = "balanced, zipf:1.0 (expert n gets n^-1.0 of the first's tokens), or a JSON file of counts"


@dataclass(frozen=True)
class Routing:
    """The share of tokens that each expert receives, by layer; equal without layers.

    Experts are in the order in which ranks of ep hold them.
    """

    text: str = BALANCED
    layers: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def parse(cls, text: str, shape: Shape) -> Routing:
        """Parse `balanced`, `zipf:S`, or the name of a JSON file.

        The file has a list of counts, or one list for each layer as in a run's
        routing.json. With zipf the busiest experts are neighbours: no other placement
        is worse.
        """
        if text == BALANCED:
            return cls()
        if not shape.experts:
            raise LayoutError(
                f"routing {text[:60]!r}: {shape.name} has no experts. Leave it out."
            )
        # "zipf:1.0" -> weights 1, 1/2, 1/3, ...: expert n gets n^-s of the
        # first's tokens.
        if law := _ZIPF.fullmatch(text):
            layers = [
                [n ** -float(law[1]) for n in range(1, 1 + shape.experts)]
            ]
        elif text.endswith(".json"):
            layers = _counts(text, shape)
        else:
            raise LayoutError(f"routing {text[:60]!r}: write {_WAYS}.")
        sums = map(math.fsum, layers)
        parts = (
            tuple(n / s for n in x) for x, s in zip(layers, sums, strict=True)
        )
        return cls(text, tuple(parts))

    def busiest(self, ep: int) -> float:
        """The load of the busiest rank of ep, relative to the mean rank.

        It is averaged over layers: ranks wait for each other in each layer.
        """
        if not self.layers or ep == 1:
            return 1.0
        most = 0.0
        for loads in self.layers:
            # Ranks of ep hold consecutive experts, rounded up.
            each = -(-len(loads) // ep)
            most += max(
                math.fsum(loads[n : n + each])
                for n in range(0, len(loads), each)
            )
        # The mean rank has 1 / ep of the tokens: multiply to compare with it.
        return ep * most / len(self.layers)


def _counts(file: str, shape: Shape) -> list[list[float]]:
    text = read_text(file, "counts of experts", LayoutError)
    # A file may hold a list or lists; an object around it lets `parse_json`
    # read both.
    value = parse_json(f'{{"counts": {text}}}', file, LayoutError)["counts"]
    nested = isinstance(value, list) and value and isinstance(value[0], list)
    layers: list[Any] = value if nested else [value]
    for counts in layers:
        if (
            not isinstance(counts, list)
            or len(counts) != shape.experts
            # Below 1e300, so that sums stay finite. `type`, because a bool is
            # an int.
            or not all(
                type(n) in (int, float) and 0 <= n < 1e300 for n in counts
            )
            or not any(counts)
        ):
            raise LayoutError(
                f"{file} is not a list of {shape.experts} counts, one for each expert of {shape.name},"
                " nor a list of such lists, one for each layer with experts."
            )
    return [[float(n) for n in counts] for counts in layers]
