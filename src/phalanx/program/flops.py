"""Counts the floating-point operations of a training step, operation by operation.

Matmuls and attention count, two FLOPs for each multiply-add. Norms, activations,
lookups and the softmax do not, as is usual for MFU (Chowdhery et al. 2022, appendix B).
Attention counts as causal: T (T + 1) / 2 pairs in a sequence of T. The full count, T
squared, which others report, is given too. Masks between documents leave fewer pairs;
these are not subtracted.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..layout import Shape
from ..layout.pieces import linear_products
from . import ops
from .program import Program

# A backward computes two matmuls for each one of the forward: for the input's gradient
# and for the weight's. A frozen weight needs only the first.
BACKWARD = 2.0
FROZEN_BACKWARD = 1.0
# Flash attention keeps no scores. Its backward recomputes them: five matmuls for two.
FLASH_BACKWARD = 2.5


class OpFlops(NamedTuple):
    """One operation of a forward: its piece, its name, its FLOPs (causal and full).

    `trained` is True if it has a weight that is trained.
    """

    piece: int
    name: str
    causal: float
    full: float
    trained: bool = False

    @property
    def attends(self) -> bool:
        return self.name == "attention"


class StepFlops(NamedTuple):
    """FLOPs of a step over all ranks.

    `model` is what the model needs (MFU), `hardware` what the devices compute (HFU),
    `full` the model's FLOPs with full attention.
    """

    model: float
    hardware: float
    full: float


def forward_flops(
    shape: Shape, batch: int, sequence: int
) -> tuple[OpFlops, ...]:
    """The operations of the forward of `batch` sequences (rows, for the MLP)."""
    # An MLP's row is one example, a decoder's a sequence of tokens.
    rows = batch * (sequence if shape.kind == "decoder" else 1)
    found = []
    for row in shape.rows:
        for product in linear_products(row, shape):
            flops = 2.0 * rows * product.multiply_adds
            trained = product.weight.trained
            found.append(
                OpFlops(row.piece, product.name, flops, flops, trained)
            )
        mixer = shape.mixer(row.piece)
        if mixer is None:
            continue
        if mixer.pairs:
            # q k' and the product with v, for each pair of tokens
            per_pair = 2.0 * shape.pair_work * batch
            causal = per_pair * _pairs(shape, row.piece, sequence)
            full = per_pair * sequence**2
            trained = False
        else:
            causal = full = 2.0 * rows * mixer.work(shape, sequence)
            trained = row.piece not in shape.frozen
        found.append(
            OpFlops(row.piece, mixer.work_name, causal, full, trained)
        )
    return tuple(found)


def _pairs(shape: Shape, piece: int, sequence: int) -> float:
    """Token pairs that attend: each with itself and those before, or a window."""
    # The first `seen` tokens see 1, 2, ..., seen tokens; every later one sees `seen`.
    seen = min(shape.window(piece) or sequence, sequence)
    return seen * (seen + 1) / 2 + (sequence - seen) * seen


def step_flops(
    shape: Shape, batch: int, sequence: int, program: Program | None = None
) -> StepFlops:
    """The FLOPs of one step; with its program, including recomputation."""
    ops = forward_flops(shape, batch, sequence)
    again = _recomputed(program) if program else {}
    model = full = hardware = 0.0
    for op in ops:
        backward = BACKWARD if op.trained or op.attends else FROZEN_BACKWARD
        model, full = (
            model + op.causal * (1 + backward),
            full + op.full * (1 + backward),
        )
        # HFU: what flash attention and recomputation compute a second time.
        backward = FLASH_BACKWARD if op.attends else backward
        hardware += op.causal * (1 + backward + again.get(op.piece, 0.0))
    return StepFlops(model, hardware, full)


def _recomputed(program: Program) -> dict[int, float]:
    """The share of microbatches for which each piece's forward is recomputed."""
    counts = Counter((op.kind, op.piece) for row in program.rows for op in row)
    pieces = range(program.pieces)
    return {
        p: counts[ops.RECOMPUTE, p] / max(1, counts[ops.FORWARD, p])
        for p in pieces
    }
