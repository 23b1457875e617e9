"""Matmuls with blocks' weights in 8 bits: fp8, fp8:tile and mxfp8 of a layout.

Both factors of a matmul are rounded to an 8-bit float. Elements along the sum share
scales: all of them (fp8), 128 (fp8:tile, and 128 x 128 of a weight) or 32 (mxfp8). A
linear has three matmuls that sum over different dims, so each tensor is rounded twice.
Sums are in float32. Weights, their gradients and messages keep their precision.

If a sum is over tokens, as for a weight's gradient, no scale extends past one sequence.
So scales do not depend on the number of sequences that a rank holds, and dp, ZeRO, pp,
accumulation and recomputation give the results of one process. tp and cp shard sums,
and each rank has scales of its own part.

On a GPU the matmuls are `scaled_mm`'s. Elsewhere the same rounded values are multiplied
in float32, or in float64 if the model is in float64.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layout import LayoutError
from ..layout.choices import EXPONENT, MATMULS, MatmulTraits
from .products import Matmul, Narrow

_EXPONENT: torch.dtype = getattr(torch, EXPONENT)
_LEAST = 1e-12  # replaces a maximum of zero, as in torchao


class Rounded(NamedTuple):
    """A matrix in 8 bits whose last dim is summed over, or one for each sequence.

    Zeros pad k to whole runs.
    """

    numbers: Tensor  # (..., m, k)
    # (..., m, k / run), or of square tiles (m / run, k / run); values = numbers *
    # scales
    scales: Tensor
    run: int
    square: bool

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The values that the matmul uses: rounded numbers times their scales."""
        scales = self.of_rows().to(dtype)
        # Each scale stands for `run` elements: (..., m, k / run) to (..., m, k).
        if self.run < self.numbers.shape[-1]:
            scales = (
                scales.unsqueeze(-1)
                .expand(*scales.shape, self.run)
                .flatten(-2)
            )
        return self.numbers.to(dtype) * scales

    def of_rows(self) -> Tensor:
        """The scales of each row (..., m, k / run)."""
        if not self.square:
            return self.scales
        return self.scales.repeat_interleave(self.run, 0)[: len(self.numbers)]


def rounded(
    x: Tensor,
    form: str,
    *,
    run: int = 0,
    square: bool = False,
    power: bool = False,
    largest: Tensor | None = None,
) -> Rounded:
    """Round x (..., m, k) to an 8-bit `form`, with a scale for `run` elements of k.

    The scale is torchao's: the format's maximum over the maximum of these elements, in
    float32. With `power` the scale brings the maximum into the format's last binade
    (OCP Microscaling Formats 1.0, 6.3). `largest` gives the maxima if x is only a part
    of the elements that share a scale.
    """
    dtype = getattr(torch, form)
    most, run = torch.finfo(dtype).max, run or max(x.shape[-1], 1)
    parts = _in_runs(x, run)  # (..., m, k / run, run)
    largest = largest_of(x, run, square=square) if largest is None else largest
    factor, scales = _scales(largest, most, power)
    # factor: one for each run of each row, as `parts` has them
    if square:
        factor = factor.repeat_interleave(run, 0)[: len(x)]
    # To float32 first: rounding float64 straight to the format would give other values.
    numbers = (
        (parts * factor.unsqueeze(-1)).float().clamp(-most, most).to(dtype)
    )
    # Keep the padding of the last run: without it a torch.compile kernel computes other
    # values (2.13, CPU).
    return Rounded(numbers.flatten(-2), scales, run, square)


def _scales(
    largest: Tensor, most: float, power: bool
) -> tuple[Tensor, Tensor]:
    """Factors that multiply the values before rounding, and those that restore them."""
    if power:
        bits = largest.float().view(torch.int32) >> 23
        # frexp's exponent is floor(log2(most)) + 1.
        stored = torch.where(
            bits < 255, (bits - math.frexp(most)[1] + 1).clamp(min=0), 255
        )
        # The reciprocal of the scale 2^(stored - 127), by its exponent bits
        factor = ((254 - stored) << 23).view(torch.float32)
        return factor, stored.to(torch.uint8).view(_EXPONENT)
    # Divided in float64 and rounded once.
    factor = (most / largest.double().clamp(min=_LEAST)).float()
    return factor, factor.reciprocal()


def _in_runs(x: Tensor, run: int) -> Tensor:
    """Reshape x (..., m, k) to (..., m, k / run, run), padded."""
    k = x.shape[-1]
    padded = F.pad(x, (0, -k % run)) if k % run else x
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // run, run)


