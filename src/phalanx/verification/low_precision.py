"""fp8 matmuls as one process computes them, for `verify`: linear layers of blocks in
plain torch.

Values are rounded to the formats by arithmetic, not by torch's dtypes, and values that
share a scale are handled one slice after the other.

Under tp and cp each rank has separate scales for its part of a sum. One process
reproduces them by splitting the same sums at the same places: it runs attention and
MLPs once for each tp rank (`over_ranks.py`); the gradient of a weight is a sum over cp
ranks, each with its own tokens. Only the places of these splits come from the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layout import Layout, Mesh
from ..layout.choices import MATMULS, MatmulTraits
from ..models import IGNORED, ExpertMlps, in_adapters
from ..parallel import Model
from ..parallel.batch import DOCUMENTS, VALID, held_times, time_multiple
from ..parallel.tensor import cut_of
from .over_ranks import compute_over_ranks, owners

# Of each format: bits of the fraction, the exponents of its least normal and of its
# largest number, and that number.
_FORMS = {
    "float8_e4m3fn": (3, -6, 8, 448.0),
    "float8_e5m2": (2, -14, 15, 57344.0),
}


def sums_of(layout: Layout) -> Layout:
    """Return the layout reduced to what splits the sums of matmuls."""
    # Replicas and stages split no sum with a scale: weight gradients are
    # summed sequence by sequence.
    axes = tuple(
        axis for axis in layout.mesh.axes if axis.name in ("cp", "tp")
    )
    seq, whole = (
        layout.seq and layout.tp > 1,
        tuple(x for x in layout.experts if x == "tp"),
    )
    return Layout(Mesh(axes), seq=seq, experts=whole)


def can_replay(model: Model, cuts: Layout) -> bool:
    """True if one process can split the sums of this model as the layout does."""
    if model.shape is None or model.shape.kind != "decoder":
        return False
    if cuts.tp == 1:
        # Every weight that tp cuts must lie in a module whose ranks are
        # replayed.
        return True
    whole = Layout()
    for name, block in model.pieces[1:-1]:
        inside = {p for _, owner in owners(block) for p in owner.parameters()}
        for path, parameter in block.named_parameters():
            place = f"{name}.{path}", parameter.shape
            cut = cut_of(model, cuts, *place, {}) != cut_of(
                model, whole, *place, {}
            )
            if cut and parameter not in inside:
                return False
    return True


def padded(batch: Mapping[str, Tensor], cuts: Layout) -> Mapping[str, Tensor]:
    """Return the batch padded along time as ranks pad it: padding tokens influence
    scales."""
    # To the multiple of the length that cp and seq can divide evenly.
    short = -batch["tokens"].shape[1] % time_multiple(cuts)
    if not short:
        return batch
    fills = {"targets": IGNORED, DOCUMENTS: -1}
    batch = {
        **batch,
        VALID: torch.ones_like(batch["tokens"], dtype=torch.bool),
    }
    return {
        name: F.pad(x, (0, short), value=fills.get(name, 0))
        for name, x in batch.items()
    }


@dataclass
class Rounding:
    """Rounds a matrix, whose last dimension is summed over, to an fp8 format and back.

    `cuts` is the layout that splits the sums. With a `generator` the splits are
    unknown: each sum is whole or split into equal parts at random.
    """

    traits: MatmulTraits
    cuts: Layout = Layout()
    generator: torch.Generator | None = None

    def held(self, length: int) -> list[Tensor]:
        """Return the tokens of a sequence that each cp rank holds."""
        if self.generator:
            return [torch.arange(length)]  # split at random like other sums
        ring, ulysses = (
            self.cuts.mesh.of("cp.ring"),
            self.cuts.mesh.of("cp.ulysses"),
        )
        return [
            held_times(length, ring, ulysses, rank)
            for rank in range(ring * ulysses)
        ]

    def __call__(
        self, x: Tensor, form: str, *, weight: bool = False
    ) -> Tensor:
        digits, least, last, most = _FORMS[form]
        # At least float32, as the kernels scale in it.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out = torch.zeros_like(wide)
        k = x.shape[-1]
        # A scale for `run` neighbours along the sum, or for a whole row.
        run = self.traits.run or k
        # Weights may have a scale for each square of run x run elements.
        rows = run if weight and self.traits.square else 0
        of_rows = (
            [slice(n, n + rows) for n in range(0, len(x), rows)]
            if rows
            else [slice(None)]
        )
        for column in self._runs(k, run):
            for row in of_rows:
                part = wide[row, column]
                largest = part.abs().amax((0, 1) if rows else 1, keepdim=True)
                # The scale maps the largest value of the run to the largest of
                # the format.
                scale = self._scale(largest, last, most).float()
                # Kernels multiply by the inverse, which is also a float32.
                narrow = _nearest((part * scale).float(), digits, least, most)
                out[row, column] = narrow * (1 / scale)
        return out

    def _runs(self, k: int, run: int) -> Iterator[slice]:
        """Yield the columns that share scales."""
        parts = 1
        if self.generator and torch.randint(2, (), generator=self.generator):
            # Equal parts, one for each rank that may share the sum.
            parts = min(k, self.cuts.ranks)
        ends = [k * n // parts for n in range(parts + 1)]
        for start, stop in pairwise(ends):
            yield from (
                slice(n, min(n + run, stop)) for n in range(start, stop, run)
            )

    def _scale(self, largest: Tensor, last: int, most: float) -> Tensor:
        if self.traits.power:
            # Powers of two: the exponent of the largest value moves to the
            # format's last.
            exponent = torch.frexp(largest.float())[1] - 1 - last
            return torch.ldexp(
                torch.ones(largest.shape), -exponent.clamp(min=-127)
            )
        return (most / largest.double().clamp(min=1e-12)).float()


def _nearest(x: Tensor, digits: int, least: int, most: float) -> Tensor:
    """Round to the nearest number of a format, ties to even, as multiples of its last
    digit."""
    x = x.clamp(-most, most).double()
    # The distance between neighbouring numbers at x; below the least normal it
    # stays the same.
    step = torch.ldexp(
        torch.ones_like(x), (torch.frexp(x)[1] - 1).clamp(min=least) - digits
    )
    return torch.round(x / step) * step


class RoundedLinear(torch.autograd.Function):
    """A linear layer on x (B, T, in) with the factors of each matmul rounded.

    The weight's gradient is summed sequence by sequence, and cp rank by cp rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, form = rounding, rounding.traits.forward
        # (B * T, in): rows are tokens.
        flat = rounding(x.flatten(0, -2), form)
        return _out(flat @ rounding(weight, form, weight=True).T, x).view(
            *x.shape[:-1], -1
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        of_x, of_gradient = rounding.traits.forward, rounding.traits.gradient
        # dx = dy W: summed over the features out, so both factors are scaled
        # along them.
        flat = rounding(gradient.flatten(0, -2), of_gradient)
        into = _out(flat @ rounding(weight.T, of_x, weight=True).T, x).view_as(
            x
        )
        held = rounding.held(x.shape[1])
        # dW = sum of dy' x over tokens, sequence by sequence and part by part,
        # as each has its own scales.
        each = [
            (y[own], g[own])
            for y, g in zip(x, gradient, strict=True)
            for own in held
        ]
        parts = [
            rounding(g.T, of_gradient) @ rounding(y.T, of_x).T for y, g in each
        ]
        return into, _out(sum(parts[1:], parts[0]), weight), None


class RoundedExpert(torch.autograd.Function):
    """A matmul of an expert's tokens x (n, in) with rounded factors, except for the
    weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, form = rounding, rounding.traits.forward
        return _out(
            rounding(x, form) @ rounding(weight, form, weight=True).T, x
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        # dx = dy W; the weight's own gradient is not rounded.
        turned = rounding(weight.T, rounding.traits.forward, weight=True)
        into = rounding(gradient, rounding.traits.gradient) @ turned.T
        return _out(into, x), gradient.T @ x, None


def _out(y: Tensor, like: Tensor) -> Tensor:
    return y.to(like.dtype)


def install(
    model: Model,
    word: str,
    cuts: Layout,
    generator: torch.Generator | None = None,
) -> None:
    """Make the linear layers of blocks, except adapters, multiply with rounded factors
    from now on."""
    if not word:
        return
    rounding = Rounding(MATMULS[word], cuts, generator)
    for _, block in model.pieces[1:-1]:
        # The narrow matrices of adapters keep the compute dtype.
        thin = in_adapters(block)
        for module in block.modules():
            if isinstance(module, ExpertMlps) and rounding.traits.routed:
                module.product = partial(_of_expert, rounding)
            if isinstance(module, nn.Linear) and module not in thin:
                own: Any = module
                adapted = next(module.children(), None)
                own.forward = _forward(own, rounding, adapted)
    if not generator:
        compute_over_ranks(model, cuts)


def _of_expert(
    rounding: Rounding, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    y: Tensor = RoundedExpert.apply(x, weight, rounding)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def _forward(
    linear: nn.Linear,
    rounding: Rounding,
    adapted: Callable[..., Tensor] | None,
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = RoundedLinear.apply(x, linear.weight, rounding)  # type: ignore[no-untyped-call]
        y = y if linear.bias is None else y + linear.bias
        return y if adapted is None else y + adapted(x)

    return forward
