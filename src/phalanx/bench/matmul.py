"""Matmuls by shape and dtype: FLOP/s, and the share of the device that they use (HFU).

Operands are random, since a GPU reduces its clock less for zeros, and are in so many
copies that none is cached. Beside each correct time stands that of a clock that does
not wait: a launch is asynchronous, and the next line of Python runs long before the
result is ready. On a CPU the call returns when it has finished, and both agree.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from ..layout import Shape
from .clock import Clock
from .device import LocalDevice, dtype_of, products_in

# Larger than any cache in the catalogue; the copies of one matmul's operands take this
# much.
COLD = 256 << 20


@dataclass(frozen=True)
class MatrixProduct:
    """A matmul (m, k) @ (k, n) and its purpose; with its times once measured."""

    name: str
    dtype: str
    m: int
    n: int
    k: int
    seconds: float = 0.0
    least: float = 0.0
    most: float = 0.0
    readings: int = 0
    claimed: float = 0.0  # seconds by a clock without synchronisation

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def rate(self) -> float:
        return self.flops / self.seconds

    @property
    def claimed_rate(self) -> float:
        return self.flops / self.claimed


def square_products(
    dtypes: Sequence[str], sizes: Sequence[int]
) -> list[MatrixProduct]:
    """Return N x N matmuls, smallest first."""
    return [
        MatrixProduct("square", dtype, n, n, n)
        for n in sizes
        for dtype in dtypes
    ]


def decoder_products(
    shape: Shape, tokens: int, dtypes: Sequence[str]
) -> list[MatrixProduct]:
    """Return the matmuls of a decoder's forward pass: long and wide rather than
    square."""
    wide, narrow = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    sizes = {
        "q": (wide, shape.hidden),
        "k, v": (narrow, shape.hidden),
        "attention out": (shape.hidden, wide),
        "gate, up" if shape.gated else "up": (shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
        "head": (shape.vocab, shape.hidden),
    }
    return [
        MatrixProduct(f"{shape.name} {name}", dtype, tokens, n, k)
        for dtype in dtypes
        for name, (n, k) in sizes.items()
    ]


def measure_products(
    device: LocalDevice,
    products: Sequence[MatrixProduct],
    *,
    limit: float = 60.0,
    repeats: int = 7,
) -> Iterator[MatrixProduct]:
    """Measure the matmuls that memory and `limit` seconds allow, and yield each with
    its times.

    A matmul that would exceed the limit, at the best rate of its dtype so far, is
    skipped.
    """
    began = time.monotonic()
    # The best rate of each dtype so far.
    best: dict[str, float] = {}
    for product in products:
        left = limit - (time.monotonic() - began)
        # A warm-up and a few readings.
        foreseen = (
            3 * product.flops / best[product.dtype]
            if product.dtype in best
            else 0.0
        )
        if (
            left <= 0
            or foreseen > left
            # Operands and result must fit beside what is in use.
            or _bytes(device, product) > 0.8 * device.free
        ):
            continue
        with products_in(product.dtype):
            done = _measured(device, product, min(left / 2, 5.0), repeats)
        best[done.dtype] = max(best.get(done.dtype, 0.0), done.rate)
        yield done


def _bytes(device: LocalDevice, product: MatrixProduct) -> int:
    m, n, k = product.m, product.n, product.k
    return (m * k + k * n + m * n) * dtype_of(
        product.dtype, device.kind
    ).itemsize


def _measured(
    device: LocalDevice, product: MatrixProduct, limit: float, repeats: int
) -> MatrixProduct:
    dtype, at = dtype_of(product.dtype, device.kind), device.device
    # As many copies as exceed every cache, at most 64.
    copies = max(1, min(64, COLD // _bytes(device, product)))
    operands = []
    for _ in range(copies):
        a = torch.randn(product.m, product.k, device=at).to(dtype)
        b = torch.randn(product.k, product.n, device=at).to(dtype)
        operands.append(
            (a, b, torch.empty(product.m, product.n, device=at, dtype=dtype))
        )
    # Another copy each time, so that none is in a cache.
    turn = cycle(operands)

    def multiply() -> None:
        a, b, out = next(turn)
        torch.mm(a, b, out=out)

    clock = Clock(at)
    (timing,) = clock.measure(multiply, repeats=repeats, limit=limit)
    # The median of up to three claims.
    claimed = sorted(
        clock.claimed(multiply) for _ in range(min(3, len(timing.readings)))
    )
    return replace(
        product,
        seconds=timing.median,
        least=timing.least,
        most=timing.most,
        readings=len(timing.readings),
        claimed=claimed[len(claimed) // 2],
    )
