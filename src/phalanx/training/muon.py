"""Muon (Jordan et al. 2024): orthogonalized momentum for matrices, AdamW for all other
weights.

The momentum is sharded like AdamW's moments; `matrices.py` moves it to the owners. The
results are those of `torch.optim.Muon`, computed in bfloat16 on a GPU and in the
weights' dtype on a CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..layout.muon import MUON as ROW
from ..layout.muon import STEPS
from ..layout.optimizer_row import MatrixRow
from ..layout.optimizers import OptimizerChoice
from ..parallel import Unit
from ..parallel.exact import ExactUnit
from .matrices import MatrixUpdate, OwnedMatrix
from .optimizer import AdamW, Scale

COEFFICIENTS, TINY = (3.4445, -4.7750, 2.0315), 1e-7
assert ROW.matrices is not None
MATRICES = ROW.matrices
(_MOMENTUM,) = MATRICES.sharded


def orthogonalized(x: Tensor) -> Tensor:
    """Orthogonalize matrices (n, rows, columns): bring their singular values near 1, by
    Newton-Schulz."""
    # Coefficients of a quintic that brings singular values near 1 in few
    # steps.
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    # The Gram matrix of the short side is the smaller one.
    x = x.mT if tall else x
    # The Frobenius norm bounds the largest singular value, so that iteration
    # converges.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    for _ in range(STEPS):
        # x <- a x + (b G + c G^2) x, with G = x x'.
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
        )
    return x.mT if tall else x


@dataclass(frozen=True)
class Muon:
    """Settings of Muon.

    `scale` is torch's adjust_lr_fn: `original` (Jordan) or `match_rms_adamw` (Liu et
    al. 2025), with which one learning rate suits matrices and other weights. `rate` is
    the matrices' learning rate as a multiple of the others'.
    """

    name: ClassVar[str] = ROW.stored
    row: ClassVar[MatrixRow] = MATRICES
    whole_matrices: ClassVar[bool] = True
    prepares: ClassVar[int] = 0
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "match_rms_adamw"
    rate: float = 1.0
    decay: float = 0.1
    others: AdamW = AdamW()  # immutable, so it can be a default

    @classmethod
    def of_run(cls, choice: OptimizerChoice) -> Muon:
        """The optimizer that a run file describes."""
        momentum = 0.95 if choice.momentum is None else choice.momentum
        # The matrices' rate relative to that of all other weights.
        rate = (choice.matrix_lr or choice.lr) / choice.lr
        return cls(
            momentum,
            choice.nesterov,
            choice.adjust_lr,
            rate,
            choice.weight_decay,
            AdamW.of_run(choice),
        )

    def of(self, unit: Unit) -> MuonUpdate:
        return MuonUpdate(unit, self)

    def scale_of(self, rows: int, columns: int) -> float:
        # adjust_lr_fn "original": sqrt(max(1, rows / columns)).
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        # The RMS of an AdamW update is about 0.2 (Liu et al. 2025).
        return 0.2 * math.sqrt(max(rows, columns))


class MuonUpdate(MatrixUpdate):
    """Muon's update of a unit that may contain matrices."""

    def __init__(self, unit: Unit, optimizer: Muon) -> None:
        super().__init__(unit, optimizer)
        self.muon = optimizer

    def contribution(
        self, view: Tensor, gradient: Tensor, scale: Scale | None
    ) -> Tensor:
        """Update this rank's momentum, which is sharded as AdamW's moments are."""
        m = self.muon.momentum
        kept = self.state.setdefault(view, {})
        if not kept:
            kept["step"] = torch.zeros(
                (), dtype=torch.float32, device=view.device
            )
            kept[_MOMENTUM] = torch.zeros_like(view)
        own = gradient.to(view.device, view.dtype)
        # A tensor on the device, so that a skipped step needs no read.
        weight = torch.full((), 1.0 - m, dtype=view.dtype, device=view.device)
        kept["step"] += 1
        if scale is not None:
            # A skipped step leaves momentum and count as they were.
            scale = scale.on(view.device)
            skip = scale.skip.view(())
            own = (own * scale.factor.to(own.dtype)).masked_fill_(
                skip > 0, 0.0
            )
            weight = weight * (1.0 - skip).to(weight.dtype)
            kept["step"] -= skip
        # As torch.optim.Muon: an average of gradients, then Nesterov's look
        # ahead.
        buffer = kept[_MOMENTUM].lerp_(own, weight)
        return own.lerp(buffer, m) if self.muon.nesterov else buffer

    def replace_by_updates(self, matrices: Sequence[OwnedMatrix]) -> None:
        alike: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            alike[tuple(matrix.elements.shape)].append(matrix.elements)
        # Matrices of one shape share a batched product, except in `exact`: there the
        # number of matrices on an owner depends on the layout, and the size of a batch
        # may change rounding.
        batched = not isinstance(self.unit, ExactUnit)
        for (rows, columns), same in alike.items():
            for these in [same] if batched else [[each] for each in same]:
                made = orthogonalized(torch.stack(these))
                made *= self.muon.scale_of(rows, columns)
                # `these` are views of the whole weights, which receive the updates.
                torch._foreach_copy_(these, list(made.unbind()))
