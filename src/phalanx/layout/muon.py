"""The row of Muon: orthogonalized momentum for matrices, AdamW for other weights."""

from __future__ import annotations

from dataclasses import dataclass

from .codec import key
from .optimizer_row import Matmuls, MatrixRow, OptimizerRow

STEPS = 5  # of Newton-Schulz, as in Jordan et al. 2024


@dataclass(frozen=True)
class MuonKeys:
    """Keys of a run file that are Muon's own."""

    nesterov: bool = key(True, "Muon: Nesterov momentum")
    adjust_lr: str = key(
        "match_rms_adamw",
        "Muon: scale of an update by a matrix's rows and columns: match_rms_adamw (0.2"
        " sqrt(max(rows, columns))) or original (sqrt(max(1, rows / columns)))",
        choices=("match_rms_adamw", "original"),
    )
    matrix_lr: float = key(0.0, "Muon: peak learning rate of matrices; 0: lr")


def newton_schulz_matmuls(rows: int, columns: int) -> tuple[Matmuls, ...]:
    """The matmuls of all steps: x x', its square, and that times x."""
    # The short side first: x x' is then the smaller of the two Gram matrices.
    short, long = sorted((rows, columns))
    return (
        Matmuls(STEPS, short, long, short),
        Matmuls(STEPS, short, short, short),
        Matmuls(STEPS, short, short, long),
    )


MUON = OptimizerRow(
    name="muon",
    stored="Muon",
    moments=("exp_avg", "exp_avg_sq"),
    matrices=MatrixRow(
        title="Newton-Schulz",
        matmuls=newton_schulz_matmuls,
        sharded=("momentum_buffer",),
    ),
    keys=("momentum", "nesterov", "adjust_lr", "matrix_lr"),
    # optimizer.adjust_lr = original and no Nesterov.
    variants=("muon:original",),
)
