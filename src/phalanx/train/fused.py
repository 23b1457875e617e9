"""torch's fused update kernels over flat runs, with the state under torch's own names.

Not torch.optim: what it wraps around these kernels imports the compiler, which takes a second or two
of every start, on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

__all__ = ["SGD", "AdamW", "Kernel"]

# Its stubs leave the kernels out.
_torch: Any = torch


class Kernel(ABC):
    """Updates runs of numbers in place. `state` is by run, made at its first step."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @abstractmethod
    def step(self, run: Tensor, gradient: Tensor, *, lr: float, decay: float) -> None:
        """Update a run by its gradient."""


class AdamW(Kernel):
    """Options: betas, eps."""

    def step(self, run: Tensor, gradient: Tensor, *, lr: float, decay: float) -> None:
        if run not in self.state:
            self.state[run] = {
                "step": torch.zeros((), dtype=torch.float32, device=run.device),
                "exp_avg": torch.zeros_like(run),
                "exp_avg_sq": torch.zeros_like(run),
            }
        state = self.state[run]
        state["step"] += 1
        beta1, beta2 = self.options["betas"]
        _torch._fused_adamw_(
            [run], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=self.options["eps"],
            amsgrad=False, maximize=False,
        )  # fmt: skip


class SGD(Kernel):
    """Options: momentum."""

    def step(self, run: Tensor, gradient: Tensor, *, lr: float, decay: float) -> None:
        momentum = self.options["momentum"]
        first = run not in self.state
        if momentum and first:
            self.state[run] = {"momentum_buffer": torch.empty_like(run)}
        kept = [self.state[run]["momentum_buffer"]] if momentum else []
        _torch._fused_sgd_(
            [run], [gradient], kept, weight_decay=decay, momentum=momentum, lr=lr, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=first and bool(momentum),
        )  # fmt: skip