def largest_of(x: Tensor, run: int, *, square: bool) -> Tensor:
    """The largest magnitudes of x (..., m, k) that share a scale.

    (..., m, k / run), or (m / run, k / run) for square tiles.
    """
    largest = _in_runs(x, run).abs().amax(-1)
    if not square:
        return largest
    m = len(largest)
    return (
        # (m, k / run) to (m / run, run, k / run), of which the middle is reduced
        F.pad(largest, (0, 0, 0, -m % run)).view(-(-m // run), run, -1).amax(1)
    )


def product(a: Rounded, b: Rounded, out: torch.dtype) -> Tensor:
    """a (m, k) times b (n, k) transposed, summed over sequences if there are several."""
    if a.numbers.is_meta:  # costed as one matmul, for the device's kernels
        k = a.numbers[..., 0, :].numel()
        one = a.numbers.new_empty((), dtype=out)
        return one.expand(a.numbers.shape[-2], k) @ one.expand(
            k, b.numbers.shape[-2]
        )
    if a.numbers.is_cuda and out != torch.float64 and _takes(a, b):
        return _on_device(a, b, out)
    # (m, sequences * k): one matmul sums over all sequences
    x, y = (
        z.restored(torch.promote_types(out, torch.float32))
        .movedim(-2, 0)
        .flatten(1)
        for z in (a, b)
    )
    return (x @ y.mT).to(out)


class EightBits:
    """The fp8 matmul named by a word of `MATMULS`."""

    def __init__(self, traits: MatmulTraits) -> None:
        self.traits = traits
        self.shared: dict[str, Any] = {
            "run": traits.run,
            "power": traits.power,
        }

    @property
    def one_copy(self) -> bool:
        """True if one fp8 copy of a weight serves its matmul and the input's gradient.

        Square tiles allow that.
        """
        return self.traits.square

    def forward(self, x: Tensor, weight: Tensor | Narrow) -> Tensor:
        # x: (tokens, in), weight: (out, in); the sum is over in
        a = rounded(x.flatten(0, -2), self.traits.forward, **self.shared)
        y = product(a, self._weight(weight), x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    def input_gradient(
        self, gradient: Tensor, weight: Tensor | Narrow
    ) -> Tensor:
        # gradient: (tokens, out), weight.mT: (in, out); the sum is over out
        a = rounded(
            gradient.flatten(0, -2), self.traits.gradient, **self.shared
        )
        y = product(a, self._weight(weight.mT), gradient.dtype)
        return y.view(*gradient.shape[:-1], y.shape[-1])

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        a, b = (
            # (sequences, features, tokens): scales run along the tokens of one sequence
            rounded(
                z.flatten(0, -3).mT if z.dim() > 2 else z.mT,
                form,
                **self.shared,
            )
            for z, form in (
                (gradient, self.traits.gradient),
                (x, self.traits.forward),
            )
        )
        return product(a, b, torch.promote_types(x.dtype, torch.float32))

    def _weight(self, weight: Tensor | Narrow) -> Rounded:
        if isinstance(weight, Narrow):
            (numbers, scales), run = weight, self.traits.run
            # Complete the last run with zeros, which change no sum.
            if short := -numbers.shape[-1] % run:
                numbers = F.pad(numbers.view(torch.uint8), (0, short)).view(
                    numbers.dtype
                )
            return Rounded(numbers, scales, run, self.traits.square)
        return self.narrowed(weight)

    def narrowed(
        self, weight: Tensor, largest: Tensor | None = None
    ) -> Rounded:
        """Round a weight, or rows of it, with its tiles' `largest` magnitudes."""
        square = self.traits.square
        return rounded(
            weight,
            self.traits.forward,
            square=square,
            largest=largest,
            **self.shared,
        )

    def scales(self, largest: Tensor) -> Tensor:
        """The scales of a weight from the largest magnitudes of its runs."""
        most = torch.finfo(getattr(torch, self.traits.forward)).max
        return _scales(largest, most, self.traits.power)[1]


class _OfExpert(torch.autograd.Function):
    """A matmul with the tokens of one expert.

    The layout decides which of these tokens are on one rank, and in which order. So the
    weight's gradient, a sum over them, keeps the layout's precision.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matmul: Matmul) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.matmul = matmul
        return matmul.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight = gradient.mT @ x if ctx.needs_input_grad[1] else None
        return ctx.matmul.input_gradient(gradient, weight), of_weight, None


def of_expert(
    matmul: Matmul, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The fp8 matmul of an expert's tokens x (n, in); n may be 0."""
    y: Tensor = _OfExpert.apply(x, weight, matmul)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


@cache
def matmul_named(word: str) -> Matmul | None:
    """The matmul for the weights of blocks that a layout's word names, or None."""
    return EightBits(MATMULS[word]) if word else None


# ---- GPUs


def refuse_without_kernels(word: str, device: torch.device) -> None:
    """Raise a LayoutError if a GPU lacks the kernels for these matmuls."""
    if not word or device.type != "cuda":
        return
    has = torch.cuda.get_device_capability(device)
    traits = MATMULS[word]
    # mxfp8 is Blackwell's, fp8:tile Hopper's, and plain fp8 came with Ada.
    fits = (
        has >= (10, 0)
        if traits.power
        else has == (9, 0)
        if traits.square
        else has >= (8, 9)
    )
    if not fits:
        least = (
            "10.0"
            if traits.power
            else "9.0, and no other,"
            if traits.square
            else "8.9"
        )
        raise LayoutError(
            f"{word} needs a GPU of compute capability {least}, and"
            f" {torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}. Leave {word} out of the"
            " layout, or use another of " + ", ".join(MATMULS) + "."
        )


def _takes(a: Rounded, b: Rounded) -> bool:
    """True if the fp8 kernels accept matrices of these sizes."""
    k, n = a.numbers.shape[-1], b.numbers.shape[-2]
    m = a.numbers.shape[-2]
    return (
        m > 0
        and k > 0
        and k % 16 == 0
        and n % (b.run if _in_squares(b) else 16) == 0
    )


def _on_device(a: Rounded, b: Rounded, out: torch.dtype) -> Tensor:
    """Multiply with `scaled_mm`, which returns bfloat16; one call for each sequence."""
    # Several sequences have scales of their own, so each is a matmul, summed in `out`.
    if a.numbers.dim() > 2:
        y = a.numbers.new_zeros(
            a.numbers.shape[-2], b.numbers.shape[-2], dtype=out
        )
        for n in range(len(a.numbers)):
            one, other = (
                z._replace(numbers=z.numbers[n], scales=z.scales[n])
                for z in (a, b)
            )
            y += _on_device(one, other, out)
        return y
    (scale_a, recipe_a, swizzle), (scale_b, recipe_b, _) = (
        _recipe(z) for z in (a, b)
    )
    if recipe_b == recipe_a and scale_b.shape[1:] == (1,):  # per-row scales
        scale_b = scale_b.t()
    y = _scaled_mm(
        a.numbers.contiguous(),
        b.numbers.contiguous().t(),
        scale_a,
        recipe_a,
        scale_b,
        recipe_b,
        swizzle,
    )
    return y.to(out)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: int,
    scale_b: Tensor,
    recipe_b: int,
    swizzle: int,
) -> Tensor:
    """The operator of `F.scaled_mm`, whose own call torch 2.11 cannot compile."""
    y: Tensor = torch.ops.aten._scaled_mm_v2(
        a,
        b,
        [scale_a],
        [recipe_a],
        [swizzle],
        [scale_b],
        [recipe_b],
        [swizzle],
        None,
        torch.bfloat16,
    )
    return y


class _Recipe:
    """The integers of torch's enums for kinds of scales and their order in memory.

    In torch 2.11 a comparison of enum members breaks the compiled graph.
    """

    ROWS = F.ScalingType.RowWise.value
    RUNS = F.ScalingType.BlockWise1x128.value
    SQUARES = F.ScalingType.BlockWise128x128.value
    SHORT_RUNS = F.ScalingType.BlockWise1x32.value
    IN_ORDER = F.SwizzleType.NO_SWIZZLE.value
    IN_TILES = F.SwizzleType.SWIZZLE_32_4_4.value


def _recipe(z: Rounded) -> tuple[Tensor, int, int]:
    """Scales as `scaled_mm` expects them, the number of their kind, and of their order."""
    if z.scales.dtype == _EXPONENT:
        # Tiles of 128 x 4, in which row r is stored in line r % 32 (cuBLAS, 1D block
        # scaling).
        m, runs = z.scales.shape
        padded = F.pad(z.scales.view(torch.uint8), (0, -runs % 4, 0, -m % 128))
        tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(
            0, 3, 2, 1, 4
        )
        flat = tiles.flatten().view(_EXPONENT)
        return flat, _Recipe.SHORT_RUNS, _Recipe.IN_TILES
    if z.run == z.numbers.shape[-1]:
        return z.of_rows().contiguous(), _Recipe.ROWS, _Recipe.IN_ORDER
    if _in_squares(z):
        padded = F.pad(z.scales, (0, -z.scales.shape[1] % 4))
        return padded.contiguous().t(), _Recipe.SQUARES, _Recipe.IN_ORDER
    columns = z.of_rows().t().contiguous().t()
    return columns, _Recipe.RUNS, _Recipe.IN_ORDER


def _in_squares(z: Rounded) -> bool:
    return z.square and z.run < z.numbers.shape[-1]
