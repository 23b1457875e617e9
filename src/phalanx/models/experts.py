"""Experts in place of a block's MLP: a router sends each token through the few that it scores highest.

Nothing is dropped: an expert takes as many tokens as come to it, also none. Scores are computed in
float32 or wider. Not here: which rank has which expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels import HALVES


class _Counted(torch.autograd.Function):
    """The gates as they are. In backward, which runs once for each microbatch however often its
    forward does, the bias gets as its gradient how far each expert is above the mean of all."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, bias: Tensor, excess: Tensor) -> Tensor:
        ctx.save_for_backward(excess)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (excess,) = ctx.saved_tensors
        return gradient, excess, None


class _Beside(torch.autograd.Function):
    """The gates as they are. In backward `share` of a loss is added to the loss that came."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, loss: Tensor, share: Tensor) -> Tensor:
        ctx.share = share  # not saved: it is known only when all ranks have counted their tokens
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.share.view(()).to(gradient.dtype), None


@dataclass(frozen=True)
class RouterLosses:
    """Factors of a router's losses: of each sequence, of the batch, of the scores' size."""

    sequence: float = 0.0
    batch: float = 0.0
    z: float = 0.0


class Router(nn.Module):
    """Which experts a token goes through, and by what its results are multiplied.

    With `balanced` a bias is added to the scores for this choice alone (Wang et al. 2024). Its gradient
    is experts x its expert's tokens - all choices, whole numbers: below zero where an expert has fewer
    than the mean. An update moves it by a fixed rate against the sign of that.

    Its losses are added in the backward: with f how often each expert was chosen for a token and p the
    mean of its score, experts x sum f p (Fedus et al. 2021) of each sequence or the batch, and the square
    of the scores' log-sum-exp (Zoph et al. 2022). f is of all their tokens: `of_sequences` and `of_batch`
    make it so where ranks have parts.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scores: str,
        normalized: bool,
        scale: float,
        balanced: bool,
        groups: tuple[int, int] = (1, 1),
        losses: RouterLosses | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.scores, self.normalized, self.scale = top_k, scores, normalized, scale
        self.groups, self.top_groups = groups
        self.losses = losses or RouterLosses()
        self.of_sequences: Callable[[Tensor], Tensor] = lambda counts: counts
        self.of_batch = self.of_sequences
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bias = nn.Parameter(torch.empty(experts)) if balanced else None

    def forward(
        self, x: Tensor, valid: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gates and experts, each (B, T, top_k), of x (B, T, hidden). Tokens that are not `valid`
        (B, T) pad; they are sent like others and not counted. `share` (one number, read in the
        backward) is what a token is of all tokens of the step; without it there are no losses."""
        logits = self.logits(x)
        scores = self.scored(logits)
        chosen = self.ranked(scores).topk(self.top_k, -1).indices
        gates = scores.gather(-1, chosen)
        if self.normalized:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates * self.scale if self.scale != 1 else gates
        adds = share is not None and self.losses != RouterLosses()
        if not torch.is_grad_enabled() or (self.bias is None and not adds):
            return gates, chosen
        sent = torch.ones_like(gates) if valid is None else valid.unsqueeze(-1).expand_as(gates)
        sent = sent.to(gates.dtype)
        each = sent.new_zeros(len(x), len(self.weight))  # of each sequence
        each.scatter_add_(1, chosen.flatten(1), sent.flatten(1))
        if adds:
            loss = self._loss(logits, scores, each, sent[..., 0])
            gates = _Beside.apply(gates, loss, share)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return gates, chosen
        counts = each.sum(0)
        excess = (counts * len(counts) - sent.sum()).to(torch.float32)
        counted: Tensor = _Counted.apply(gates, self.bias, excess)  # type: ignore[no-untyped-call]
        return counted, chosen

    def _loss(self, logits: Tensor, scores: Tensor, counts: Tensor, sent: Tensor) -> Tensor:
        """The losses times all tokens of the step: what these tokens (B, T) give to that."""
        by, count = self.losses, len(self.weight)

        def chosen(counts: Tensor) -> Tensor:  # how often for a token; together top_k
            return self.top_k * counts / counts.sum(-1, keepdim=True)

        f = counts.new_zeros(1, count)
        if by.sequence:
            f = f + by.sequence * chosen(self.of_sequences(counts.clone()))
        if by.batch:
            f = f + by.batch * chosen(self.of_batch(counts.sum(0, keepdim=True)))
        p = scores / scores.sum(-1, keepdim=True) if self.scores == "sigmoid" else scores
        each = count * (p * f.unsqueeze(1)).sum(-1)
        if by.z:
            each = each + by.z * logits.logsumexp(-1).square()
        return (each * sent).sum()

    def logits(self, x: Tensor) -> Tensor:
        """What each token's scores are made of."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))

    def scored(self, logits: Tensor) -> Tensor:
        """Each token's score for each expert."""
        return logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()

    def ranked(self, scores: Tensor) -> Tensor:
        """What the choice goes by, without gradients. Of groups of experts those are left whose two best
        have the highest sum (DeepSeek-V3 2024, 2.1.2)."""
        ranked = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        if self.groups == 1:
            return ranked.detach()
        grouped = ranked.detach().view(*ranked.shape[:-1], self.groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(self.top_groups, -1).indices
        left = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        return grouped.masked_fill(~left.unsqueeze(-1), -math.inf).view(scores.shape)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Spread(nn.Module):
    """Tokens as often as experts were chosen for them, sorted by expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts  # in the uncut model

    def forward(
        self, x: Tensor, gates: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens (n, hidden), gates, from where each comes (n), and how many for each expert."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, and within one by token
        counts = flat.new_zeros(self.experts)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        tokens = x.flatten(0, 1).index_select(0, order // chosen.shape[-1])
        return tokens, gates, order, counts


class Merge(nn.Module):
    """What the experts made of each token, back in the tokens' order, times its gates."""

    def forward(self, y: Tensor, gates: Tensor, order: Tensor) -> Tensor:
        each = y.index_select(0, _inverse(order)).view(*gates.shape, -1)
        return (each * gates.unsqueeze(-1)).sum(-2).to(y.dtype)


class ExpertMlps(nn.Module):
    """The experts, each a gated MLP: down(silu(gate(x)) * up(x)). Weights are (experts, out, in)."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.spread, self.merge = Spread(experts), Merge()
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))

    def forward(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """x (B, T, hidden); gates and chosen (B, T, top_k)."""
        tokens, gates, order, counts = self.spread(x, gates, chosen)
        y: Tensor = self.merge(self.on_sorted(tokens, counts), gates, order)
        return y

    def on_runs(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each expert on its tokens, of which several senders have sent a run each, sorted by expert:
        `counts` (senders, experts). Results are in the order of the tokens."""
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
        runs = expert.repeat_interleave(counts.flatten(), output_size=len(tokens))
        order = runs.argsort(stable=True)
        y = self.on_sorted(tokens.index_select(0, order), counts.sum(0))
        return y.index_select(0, _inverse(order))

    def on_sorted(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each expert on its run of the tokens (n, hidden): `counts` (experts) are their lengths."""
        if tokens.is_meta:
            return self._as_if_even(tokens)
        widths = self.up.shape[1:]
        if tokens.is_cuda and tokens.dtype in HALVES and not any(n % 8 for n in widths):
            return self.grouped(tokens, counts)
        # Unbound at once: the gradient of `weight[e]` would be of the size of all experts.
        weights = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        runs = torch.split(tokens, counts.tolist())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(run, gate)) * F.linear(run, up), down)
                for run, (gate, up, down) in zip(runs, weights, strict=True)
            ]
        )

    def grouped(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The same in three kernels, which read the lengths on the device."""
        offsets = counts.cumsum(0).to(torch.int32)
        wide = F.silu(F.grouped_mm(tokens, self.gate.mT, offs=offsets))
        wide = wide * F.grouped_mm(tokens, self.up.mT, offs=offsets)
        return F.grouped_mm(wide, self.down.mT, offs=offsets)

    def _as_if_even(self, tokens: Tensor) -> Tensor:
        """Without numbers nobody knows who goes where: as many tokens for each expert."""
        each = -(-len(tokens) // len(self.up))
        padded = F.pad(tokens, (0, 0, 0, each * len(self.up) - len(tokens)))
        runs = padded.view(len(self.up), each, -1)
        y: Tensor = (F.silu(runs @ self.gate.mT) * (runs @ self.up.mT)) @ self.down.mT
        return y.flatten(0, 1)[: len(tokens)]


class Experts(nn.Module):
    """Routed experts, and beside them `shared`, through which all tokens go."""

    def __init__(self, router: Router, routed: ExpertMlps, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.routed, self.shared = router, routed, shared

    def forward(
        self, x: Tensor, valid: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        gates, chosen = self.router(x, valid, share)
        y: Tensor = self.routed(x, gates, chosen)
        return y if self.shared is None else y + self.shared(x)

    def sent(
        self, x: Tensor, valid: Tensor | None = None, share: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What comes before the experts, where other ranks have them: tokens to send, how many for
        each expert, what puts results together again, and what the shared experts make of x."""
        gates, chosen = self.router(x, valid, share)
        tokens, gates, order, counts = self.routed.spread(x, gates, chosen)
        beside = {} if self.shared is None else {"shared": self.shared(x)}
        return {"sent": tokens, "counts": counts, "gates": gates, "order": order, **beside}
