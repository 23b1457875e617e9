"""The row of an MLP that all tokens of a block pass through, gated or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .block_weight import BlockWeight, linear_weights
from .layout import Layout
from .mlp_row import MlpRow
from .violation import Violation, divisor_list

if TYPE_CHECKING:
    from .shape import Shape


def dense_weights(
    shape: Shape, name: str, width: int
) -> Iterator[BlockWeight]:
    """The weights of an MLP with this hidden width."""
    bias, hidden = shape.bias == "all", shape.hidden
    wide, narrow = "ffn embed", "embed ffn"
    if shape.gated:
        yield from linear_weights(
            f"{name}.gate", hidden, width, wide, bias=bias
        )
    yield from linear_weights(f"{name}.up", hidden, width, wide, bias=bias)
    yield from linear_weights(f"{name}.down", width, hidden, narrow, bias=bias)


def _weights(shape: Shape) -> Iterator[BlockWeight]:
    yield from dense_weights(shape, "mlp", shape.ffn)


def _widths(shape: Shape) -> Mapping[str, int]:
    return {"ffn": shape.ffn}


def _violations(layout: Layout, shape: Shape) -> Iterator[Violation]:
    tp, ffn = layout.tp, shape.ffn
    if ffn % tp:
        what = f"tp={tp} does not divide ffn={ffn} in layers.*.mlp.up.weight."
        fits = divisor_list(math.gcd(ffn, shape.heads))
        yield Violation("ffn", what, f"Use tp {fits}.")


DENSE = MlpRow(
    name="dense",
    weights=_weights,
    linears=("gate", "up", "down"),
    widths=_widths,
    violations=_violations,
)
