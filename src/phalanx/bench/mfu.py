"""Model FLOPs utilization (MFU): the time that the model's matmuls need at the peak,
divided by the time of the whole iteration, optimizer included.

There are two models. The wide MLP has only large matmuls and shows the best that the
device can do. A decoder block also has norms, attention and small operations. Backward
counts twice the forward. 30 % is good, 40 % excellent for a real training run. Newer
devices reach less of their peak: from A100 to H100 matmuls became 3.2 times faster and
memory 1.6 to 2.2 times, so memory-bound operations take a larger part of the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layout import Shape
from ..layout.choices import DTYPES
from ..layout.pieces import linear_products
from ..parallel.model import decoder_of
from .clock import Clock
from .device import LocalDevice, dtype_of, products_in


@dataclass(frozen=True)
class Iteration:
    """A whole training iteration: forward, backward, update."""

    name: str
    dtype: str
    flops: float  # of the model: 3 x forward, with causal attention
    flops_full: float  # the same with full attention
    seconds: float
    forward: float  # seconds of the forward pass alone
    readings: int

    def share(self, peak: float) -> float:
        """Return the MFU: theoretical over measured time."""
        return self.flops / peak / self.seconds


@dataclass(frozen=True)
class WideMlp:
    """An MLP of L layers x -> relu(x W), with D x D weights and N rows."""

    layers: int = 8
    width: int = 8192
    rows: int = 8192

    @property
    def flops(self) -> float:
        return 3 * 2.0 * self.layers * self.rows * self.width**2


def measure_mlp(
    device: LocalDevice, mlp: WideMlp, dtype: str, *, limit: float = 20.0
) -> Iteration:
    """Measure the wide MLP with Adam; 16-bit precision by autocast, weights in
    float32."""
    at = device.device
    weights = [
        (
            torch.randn(mlp.width, mlp.width, device=at)
            # He's initialisation keeps activations of ReLU layers in scale.
            * (2 / mlp.width) ** 0.5
        ).requires_grad_()
        for _ in range(mlp.layers)
    ]
    x = torch.randn(mlp.rows, mlp.width, device=at)

    def forward() -> Tensor:
        y = x
        for weight in weights:
            y = F.relu(y @ weight)
        return y.float().square().mean()

    name = f"MLP L={mlp.layers} D={mlp.width} N={mlp.rows}"
    timed = _iteration(device, weights, forward, dtype, limit)
    return Iteration(name, dtype, mlp.flops, mlp.flops, *timed)


def measure_block(
    device: LocalDevice,
    shape: Shape,
    batch: int,
    sequence: int,
    dtype: str,
    *,
    limit: float = 20.0,
) -> Iteration:
    """Measure one block of a decoder of this shape, on `batch` sequences."""
    at = device.device
    # One block, without a vocabulary to speak of.
    block = decoder_of(shape, vocab=8, layers=1).layers[0].to(at)
    x = torch.randn(
        batch, sequence, shape.hidden, device=at, requires_grad=True
    )
    positions = torch.arange(sequence, device=at).expand(batch, -1)

    def forward() -> Tensor:
        y: Tensor = block(x, positions=positions)
        return y.float().square().mean()

    timed = _iteration(device, list(block.parameters()), forward, dtype, limit)
    # Row 1 is the first block: row 0 is the embedding.
    products = linear_products(shape.rows[1], shape)
    matmuls = sum(
        product.multiply_adds
        for product in products
        if not product.weight.adapts
    )
    # Multiply-adds per token, causal; the pairs that a mask leaves out are as many.
    attention = shape.mixing_work(1, sequence)
    mixer = shape.mixer(1)
    masked = attention if mixer is not None and mixer.pairs else 0
    # Three times 2 FLOPs for each multiply-add: forward, and twice in the
    # backward.
    tokens = 3 * 2.0 * batch * sequence
    name = f"a block of {shape.name}, {batch} x {sequence} tokens"
    full = tokens * (matmuls + attention + masked)
    return Iteration(name, dtype, tokens * (matmuls + attention), full, *timed)


def _iteration(
    device: LocalDevice,
    weights: list[Tensor],
    forward: Callable[[], Tensor],
    dtype: str,
    limit: float,
) -> tuple[float, float, int]:
    """Return the seconds of an iteration and of its forward pass, and the number of
    readings."""
    kind, half = device.kind, DTYPES[dtype].bytes == 2
    # On a GPU one kernel updates all weights; elsewhere the fused form is no slower.
    optimizer = torch.optim.Adam(weights, lr=1e-6, fused=True)

    def once() -> Tensor:
        with torch.autocast(kind, dtype_of(dtype, kind), enabled=half):
            return forward()

    def iteration() -> None:
        # None instead of zeros: the backward then writes its gradients.
        optimizer.zero_grad(set_to_none=True)
        once().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with products_in(dtype):
        whole, alone = Clock(device.device).measure(
            iteration, once, repeats=5, limit=limit
        )
    return whole.median, alone.median, len(whole.readings)
