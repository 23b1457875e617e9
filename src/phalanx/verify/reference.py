"""The same training on one process: the plain model, the whole batch, nothing of ours between.

This is the oracle. It shares with the engine only how weights start and what a batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..parallel import Model, count_valid, start
from ..train.optimizer import AdamW, Sgd

__all__ = ["Mismatch", "Step", "reference"]

Batch = Mapping[str, Tensor]


class Mismatch(NamedTuple):
    """A number of which two ranks hold copies with different bits."""

    what: str  # gradient or weight
    name: str  # of the parameter
    element: tuple[int, ...]
    ranks: tuple[int, int]
    values: tuple[float, float]


@dataclass(frozen=True)
class Step:
    """One step as somebody saw it: loss per valid token, gradient norm, every tensor by name, and
    of each piece's output the sum of squares. `mismatches` has the first number of each tensor
    whose copies differ."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, float]
    mismatches: tuple[Mismatch, ...] = ()


def reference(
    model: Model,
    batches: Callable[[int], Batch],
    *,
    steps: int,
    optimizer: AdamW | Sgd,
    lr: float,
    clip: float,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
) -> list[Step]:
    """Train the model as torch's own documentation would."""
    weights = _materialise(model, seed, dtype, device)
    decayed = [w for w in weights.values() if w.dim() > 1]
    plain = [w for w in weights.values() if w.dim() <= 1]
    torch_optimizer = _torch_optimizer(optimizer, decayed, plain, lr)
    seen = []
    for step in range(steps):
        batch = {name: x.to(device) for name, x in batches(step).items()}
        total, outputs = _forward(model, batch)
        loss = total / max(1, count_valid(batch))
        torch_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {n: _gradient(w).clone() for n, w in weights.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(weights.values(), clip or float("inf")))
        torch_optimizer.step()
        after = {n: w.detach().clone() for n, w in weights.items()}
        seen.append(Step(float(loss.detach()), norm, gradients, after, outputs))
    return seen


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _materialise(
    model: Model, seed: int, dtype: torch.dtype, device: str
) -> dict[str, nn.Parameter]:
    """Real weights in place of the model's meta ones, the tied ones one object still."""
    names = {parameter: name for name, parameter in model.weights.items()}
    made = {n: nn.Parameter(start(model, n, seed, dtype).to(device)) for n in model.weights}
    for _, piece in model.pieces:
        for module in piece.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = made[names[parameter]]
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.empty_like(buffer, device=device)
            reset = getattr(module, "reset_buffers", None)
            if callable(reset):
                reset()
    return made


def _forward(model: Model, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    x: Tensor | None = None
    outputs = {}
    for number, (name, piece) in enumerate(model.pieces):
        named = {key: batch[key] for key in model.takes(number) if key in batch}
        x = piece(**named) if x is None else piece(x, **named)
        if x.dim():
            outputs[name] = float(x.detach().double().square().sum())
    assert x is not None
    return x, outputs


def _torch_optimizer(
    optimizer: AdamW | Sgd, decayed: list[nn.Parameter], plain: list[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    groups = [
        {"params": decayed, "weight_decay": optimizer.decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if isinstance(optimizer, Sgd):
        return torch.optim.SGD(groups, lr=lr, momentum=optimizer.momentum)
    return torch.optim.AdamW(
        groups, lr=lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps
    )
