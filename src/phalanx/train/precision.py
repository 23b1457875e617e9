"""What a step computes in, and the loss scale that float16 needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cost.pieces import COMPUTE
from ..layout.choices import TF32
from ..parallel import Precision


def precision_of(name: str) -> Precision:
    """The precision of a layout's word. Weights are kept, and gradients added up and sent, in
    float32 when they are computed in less."""
    compute = COMPUTE[name]
    if torch.cuda.is_available():
        # Process-wide, and torch's default is off: tf32 is a choice, never an accident.
        torch.set_float32_matmul_precision("high" if name == TF32 else "highest")
    wide = torch.promote_types(compute, torch.float32)
    return Precision(compute, wide, wide)


@dataclass
class LossScale:
    """The factor by which float16's loss is multiplied so that small gradients are not lost.

    An overflow skips the step on all ranks, as they agree on the norm, and halves the factor;
    `patience` steps without one double it.
    """

    scale: float = 2.0**16
    patience: int = 2000
    steady: int = 0

    def saw(self, *, finite: bool) -> None:
        self.steady = self.steady + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.steady >= self.patience:
            self.scale, self.steady = min(2.0**24, self.scale * 2), 0
