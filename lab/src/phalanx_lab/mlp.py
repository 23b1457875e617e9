"""The deep MLP by hand, and its training in one process: the reference of every
experiment.

A layer is gelu(x @ w); the loss is the mean square of the output. Everything is
float64, from generators that depend only on the seed, so every rank can generate the
data without a message.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from .catalogue import Size

RATE = 1.0  # higher rates train the default model faster, but small models diverge
Kept = tuple[Tensor, Tensor]
Hook = Callable[[int, Tensor], Tensor]


def same(layer: int, x: Tensor) -> Tensor:
    return x


def draw(seed: int, *shape: int) -> Tensor:
    """Return normally distributed values that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def start(size: Size) -> list[Tensor]:
    """Return the initial weights (He et al. 2015: a gelu passes on half of its
    input)."""
    scale = (2 / size.width) ** 0.5
    return [
        scale * draw(100 + layer, size.width, size.width)
        for layer in range(size.layers)
    ]


def batch(size: Size, step: int) -> Tensor:
    """Return the rows of a step, (batch, width): a pure function of the step."""
    return draw(10_000 + step, size.batch, size.width)


def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Kept]:
    """Return a layer's output, and what its backward needs."""
    z = x @ w
    return F.gelu(z), (x, z)


def backward(gy: Tensor, kept: Kept, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a layer's input and weight, from the gradient of its
    output."""
    x, z = kept
    gz = torch.ops.aten.gelu_backward(gy, z)
    return gz @ w.T, x.T @ gz


def loss_of(y: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean square and its gradient; with `rows`, this part of a mean over
    that many rows."""
    count = (rows or y.shape[0]) * y.shape[1]
    return y.square().sum() / count, 2 * y / count


def gradients_of(
    weights: Sequence[Tensor] | Callable[[int, int], Tensor],
    x: Tensor,
    layers: int = 0,
    *,
    product: Hook = same,
    output: Hook = same,
    loss: Callable[[Tensor], tuple[Tensor, Tensor]] = loss_of,
    to_input: Hook = same,
    gradient: Callable[[int, Tensor], Tensor | None] = same,
    doing: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of some rows and the weight gradients: every layer forward, then
    backward.

    A strategy consists of hooks, called with the number of the layer: on the `product`
    x @ w before the gelu, on the `output` after it, on the output's gradient in `loss`,
    on the gradient that goes `to_input`, and on the weight's `gradient`, where None
    means that this rank does not keep it. `weights` may be a function of the layer and
    the direction (1 forward, -1 backward) that fetches a weight.
    """
    use = weights if callable(weights) else lambda layer, way: weights[layer]
    count = layers if callable(weights) else len(weights)
    kept: list[Kept] = []
    for layer in range(count):
        w = use(layer, 1)
        with doing(f"F{layer}"):
            z = product(layer, x @ w)
            kept.append((x, z))
            x = F.gelu(z)
        del w, z
        x = output(layer, x)
    mean, g = loss(x)
    gradients: list[Tensor] = []
    for layer in reversed(range(count)):
        w = use(layer, -1)
        with doing(f"B{layer}"):
            g, own = backward(g, kept.pop(), w)
        del w
        g, mine = to_input(layer, g), gradient(layer, own)
        del own
        gradients[:0] = [] if mine is None else [mine]
    return mean, gradients


@torch.no_grad()
def update(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Apply plain gradient descent, in place."""
    for w, g in zip(weights, gradients, strict=True):
        w -= RATE * g


class Adam:
    """Adam (Kingma and Ba 2014), with two values of state for every weight."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.count = 0
        self.m = [torch.zeros_like(w) for w in weights]
        self.v = [torch.zeros_like(w) for w in weights]

    @torch.no_grad()
    def update(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Update the weights by one step, in place."""
        self.count += 1
        for w, g, m, v in zip(weights, gradients, self.m, self.v, strict=True):
            m.lerp_(g, 0.1)
            v.lerp_(g.square(), 0.001)
            mean = m / (1 - 0.9**self.count)
            spread = (v / (1 - 0.999**self.count)).sqrt()
            w -= 1e-3 * mean / (spread + 1e-8)


class OneProcess(NamedTuple):
    """The loss of every step, the gradients of the first, and the weights at the
    end."""

    losses: list[float]
    gradients: list[Tensor]
    weights: list[Tensor]


_once = threading.Lock()  # ranks that are threads share one computation


def one_process(size: Size, adam: bool = False) -> OneProcess:
    """Train without parallelism, with autograd's gradients."""
    with _once, _disable_current_modes():
        return _one_process(size, adam)


@lru_cache(maxsize=8)
def _one_process(size: Size, adam: bool) -> OneProcess:
    weights = [w.requires_grad_() for w in start(size)]
    step_of = Adam(weights).update if adam else update
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
        step_of(weights, gradients)
    return OneProcess(losses, first, [w.detach() for w in weights])
