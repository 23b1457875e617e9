"""The floating-point operations of a training step, counted operation by operation.

Matrix products and attention count, two for each multiply-add; norms, activations, lookups and the
softmax do not, as everywhere that MFU is reported (Chowdhery et al. 2022, appendix B). Attention is
counted causal, the pairs of which it computes: T (T + 1) / 2 of a sequence of T. The full count, T
squared, which others report, stands beside it. Masks between documents make pairs fewer; they are
not subtracted.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..layout import Shape
from ..layout.pieces import linear_products
from . import ops
from .program import Program

# A backward computes two products for each of the forward: the input's gradient and the weight's, of
# a frozen weight the first alone.
BACKWARD = 2.0
FROZEN_BACKWARD = 1.0
# Flash attention keeps no scores: its backward computes them again, five products for two.
FLASH_BACKWARD = 2.5


class OpFlops(NamedTuple):
    """One operation of a forward: of which piece, its name, its FLOPs counted causal and in full, and
    whether it has a weight that is trained."""

    piece: int
    name: str
    causal: float
    full: float
    trained: bool = False

    @property
    def attends(self) -> bool:
        return self.name == "attention"


class StepFlops(NamedTuple):
    """A step over all ranks: what the model needs (MFU), what the hardware does (HFU), and the
    model's with attention in full."""

    model: float
    hardware: float
    full: float


def forward_flops(shape: Shape, batch: int, sequence: int) -> tuple[OpFlops, ...]:
    """Every operation of the forward of `batch` sequences (rows, for the MLP) that counts."""
    rows = batch * (sequence if shape.kind == "decoder" else 1)
    found = []
    for row in shape.rows:
        for product in linear_products(row, shape):
            flops = 2.0 * rows * product.multiply_adds
            trained = product.weight.trained
            found.append(OpFlops(row.piece, product.name, flops, flops, trained))
        if shape.kind == "decoder" and 0 < row.piece <= shape.layers:
            per_pair = 2.0 * shape.pair_work * batch
            pairs = _pairs(shape, row.piece, sequence)
            full = per_pair * sequence**2
            found.append(OpFlops(row.piece, "attention", per_pair * pairs, full))
    return tuple(found)


def _pairs(shape: Shape, piece: int, sequence: int) -> float:
    """Pairs of tokens that meet: each with itself and all before it, or as many as a window has."""
    seen = min(shape.window(piece) or sequence, sequence)
    return seen * (seen + 1) / 2 + (sequence - seen) * seen


def step_flops(
    shape: Shape, batch: int, sequence: int, program: Program | None = None
) -> StepFlops:
    """FLOPs of one step, and with its program, the FLOPs of recomputation."""
    ops = forward_flops(shape, batch, sequence)
    again = _recomputed(program) if program else {}
    model = full = hardware = 0.0
    for op in ops:
        backward = BACKWARD if op.trained or op.attends else FROZEN_BACKWARD
        model, full = (
            model + op.causal * (1 + backward),
            full + op.full * (1 + backward),
        )
        backward = FLASH_BACKWARD if op.attends else backward
        hardware += op.causal * (1 + backward + again.get(op.piece, 0.0))
    return StepFlops(model, hardware, full)


def _recomputed(program: Program) -> dict[int, float]:
    """For each piece, the part of the microbatches for which its forward is computed twice."""
    counts = Counter((op.kind, op.piece) for row in program.rows for op in row)
    pieces = range(program.pieces)
    return {
        p: counts[ops.RECOMPUTE, p] / max(1, counts[ops.FORWARD, p]) for p in pieces
    }
