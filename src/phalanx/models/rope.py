"""Rotary positions (Su et al. 2021) and their scaling to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused import Rotated, fuses


@dataclass(frozen=True)
class RopeScaling:
    """Scales rope's frequencies to a longer context than the first, `sequence`.

    `llama3` slows waves longer than `sequence / low` by `factor`, keeps those shorter
    than `sequence / high`, and blends in between. `yarn` (Peng et al. 2023) blends by
    the frequency's index, between integer indices if `truncated`, and multiplies cosine
    and sine by `attention`. `linear` slows all waves. `dynamic` raises theta as the
    trained length, `longest`, requires.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    sequence: int = 8192
    kind: str = "llama3"
    attention: float = 1.0
    longest: int = 0
    truncated: bool = True

    def __call__(self, theta: float, half: Tensor) -> Tensor:
        """The frequencies (head_dim / 2), for `half` = 0, 2/head_dim, 4/head_dim, ..."""
        dim = 2 * half.shape[0]
        if self.kind == "dynamic":
            grown = (
                self.factor * max(self.longest, self.sequence) / self.sequence
                - self.factor
                + 1
            )
            # NTK-aware: slows the slowest wave, theta^-((dim - 2) / dim), by `grown`.
            theta *= grown ** (dim / (dim - 2))
        frequency: Tensor = theta**-half  # (head_dim / 2)
        if self.kind == "dynamic":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "yarn":
            # The indices at which a wave turns `high` and `low` times within the
            # sequence.
            first, last = (
                dim
                * math.log(self.sequence / (turns * 2 * math.pi))
                / (2 * math.log(theta))
                for turns in (self.high, self.low)
            )
            if self.truncated:
                first, last = math.floor(first), math.ceil(last)
            start, stop = max(first, 0), min(last, dim - 1)
            # (head_dim / 2)
            index = torch.arange(
                dim // 2, device=half.device, dtype=half.dtype
            )
            # transformers has the same constant against a division by zero.
            along = (index - start) / ((stop - start) or 0.001)
            blend = 1 - along.clamp(0.0, 1.0)
        else:
            # blend: 1 keeps a frequency, 0 divides it by `factor`
            turned = self.sequence * frequency / (2 * math.pi)
            along = (turned - self.low) / (self.high - self.low)
            blend = along.clamp(0.0, 1.0)
        return frequency * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True)
class Rope:
    """The angles of rotary positions.

    They are computed from each batch's positions. A table of all positions would need a
    maximum sequence length, and would be lost on the meta device.
    """

    theta: float
    scaling: RopeScaling | None = None

    def angles(
        self, positions: Tensor, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Factors of `rotate`, each (B, T, 1, head_dim), in float32 or wider.

        The cosine of each feature's angle, and its sine, negated in the first half.
        """
        wide = torch.promote_types(dtype, torch.float32)
        device = positions.device
        return self.at(positions, self.frequencies(head_dim, device, wide))

    def frequencies(
        self, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """The frequency of each feature's wave (head_dim), negated in the first half.

        A cosine does not see the sign, and a sine takes it.
        """
        half = torch.arange(0, head_dim, 2, device=device, dtype=dtype)
        half = half / head_dim
        frequency = (
            self.scaling(self.theta, half)
            if self.scaling
            else self.theta**-half
        )
        return torch.cat((-frequency, frequency))

    def at(
        self, positions: Tensor, frequencies: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The factors of `rotate` at positions (B, T), given the `frequencies`."""
        # (B, T, 1, 1): the angles are the same for all heads
        times = positions.view(*positions.shape, 1, 1)
        angle = times.to(frequencies.dtype) * frequencies
        cos, sin = angle.cos(), angle.sin()
        if self.scaling is not None and self.scaling.attention != 1:
            cos = cos * self.scaling.attention
            sin = sin * self.scaling.attention
        return cos, sin


class SharedAngles:
    """Computes the rotary angles of all blocks from the positions of a batch.

    Called with a batch and the activations' dtype, it returns (ropes, 2, B, T, 1,
    head_dim), cosine first. Frequencies depend on no batch, so they are computed once.
    """

    def __init__(self, ropes: Sequence[Rope], head_dim: int) -> None:
        self.ropes, self.head_dim = tuple(ropes), head_dim
        # by device and dtype, of each rope
        self._known: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def __call__(self, batch: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        positions: Tensor = batch["positions"]
        # 16-bit angles would be wrong from position 256 on, so the activations' dtype
        # is only a lower bound.
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = self._frequencies(positions.device, wide)
        factors = [
            factor
            for rope, each in zip(self.ropes, frequencies, strict=True)
            for factor in rope.at(positions, each)
        ]
        stacked = torch.stack(factors)
        return stacked.view(len(self.ropes), 2, *stacked.shape[1:])

    def _frequencies(
        self, device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        if (device, dtype) not in self._known:
            self._known[device, dtype] = [
                rope.frequencies(self.head_dim, device, dtype)
                for rope in self.ropes
            ]
        return self._known[device, dtype]


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: str = "halves"
) -> Tensor:
    """Rotate `x` (B, T, heads, head_dim) by the angles whose factors `Rope.angles` returns.

    Feature i pairs with feature i + head_dim / 2 ("halves").

    Published weights in the Hugging Face format pair features this way. Meta's own and
    DeepSeek's pair `neighbours`. Those come out in halves too: queries and keys are
    permuted alike, so scores are the same.
    """
    if cos.dtype == torch.float32 and fuses(x):
        fused: Tensor = Rotated.call(x, cos, sin, pairs == "neighbours")
        return fused
    wide = x.to(cos.dtype)
    half = x.shape[-1] // 2
    if pairs == "neighbours":
        # (B, T, heads, head_dim / 2, 2) to halves
        wide = wide.reshape(*x.shape[:-1], half, 2).mT.flatten(-2)
    # Each feature times its cosine, plus its partner times the sine: (a, b) becomes
    # (a cos - b sin, b cos + a sin), in float32 or wider. Computing the halves separately
    # gives the same bits, but starts seven kernels instead of four and takes 1.3 x as
    # long.
    # Intermediate results are overwritten, which is faster than new memory.
    turned = (wide * cos).add_(wide.roll(half, -1).mul_(sin))
    return turned.to(x.dtype)
