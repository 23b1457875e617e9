"""Experts whose matmuls are split into equal parts: tensor parallelism of `exact`.

With `exact:4`, the matmuls of every expert run four times, each time with a quarter of
its features. The partial results of each token are added in the tree before experts'
results are merged, so everything outside the matmuls is computed as without tp. A
router sees all features of a token but, with `seq`, only some tokens. It therefore runs
on equal chunks of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import ExpertProducts
from ..models.experts import ExpertWeights, Routed
from .parts import OverTime, Run, add_in_tree, join_time, parts_of, spread


class _PartProduct(torch.autograd.Function):
    """A product with a part of an expert's weight, a view with other strides."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Save the view, not the copy: the weights may be dropped before the backward.
        ctx.save_for_backward(x, weight)
        # The copy has the same strides on every rank.
        return F.linear(x, weight.contiguous(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into_x, into_weight, into_bias = ctx.needs_input_grad
        return (
            gradient @ weight.contiguous() if into_x else None,
            gradient.mT @ x if into_weight else None,
            gradient.sum(0) if into_bias else None,
        )


def _part_product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    y: Tensor = _PartProduct.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class ExpertsInParts:
    """The products of experts in `count` equal parts of their features.

    `fork` and `join` are the regions at their input and their output. The bias of the
    last product is added to the whole sum.
    """

    def __init__(
        self, experts: ExpertProducts, count: int, fork: Run, join: Run
    ) -> None:
        self.experts, self.count = experts, count
        self.fork, self.join = fork, join

    def install(self) -> None:
        """Make the experts compute in parts."""
        module: Any = self.experts
        module.on_own, module.on_runs = self.on_own, self.on_runs
        # Parts of stacked weights have other strides on other ranks.
        module.product, module.grouped_kernels = _part_product, False

    def on_own(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Apply experts to this rank's own tokens, sorted by expert."""
        return self.on_runs(tokens, counts.unsqueeze(0))

    def on_runs(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Apply experts to runs of tokens: see `ExpertProducts.on_runs`."""
        experts = self.experts
        numbers: Sequence[int | None] = range(len(counts))
        if experts.weight_of_run is None:
            numbers = [None]
        weights = [experts.weights(number) for number in numbers]
        by_run = [self._cut(own) for own in weights]
        # If a rank gets no tokens, the ranks that share its experts by tp get none.
        sends = tokens.numel() > 0
        inputs = spread(self.fork(tokens) if sends else tokens, self.count)
        found: list[Tensor] = []
        for part, x in enumerate(inputs):
            own = [parts[part] for parts in by_run]
            found.append(experts.on_each(x, counts, own))
        y = add_in_tree(found)
        biases = [own.down_bias for own in weights]
        return _plus_biases(self.join(y) if sends else y, counts, biases)

    def _cut(self, weights: ExpertWeights) -> list[ExpertWeights]:
        """The weights of each part, without the bias behind the sum."""
        dims = {"down": 2, "down_bias": None}
        by_name: dict[str, Sequence[Tensor | None]] = {}
        for name, weight in weights._asdict().items():
            dim = dims.get(name, 1)
            if weight is None or dim is None:
                by_name[name] = [None] * self.count
            else:
                by_name[name] = weight.chunk(self.count, dim)
        parts = zip(*by_name.values(), strict=True)
        return [ExpertWeights(*part) for part in parts]


def _plus_biases(
    y: Tensor, counts: Tensor, biases: Sequence[Tensor | None]
) -> Tensor:
    """Add its expert's bias to each row of y (n, hidden), by run and expert."""
    every = [bias for bias in biases if bias is not None]
    each: list[Tensor] = [row for bias in every for row in bias.unbind()]
    if not each:
        return y
    if y.is_meta:
        return y + each[0]  # meta tensors have no counts
    rows = torch.split(y, counts.flatten().tolist())
    both = zip(rows, each, strict=True)
    return torch.cat([row + bias for row, bias in both])


class RouterOverTime(OverTime):
    """The forward of a router on equal chunks of the sequence."""

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """Route x (B, T, hidden); args: the marks of valid tokens (B, T), if any."""
        columns = [parts_of(each, self.count) for each in (x, *args)]
        found: list[Routed] = self.each([*zip(*columns, strict=True)])
        return Routed(
            join_time([each.gates for each in found]),
            torch.cat([each.chosen for each in found], 1),
            join_terms([each.terms for each in found]),
        )


def join_terms(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The terms of a router's losses over all parts of time.

    Counts are whole numbers, and the other terms have the same gradient for each part.
    So the order of these sums does not matter.
    """
    first, *others = parts
    terms = dict(first)
    for each in others:
        terms = {name: terms[name] + term for name, term in each.items()}
    return terms
