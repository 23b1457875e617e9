"""Muon on one process: torch's own, without its rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..parallel import Model
from ..training.muon import Muon
from .plain_optimizers import BesideAdamW, Weights


class Unrounded(TorchFunctionMode):
    """Disables rounding in torch's Muon, which rounds a matrix to bfloat16 before
    orthogonalizing it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class PlainMuon(BesideAdamW):
    """torch's Muon for each matrix, and its AdamW for all other weights."""

    def __init__(
        self, optimizer: Muon, weights: Weights, lr: float, model: Model
    ) -> None:
        super().__init__(optimizer, weights, lr, model)
        self.muon = torch.optim.Muon(
            [each.part for each in self.matrices],
            weight_decay=optimizer.decay,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            adjust_lr_fn=optimizer.scale,
        )

    def step_matrices(self, lr: float) -> None:
        self.muon.param_groups[0]["lr"] = lr
        with Unrounded():
            self.muon.step()  # type: ignore[no-untyped-call]
