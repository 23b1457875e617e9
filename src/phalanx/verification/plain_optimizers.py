"""Optimizers on one process: those of torch, by whose updates a layout is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..parallel import Model
from ..training.matrices import MatrixOptimizer
from ..training.optimizer import AdamW, Sgd

Weights = Mapping[str, nn.Parameter]


def decayed_groups(weights: Weights, decay: float) -> list[dict[str, Any]]:
    """The parameter groups: matrices decay; norms and biases do not."""
    decayed = [w for w in weights.values() if w.dim() > 1]
    others = [w for w in weights.values() if w.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


def plain_adamw(
    optimizer: AdamW, weights: Weights, lr: float, model: Model
) -> Any:
    groups = decayed_groups(weights, optimizer.decay)
    betas = optimizer.beta1, optimizer.beta2
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=optimizer.eps)


def plain_sgd(
    optimizer: Sgd, weights: Weights, lr: float, model: Model
) -> Any:
    groups = decayed_groups(weights, optimizer.decay)
    return torch.optim.SGD(groups, lr=lr, momentum=optimizer.momentum)


class MatrixOfWeight(NamedTuple):
    """A matrix that the rule table names: its weight, and a parameter that views it."""

    weight: nn.Parameter
    of: Callable[[Tensor], Tensor]  # the matrix in a tensor like the weight
    part: nn.Parameter


class BesideAdamW(ABC):
    """An optimizer of the matrices that the rule table names, beside torch's AdamW of all
    other weights."""

    def __init__(
        self,
        optimizer: MatrixOptimizer,
        weights: Weights,
        lr: float,
        model: Model,
    ) -> None:
        self.rate = optimizer.rate
        self.matrices: list[MatrixOfWeight] = []
        rest = dict(weights)
        for name, weight in weights.items():
            boxes = model.rules.matrices(name, tuple(weight.shape))
            # Three dimensions: a matrix for each expert.
            for n, box in product(
                range(len(weight) if weight.dim() == 3 else 1), boxes
            ):
                # The matrices' optimizer updates it, so AdamW does not.
                rest.pop(name, None)
                of = partial(_part, number=n, box=box)
                # A view, so that an update of the part updates the weight.
                part = nn.Parameter(of(weight.detach()))
                self.matrices.append(MatrixOfWeight(weight, of, part))
        self.adamw = plain_adamw(optimizer.others, rest, lr, model)
        wholes = {id(each.weight): each.weight for each in self.matrices}
        self.param_groups = [
            # The outer loop sets the rate of every group, including that of
            # the matrices.
            *self.adamw.param_groups,
            {"params": [*wholes.values()], "lr": lr},
        ]

    @abstractmethod
    def step_matrices(self, lr: float) -> None:
        """Update the matrices by their gradients."""

    def step(self) -> None:
        for weight, of, part in self.matrices:
            # Views of the gradient of the whole weight.
            part.grad = None if weight.grad is None else of(weight.grad)
        self.step_matrices(self.param_groups[-1]["lr"] * self.rate)
        self.adamw.step()


def _part(x: Tensor, number: int, box: tuple[slice, slice]) -> Tensor:
    """Return a view of one matrix, or of one expert's."""
    return (x[number] if x.dim() == 3 else x)[box]
