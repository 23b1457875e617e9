"""The loss of a vocabulary without a second matrix of logits.

Logits of 8,192 tokens over 128k words are 2 GiB in 16 bits. In float32 beside them, as softmax, and
once more as gradient they would be 14. So they are read a few rows at a time, only a number for each
token is kept, and in backward the gradient is written over the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # a target that counts nothing

# Numbers of a chunk by device: a float32 copy that stays in a CPU's cache, or keeps a GPU busy.
NUMBERS, LARGE = {"cpu": 1 << 20}, 1 << 25

Agree = Callable[[Tensor, str], object]


def _chunks(logits: Tensor, width: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows at a time of the logits (tokens, words), and of tensors with a number for each."""
    count = max(1, NUMBERS.get(logits.device.type, LARGE) // max(1, width))
    for start in range(0, logits.shape[0], count):
        yield tuple(x[start : start + count] for x in (logits[:, :width], *rows))


class _TokenLoss(torch.autograd.Function):
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
        mine = (targets >= first) & (targets < first + width)  # (tokens,)
        at = torch.where(mine, targets - first, 0).unsqueeze(-1)
        chosen = torch.zeros_like(targets, dtype=wide)  # each target's logit
        total = torch.full_like(chosen, -math.inf)  # log of the sum of exp of each row
        if width:
            chosen.copy_(logits.gather(-1, at).squeeze(-1)).mul_(mine)
            for x, out in _chunks(logits, width, total):
                torch.logsumexp(x.to(wide), -1, out=out)
        if agree is not None:
            most = total.clone()
            agree(most, "max")
            sums = torch.stack(((total - most).exp_(), chosen))
            agree(sums, "sum")
            total, chosen = most.add_(sums[0].log()), sums[1]
        valid = targets != IGNORED
        ctx.save_for_backward(logits, total, at, mine & valid, valid)
        ctx.width, ctx.z = width, z
        losses = total - chosen
        if z:
            losses += z * total.square()
        return torch.where(valid, losses, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, at, mine, valid = ctx.saved_tensors
        into = logits.detach()  # if anything else saved them, the version check names it
        into[:, ctx.width :] = 0.0
        if ctx.width:
            for x, log, index, here, counts in _chunks(into, ctx.width, total, at, mine, valid):
                shares = x.to(log.dtype, copy=True).sub_(log.unsqueeze(-1)).exp_()
                if ctx.z:  # the shares are the gradient of `log`, too
                    shares.mul_(1.0 + 2.0 * ctx.z * log.unsqueeze(-1))
                shares.scatter_add_(-1, index, -here.to(log.dtype).unsqueeze(-1))
                x.copy_(shares.mul_((gradient * counts).unsqueeze(-1)))
        return into, None, None, None, None, None


def token_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int = 0,
    width: int | None = None,
    agree: Agree | None = None,
    z: float = 0.0,
) -> Tensor:
    """The sum of the tokens' cross-entropies, in float32 or wider. Backward overwrites the logits.

    With `z` each token adds z log(Z)^2, where Z is the sum of exp of its logits: PaLM's z-loss.

    Logits are (..., words). Where the words are cut, this rank has `width` of them from `first`, any
    further columns are padding, and `agree` all-reduces a tensor in place ("max" or "sum").
    """
    width = logits.shape[-1] if width is None else width
    loss: Tensor = _TokenLoss.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), targets.flatten(), first, width, agree, z
    )
    return loss


class CrossEntropy(nn.Module):
    """The sum of the tokens' cross-entropies, in float32 or wider; targets of -100 count nothing."""

    z = 0.0  # see `token_loss`

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_loss(logits, targets, z=self.z)
