"""Direct Preference Optimization (Rafailov et al. 2023): a loss of pairs of answers.

A pair is two answers to one prompt, one of them preferred. A row of the batch is a
pair: the chosen document, then the rejected one, separated by masks. L is the
log-probability of a document's answer under the model, R the same under the reference
model, which is the model before its first step. The loss of a pair (their equation 7)
is

    -log sigmoid(beta ((L_chosen - R_chosen) - (L_rejected - R_rejected)))

So a pair needs two numbers. Its margin L_chosen - L_rejected is a sum over its tokens
with signs. The reference's margin is in the batch. Over cp a pair's tokens are on
several ranks, which sum their margins before the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm import Group
from ..layout import LayoutError
from ..models.ends import Head, LossHead
from ..models.loss import EVERY_WORD, token_losses
from .model import Model
from .own_loss import METRICS, Measure

# Entries of a batch: one number for each token, 0 where it does not apply.
SIGNS = "signs"  # 1 in a chosen document, -1 in a rejected one
PAIR = "pair"  # at the first token of a row: the number of its pair, counted from 1
REFERENCE = (
    "reference"  # at the first token of a row: the reference model's margin
)


def count_pairs(batch: Mapping[str, Tensor]) -> Tensor:
    """The number of pairs in a batch, which divides the loss."""
    return (batch[PAIR] > 0).sum()


# accuracy: the share of pairs whose chosen answer gained on the rejected one; margin:
# by how much, times beta
BY_PAIRS = Measure(count_pairs, ("accuracy", "margin"))


class _PairLoss(torch.autograd.Function):
    """The summed loss of rows, from this rank's parts of their margins.

    Every rank of cp computes the losses of whole rows. It counts 1 / cp of them, and
    passes the whole gradient to its own tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, margins: Tensor, pair: Tensor, beta: float, parts: int
    ) -> Tensor:
        ctx.save_for_backward(margins, pair)
        ctx.beta = beta
        losses = torch.where(pair > 0, -F.logsigmoid(beta * margins), 0.0)
        return losses.sum() / parts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        margins, pair = ctx.saved_tensors
        # d/dm of -log sigmoid(beta m) is -beta sigmoid(-beta m).
        slope = -ctx.beta * torch.sigmoid(-ctx.beta * margins)
        return gradient * torch.where(pair > 0, slope, 0.0), None, None, None


class _SumOfParts(torch.autograd.Function):
    """A sum over ranks of cp, each of which has a part of the terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Sequence[Group]) -> Tensor:
        total = x.clone()
        # All-reduce over the ring, then over ulysses: together that is all of cp.
        for group in groups:
            group.all_reduce(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Alike on all ranks of cp, and each has its own terms.
        return (
            gradient,
            None,
        )


class PreferenceLoss(nn.Module):
    """The loss of a batch of pairs, and the sums of its metrics.

    `seen` gets the numbers and margins of the pairs of each call, if it is a list.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta
        self.words = EVERY_WORD  # under tp, this rank's part of the vocabulary
        # Ranks with other tokens of the same rows.
        self.time: tuple[Group, ...] = ()
        self.seen: list[tuple[Tensor, Tensor]] | None = None

    def shard_time(self, groups: Sequence[Group]) -> None:
        """Take some of a row's tokens; the ranks of these groups have the others."""
        self.time = tuple(group for group in groups if group.size > 1)

    def forward(
        self, logits: Tensor, targets: Tensor, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        losses = token_losses(logits, targets, self.words)  # (B T,)
        # (B, T): signed log-probs
        each = losses.view(targets.shape) * -batch[SIGNS]
        # Nonzero at one token of a row, which any rank of cp may hold.
        number = batch[PAIR].sum(1).to(each.dtype)
        # (3, B): the margins, the reference's, and the numbers of the pairs
        rows = torch.stack(
            (each.sum(1), batch[REFERENCE].sum(1).to(each), number)
        )
        if self.time:
            rows = _SumOfParts.apply(rows, self.time)  # type: ignore[no-untyped-call]
        own, reference, pair = rows
        if self.seen is not None:
            self.seen.append((pair.detach().round().long(), own.detach()))
        margins = own - reference.detach()
        # Each cp rank returns the same sums, so it counts a part of them.
        parts = 1
        for group in self.time:
            parts *= group.size
        loss: Tensor = _PairLoss.apply(
            margins, pair.detach(), self.beta, parts
        )  # type: ignore[no-untyped-call]
        there = pair.detach() > 0
        gained = margins.detach() * there
        sums = torch.stack(((gained > 0).sum(), self.beta * gained.sum()))
        return loss, sums.double() / parts


class PreferenceHead(LossHead):
    """A decoder's head with the loss of pairs."""

    by_chunks = "output"
    uncompiled = True  # how many losses count depends on the values of a batch
    loss: PreferenceLoss  # type: ignore[assignment]

    def forward(
        self,
        x: Tensor,
        targets: Tensor,
        signs: Tensor,
        pair: Tensor,
        reference: Tensor,
    ) -> dict[str, Tensor]:
        batch = {SIGNS: signs, PAIR: pair, REFERENCE: reference}
        loss, metrics = self.loss(self.logits(x), targets, batch)
        return {"x": loss, METRICS: metrics}


def give_preference_loss(model: Model, beta: float) -> Model:
    """The model with the loss of pairs in its last piece."""
    name, head = model.pieces[-1]
    if type(head) is not Head:
        raise LayoutError(
            f"loss = 'dpo' is for phalanx's own decoder, and {name} of this model is a"
            f" {type(head).__name__}. Write it in a loop of your own: docs/your-own-loop.md."
        )
    own: Any = head
    own.__class__ = PreferenceHead
    head._modules["loss"] = PreferenceLoss(beta)
    return model


def preference_loss(modules: Sequence[nn.Module]) -> PreferenceLoss | None:
    """The loss of pairs among a rank's modules, if one of them has it."""
    found = (x for module in modules for x in module.modules())
    return next((x for x in found if isinstance(x, PreferenceLoss)), None)
