"""Optimizers on flat shards: one fused update over a few views of a unit's home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..parallel import Unit
from . import fused

__all__ = ["AdamW", "Optimizer", "Scale", "Sgd", "Update"]


class Optimizer(Protocol):
    """Makes the update of a unit: a function of the learning rate and the gradient's scale."""

    def of(self, unit: Unit) -> Callable[[float, Scale | None], None]: ...


class Scale(NamedTuple):
    """What all ranks agreed about the gradients of a step, as numbers on the device: reading them on
    the host would wait for it."""

    factor: Tensor  # gradients are multiplied by it; float64
    divisor: Tensor  # or divided by this in the fused kernels; float32
    skip: Tensor  # 1 where the norm is not finite and nothing is updated; float32

    @classmethod
    def of(cls, norm: Tensor, clip: float, loss_scale: float) -> Scale:
        factor = torch.full_like(norm, 1.0 / loss_scale)
        if clip:
            # As torch's clip_grad_norm_ does, with its 1e-6.
            factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
        return cls(factor, factor.reciprocal().float(), (~norm.isfinite()).float())

    def on(self, device: torch.device) -> Scale:
        return Scale(*(x.to(device) for x in self))


class Update:
    """The update of one unit: a fused kernel over runs of the flat home that decay alike."""

    def __init__(self, unit: Unit, kernel: fused.Kernel, decay: float) -> None:
        self.unit = unit
        self.runs: list[tuple[slice, Tensor]] = []
        self.decays: list[float] = []
        for segment in unit.own_segments():
            run = slice(segment.start, segment.stop)
            self.runs.append((run, unit.home[run]))
            self.decays.append(decay if segment.decay else 0.0)
        self.torch: Any = kernel if self.runs else None

    def __call__(self, lr: float, scale: Scale | None = None) -> None:
        """One step with the unit's gradient, scaled; the gradient is spent."""
        gradient = self.unit.gradient
        assert gradient is not None, f"unit {self.unit.number} is updated without a gradient"
        if self.torch is not None:
            scale = scale and scale.on(self.runs[0][1].device)
            for (run, view), decay in zip(self.runs, self.decays, strict=True):
                own = gradient[run].to(view.device, view.dtype)
                self.torch.step(view, own, lr=lr, decay=decay, scale=scale)
        self.unit.spend()
        self.unit.refresh()


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled decay (Loshchilov and Hutter 2019); norms and biases do not decay."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1

    def of(self, unit: Unit) -> Update:
        kernel = fused.AdamW(betas=(self.beta1, self.beta2), eps=self.eps)
        return Update(unit, kernel, self.decay)


@dataclass(frozen=True)
class Sgd:
    """Gradient descent with momentum."""

    momentum: float = 0.0
    decay: float = 0.0

    def of(self, unit: Unit) -> Update:
        return Update(unit, fused.SGD(momentum=self.momentum), self.decay)
