"""Cross-entropy over the vocabulary, without a second matrix of logits.

The logits of 8,192 tokens over 128k words take 2 GiB in 16 bits. With a float32 copy,
its softmax and its gradient they would take 14 GiB. So the logits are read a few rows
at a time, forward keeps one number for each token, and backward overwrites the logits
with their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100  # targets with this value add nothing to the loss

# Elements in a chunk, by device: a float32 copy fits in a CPU's cache, or keeps a GPU
# busy.
NUMBERS, LARGE = {"cpu": 1 << 20}, 1 << 25

Agree = Callable[[Tensor, str], object]


class _Chunk(NamedTuple):
    """A chunk of tokens of the logits."""

    rows: slice
    logits: Tensor  # (tokens, width): a view
    wide: Tensor  # in float32 or wider, (tokens, width); a copy if the logits are narrower
    room: Tensor  # scratch of that size and dtype, shared by all chunks


def _chunks(logits: Tensor, width: int) -> Iterator[_Chunk]:
    """Yield chunks of tokens, with the first `width` words of each."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    numbers = NUMBERS.get(logits.device.type, LARGE)
    tokens = logits.shape[0]
    count = max(1, min(tokens, numbers // max(1, width)))
    copied = dtype != logits.dtype
    rooms = [
        torch.empty(count, width, dtype=dtype, device=logits.device)
        for _ in range(1 + copied)
    ]
    if logits.is_meta:
        # On meta only sizes count: all tokens at once, with the memory of one chunk.
        rooms = [
            room.as_strided((tokens, width), (width, 1)) for room in rooms
        ]
        count = tokens
    for start in range(0, tokens, count):
        rows = slice(start, min(start + count, tokens))
        x = logits[rows, :width]
        room, *more = (room[: rows.stop - start] for room in rooms)
        wide = more[0].copy_(x) if copied else x
        yield _Chunk(rows, x, wide, room)


class _TokenLoss(torch.autograd.Function):
    """The loss over all words.

    Softmax and its logarithm are one fused kernel each: on a CPU they take half as long
    as exp, sum and log one after the other.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z: float) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(targets.shape, dtype=wide, device=targets.device)
        totals = torch.empty_like(losses) if z else None
        for rows, _, x, room in _chunks(logits, logits.shape[1]):
            torch.log_softmax(x, -1, out=room)
            losses[rows] = F.nll_loss(
                room, targets[rows], ignore_index=IGNORED, reduction="none"
            )
            if totals is not None:
                totals[rows] = _log_sum(x, room)
        ctx.save_for_backward(logits, targets, totals)
        ctx.z = z
        if totals is not None:
            losses += torch.where(targets != IGNORED, z * totals.square(), 0.0)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, totals = ctx.saved_tensors
        # (tokens,): the gradient of each token's loss
        each = gradient * (targets != IGNORED)
        share = each
        if (
            totals is not None
        ):  # d log(sum exp) is the softmax as well, so z-loss scales it
            share = each * (1.0 + 2.0 * ctx.z * totals)
        into = _write_gradient(
            logits, logits.shape[1], targets.clamp(min=0), share, -each
        )
        return into, None, None


class _CutTokenLoss(torch.autograd.Function):
    """The loss over a sharded vocabulary: all-reduces two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        width: int,
        agree: Agree | None,
        z: float,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        mine = (targets >= first) & (
            targets < first + width
        )  # (tokens,): on this rank
        at = torch.where(
            mine, targets - first, 0
        )  # (tokens,): columns of this rank
        chosen = torch.zeros_like(targets, dtype=wide)  # each target's logit
        # (tokens,): the log-sum-exp of this rank's words
        own = torch.full_like(chosen, -math.inf)
        if width:
            chosen.copy_(logits.gather(-1, at.unsqueeze(-1)).squeeze(-1)).mul_(
                mine
            )
            for rows, _, x, room in _chunks(logits, width):
                torch.log_softmax(x, -1, out=room)
                own[rows] = _log_sum(x, room)
        total = own  # (tokens,): the log-sum-exp of all words
        # log Z = most + log(sum over ranks of exp(own - most)), which cannot overflow.
        # Both sums are stacked into one all-reduce.
        if agree is not None:
            most = own.clone()
            agree(most, "max")
            sums = torch.stack(((own - most).exp_(), chosen))  # (2, tokens)
            agree(sums, "sum")
            total, chosen = most.add_(sums[0].log()), sums[1]
        valid = targets != IGNORED
        ctx.save_for_backward(logits, own, total, at, mine & valid, valid)
        ctx.width, ctx.z = width, z
        losses = total - chosen
        if z:
            losses += z * total.square()
        return torch.where(valid, losses, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, own, total, at, mine, valid = ctx.saved_tensors
        each = gradient * valid  # (tokens,): the gradient of each token's loss
        # Weight of this rank's softmax, which sums to one over this rank's words alone.
        share = each * (own - total).exp()
        if ctx.z:
            share = share * (1.0 + 2.0 * ctx.z * total)
        # Only the rank that holds the target's column subtracts it.
        into = _write_gradient(logits, ctx.width, at, share, -each * mine)
        return into, None, None, None, None, None


def _log_sum(x: Tensor, logs: Tensor) -> Tensor:
    """The log-sum-exp of each row, where `logs` is log_softmax(x).

    Computed as the largest logit minus its log-probability, which lies between
    -log(width) and 0, so few digits are lost.
    """
    return x.amax(-1) - logs.amax(-1)


def _write_gradient(
    logits: Tensor, width: int, at: Tensor, share: Tensor, target: Tensor
) -> Tensor:
    """Overwrite the logits (tokens, words) with their gradient.

    Each token gets its `share` (tokens) of the softmax of the first `width` words, plus
    `target` (tokens) at the word `at` (tokens). The other words get zero.
    """
    # Shares storage. If anything else saved the logits, autograd's version check raises.
    into = logits.detach()
    if width < into.shape[1]:
        into[:, width:] = 0.0
    for rows, x, wide, room in _chunks(into, width) if width else ():
        # d loss / d logits = share * softmax + target * one_hot(at)
        torch.softmax(wide, -1, out=room)
        torch.mul(room, share[rows].unsqueeze(-1), out=wide)
        index = at[rows].unsqueeze(-1)
        wide.scatter_add_(-1, index, target[rows].unsqueeze(-1).to(wide.dtype))
        if wide is not x:
            x.copy_(wide)
    return into


def token_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int = 0,
    width: int | None = None,
    agree: Agree | None = None,
    z: float = 0.0,
) -> Tensor:
    """The sum of the tokens' cross-entropies: see `token_losses`."""
    terms: Any = {"first": first, "width": width, "agree": agree, "z": z}
    return token_losses(logits, targets, **terms).sum()


def token_losses(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int = 0,
    width: int | None = None,
    agree: Agree | None = None,
    z: float = 0.0,
) -> Tensor:
    """Each token's cross-entropy, flat, in float32 or wider; 0 without a target.

    With `z`, each token adds z log(Z)^2, where Z is the sum of exp of its logits:
    PaLM's z-loss.

    Logits are (..., words). If the vocabulary is sharded, this rank has `width` words
    from `first` on, any further columns are padding, and `agree` all-reduces a tensor
    in place ("max" or "sum").
    """
    words = logits.shape[-1]
    width = words if width is None else width
    given = logits.flatten(0, -2), targets.flatten()
    losses: Tensor  # (tokens,)
    if agree is None and width == words and not first:
        losses = _TokenLoss.apply(*given, z)  # type: ignore[no-untyped-call]
    else:
        losses = _CutTokenLoss.apply(*given, first, width, agree, z)  # type: ignore[no-untyped-call]
    return losses


class CrossEntropy(nn.Module):
    """The sum of tokens' cross-entropies, in float32 or wider; -100 adds nothing."""

    z = 0.0  # see `token_loss`

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_loss(logits, targets, z=self.z)
