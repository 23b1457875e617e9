"""The deep MLP by hand, and what one process makes of it: the reference of every experiment.

A layer is gelu(x @ w); the loss is the mean square of what comes out. Everything is float64, and
drawn from generators that depend only on what is drawn, so every rank can draw it without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .claims import Claim, Held, Size, equal

__all__ = [
    "Adam",
    "Kept",
    "OneProcess",
    "backward",
    "batch",
    "draw",
    "forward",
    "gradients_of",
    "loss_of",
    "one_process",
    "start",
    "trained_as_one",
    "update",
]

# Higher rates train the default model faster and throw small ones off their feet.
RATE = 1.0
Kept = tuple[Tensor, Tensor]


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and on nothing else."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def start(size: Size) -> list[Tensor]:
    """The weights before training (He et al. 2015: half of what enters a gelu stays)."""
    scale = (2 / size.width) ** 0.5
    return [scale * draw(100 + layer, size.width, size.width) for layer in range(size.layers)]


def batch(size: Size, step: int) -> Tensor:
    """The rows of a step: a pure function of the step."""
    return draw(10_000 + step, size.batch, size.width)


def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Kept]:
    """A layer's output, and what its backward needs."""
    z = x @ w
    return F.gelu(z), (x, z)


def backward(gy: Tensor, kept: Kept, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's input and of its weight, from that of its output."""
    x, z = kept
    gz = torch.ops.aten.gelu_backward(gy, z)
    return gz @ w.T, x.T @ gz


def loss_of(y: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """The mean square, and its gradient. With `rows`, the part of a mean over that many rows."""
    count = (rows or y.shape[0]) * y.shape[1]
    return y.square().sum() / count, 2 * y / count


def gradients_of(weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss of some rows and the gradient of every weight, nothing shared with anybody."""
    kept = []
    for w in weights:
        x, saved = forward(x, w)
        kept.append(saved)
    loss, g = loss_of(x)
    gradients: list[Tensor] = []
    for w in reversed(weights):
        g, gw = backward(g, kept.pop(), w)
        gradients.insert(0, gw)
    return loss, gradients


def update(w: Tensor, g: Tensor) -> None:
    """Plain gradient descent, in place."""
    w -= RATE * g


@dataclass
class Adam:
    """Adam (Kingma and Ba 2014) for one tensor: two numbers of state for every weight."""

    shape: Sequence[int]
    count: int = 0
    m: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.m = torch.zeros(*self.shape, dtype=torch.float64)
        self.v = torch.zeros(*self.shape, dtype=torch.float64)

    def update(self, w: Tensor, g: Tensor) -> None:
        """One step of the weights, in place."""
        self.count += 1
        self.m.lerp_(g, 0.1)
        self.v.lerp_(g.square(), 0.001)
        mean = self.m / (1 - 0.9**self.count)
        spread = (self.v / (1 - 0.999**self.count)).sqrt()
        w -= 1e-3 * mean / (spread + 1e-8)


@dataclass(frozen=True)
class OneProcess:
    """What training in one process gives: the loss of every step, the first gradients, the end."""

    losses: list[float]
    gradients: list[Tensor]
    weights: list[Tensor]


@lru_cache(maxsize=8)
def one_process(size: Size, adam: bool = False) -> OneProcess:
    """The same training with nothing split, its gradients left to autograd."""
    weights = [w.requires_grad_() for w in start(size)]
    states = [Adam(w.shape) for w in weights]
    losses = []
    first: list[Tensor] = []
    for step in range(size.steps):
        x = batch(size, step)
        for w in weights:
            x = F.gelu(x @ w)
        loss = x.square().mean()
        gradients = torch.autograd.grad(loss, weights)
        losses.append(loss.item())
        first = first or list(gradients)
        with torch.no_grad():
            for w, g, state in zip(weights, gradients, states, strict=True):
                state.update(w, g) if adam else update(w, g)
    return OneProcess(losses, first, [w.detach() for w in weights])


def trained_as_one(
    results: Sequence[Held], size: Size, *, adam: bool = False, how: str = ""
) -> Iterator[Claim]:
    """On every rank, `losses`, `gradients` of the first step and `weights` are one process's."""
    alone = one_process(size, adam)
    for what in ("losses", "gradients", "weights"):
        for rank, held in enumerate(results):
            says = f"rank {rank}: {what}{how} are those of one process"
            yield equal(says, held[what + how], getattr(alone, what))
