"""Expert parallelism: ranks of `ep` have other sequences and share the experts.

Each token is sent to the ranks that have its experts, and what these make of it comes back. How many go
where is data: ranks tell one another first, then exchange as many, and an expert may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm import Group
from ..layout import Layout
from ..layout.rules import Cut
from ..models import ExpertMlps, Router
from .groups import Groups
from .model import Model

Compute = Callable[[Tensor, Tensor], Tensor]


def install_experts(model: Model, layout: Layout, group: Group) -> None:
    """Give each rank's experts the tokens of all ranks of ep that are theirs."""
    for _, piece in model.pieces if layout.ep > 1 else ():
        for module in piece.modules():
            if isinstance(module, ExpertMlps):
                each = Cut.of(module.experts, group.size, 0).length
                own: Any = module
                own.on_sorted = partial(on_ranks, module.on_sorted, group, each)


def install_losses(model: Model, layout: Layout, groups: Groups) -> None:
    """Routers' losses go by the tokens of whole sequences, or of the whole batch: counts are summed."""
    over_tp = (groups.tp,) if layout.seq else ()  # else its ranks see the same tokens
    for _, piece in model.pieces:
        for module in piece.modules():
            if isinstance(module, Router):
                module.of_sequences = partial(_summed, (groups.ring, groups.ulysses, *over_tp))
                module.of_batch = partial(_summed, (groups.count, *over_tp))


def _summed(groups: Sequence[Group], counts: Tensor) -> Tensor:
    for group in groups:
        if group.size > 1:
            group.all_reduce(counts)
    return counts


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, whose gradients go back the way they came."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sends: Sequence[int], takes: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.sends, ctx.takes = group, sends, takes
        return _all_to_all(x, group, sends, takes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.group, ctx.takes, ctx.sends), None, None, None


def _all_to_all(x: Tensor, group: Group, sends: Sequence[int], takes: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(takes), *x.shape[1:])
    group.all_to_all(out, x.contiguous(), takes, sends)
    return out


def exchange(x: Tensor, group: Group, sends: Sequence[int], takes: Sequence[int]) -> Tensor:
    """`x` cut into runs of rows, run j sent to rank j; the runs that came, in the ranks' order."""
    y: Tensor = _Exchange.apply(x, group, sends, takes)  # type: ignore[no-untyped-call]
    return y


def on_ranks(compute: Compute, group: Group, each: int, tokens: Tensor, counts: Tensor) -> Tensor:
    """What all experts make of this rank's tokens (n, hidden), sorted by expert: `counts` (experts).
    A rank has `each` of the experts, the last one maybe fewer."""
    if tokens.is_meta:  # nobody knows who goes where: as many to each rank
        even = [
            len(tokens) // group.size + (r < len(tokens) % group.size) for r in range(group.size)
        ]
        here = [even[group.rank]] * group.size
        return exchange(compute(exchange(tokens, group, even, here), counts), group, here, even)
    ours = F.pad(counts, (0, each * group.size - len(counts))).view(group.size, each)
    theirs = torch.empty_like(ours)  # from each rank, how many for each expert of this one
    group.all_to_all(theirs, ours)
    sends, takes = ours.sum(1).tolist(), theirs.sum(1).tolist()
    came = exchange(tokens, group, sends, takes)
    expert = torch.arange(each, device=came.device).repeat(group.size)
    order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
    y = compute(came.index_select(0, order), theirs.sum(0))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=y.device))
    return exchange(y.index_select(0, back), group, takes, sends)
