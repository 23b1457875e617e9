"""torch's fused update kernels over flat runs, with the state under torch's own names.

Not torch.optim: what it wraps around these kernels imports the compiler, which takes a second or two
of every start, on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import Scale

__all__ = ["SGD", "AdamW", "Kernel"]

# Its stubs leave the kernels out.
_torch: Any = torch


class Kernel(ABC):
    """Updates runs of numbers in place. `state` is by run, made at its first step."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @abstractmethod
    def _update(self, run: Tensor, gradient: Tensor, **common: Any) -> None: ...

    def step(
        self, run: Tensor, gradient: Tensor, *, lr: float, decay: float, scale: Scale | None = None
    ) -> None:
        """Update a run by its gradient, which is scaled in place, or not at all if `scale` skips."""
        common: dict[str, Any] = {"lr": lr, "weight_decay": decay, "maximize": False}
        if scale is not None:
            common |= {"grad_scale": scale.divisor, "found_inf": scale.skip}
            if gradient.dtype == torch.float64:
                gradient *= scale.factor  # the kernels' own scale is float32
                del common["grad_scale"]
        self._update(run, gradient, **common)


class AdamW(Kernel):
    """Options: betas, eps."""

    def _update(self, run: Tensor, gradient: Tensor, **common: Any) -> None:
        if run not in self.state:
            self.state[run] = {
                "step": torch.zeros((), dtype=torch.float32, device=run.device),
                "exp_avg": torch.zeros_like(run),
                "exp_avg_sq": torch.zeros_like(run),
            }
        state = self.state[run]
        state["step"] += 1
        if "found_inf" in common:
            state["step"] -= common["found_inf"].view(())
        beta1, beta2 = self.options["betas"]
        _torch._fused_adamw_(
            [run], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            beta1=beta1, beta2=beta2, eps=self.options["eps"], amsgrad=False, **common,
        )  # fmt: skip


class SGD(Kernel):
    """Options: momentum."""

    def _update(self, run: Tensor, gradient: Tensor, **common: Any) -> None:
        momentum = self.options["momentum"]
        if momentum and run not in self.state:
            # Zeros, not the kernel's own first step, which a skipped one would leave undone.
            self.state[run] = {"momentum_buffer": torch.zeros_like(run)}
        kept = [self.state[run]["momentum_buffer"]] if momentum else []
        _torch._fused_sgd_(
            [run], [gradient], kept, momentum=momentum, dampening=0.0, nesterov=False,
            is_first_step=False, **common,
        )  # fmt: skip
