"""The row of SOAP: Adam in the eigenbases of Shampoo's preconditioners for matrices,
AdamW for other weights (Vyas et al. 2024, arXiv 2409.11321)."""

from __future__ import annotations

from dataclasses import dataclass

from .choices import FP32
from .codec import key
from .optimizer_row import Matmuls, MatrixRow, OptimizerRow, OwnedTensor

REFRESH = 10  # the paper's preconditioning frequency
# FLOPs of a QR of an n x n matrix with its orthogonal factor written out, as a multiple
# of those of an n x n x n matmul: 8/3 n^3 to 2 n^3 (Golub and Van Loan, section 5.2).
QR = 4 / 3


@dataclass(frozen=True)
class SoapKeys:
    """Keys of a run file that are SOAP's own."""

    refresh_every: int = key(
        REFRESH, "SOAP: updates between refreshes of the eigenbases", minimum=1
    )


def soap_matmuls(rows: int, columns: int) -> tuple[Matmuls, ...]:
    """The matmuls of a step, with a tenth of a refresh: the default frequency, whatever
    a run file says.

    Each refresh multiplies a preconditioner by its basis, and decomposes the result. The
    decomposition counts by its FLOPs; libraries reach a lower rate in it.
    """
    of_a_refresh = (1 + QR) / REFRESH
    return (
        # The gradient and its average into the eigenbases, and the update out of them.
        Matmuls(3, rows, rows, columns),
        Matmuls(3, rows, columns, columns),
        # The preconditioners: G G' and G' G.
        Matmuls(1, rows, columns, rows),
        Matmuls(1, columns, rows, columns),
        Matmuls(of_a_refresh, rows, rows, rows),
        Matmuls(of_a_refresh, columns, columns, columns),
    )


SOAP = OptimizerRow(
    name="soap",
    stored="SOAP",
    moments=("exp_avg", "exp_avg_sq"),
    matrices=MatrixRow(
        title=f"SOAP (a refresh in {REFRESH} updates)",
        matmuls=soap_matmuls,
        # `exp_avg_sq` is that of the rotated gradient.
        owned=(
            OwnedTensor("exp_avg", "rc"),
            OwnedTensor("exp_avg_sq", "rc"),
            OwnedTensor("left", "rr"),
            OwnedTensor("right", "cc"),
            OwnedTensor("left_basis", "rr"),
            OwnedTensor("right_basis", "cc"),
        ),
        # Eigenvectors in 16 bits are too coarse.
        gpu_dtype=FP32,
    ),
    keys=("refresh_every",),
)
