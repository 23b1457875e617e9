"""Experts in place of a block's MLP: a router sends each token through the few that it scores highest.

Nothing is dropped: an expert takes as many tokens as come to it, also none. Scores are computed in
float32 or wider. Not here: which rank has which expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels import HALVES
from .sizes import DecoderSizes

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of x, weights and biases
LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The input of a gated MLP's last product. `clamped` is the form of gpt-oss (OpenAI 2025)."""
    if activation == "clamped":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    return (
        F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    ) * up


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


class _Share(torch.autograd.Function):
    """One of so many parts of a weight that add up to it: what comes back is the gradient of their sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        return weight / ranks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# Names of what a router gives for its losses.
CHOICES = (
    # (B, experts): how often tokens of each sequence chose each expert; no gradient
    "choices"
)
SCORED = (
    # (B, experts): sums over the tokens of each sequence of their shares of the scores
    "scored"
)
# one number: the sum over tokens of the squared log-sum-exp of their scores
SQUARED = "squared"
TERMS = (SCORED, SQUARED)  # in which the losses are linear


class Routed(NamedTuple):
    """A router's result: gates and experts, each (B, T, top_k), and what its losses are made of."""

    gates: Tensor
    chosen: Tensor
    terms: dict[str, Tensor]


class Router(nn.Module):
    """Chooses the experts of each token, and the gates that multiply their results.

    With `balanced` a bias is added to the scores for this choice alone (Wang et al. 2024). Its
    gradient is experts x its expert's tokens - all choices, in whole numbers: below zero for an
    expert with fewer tokens than the mean. An update moves it by a fixed rate against the sign of
    that gradient.

    With f the share of tokens for which each expert was chosen and p the mean of its score, the
    router's losses are experts x sum f p (Fedus et al. 2021), over each sequence or over the batch, and
    the squared log-sum-exp of the scores (Zoph et al. 2022). f is a count, without a gradient, and covers
    all tokens, of which a rank may have a part. So a forward gives the counts and the terms in which the
    losses are linear; whoever has summed the counts asks `term_gradients` and goes backward from there.

    While `tally` (experts) is a tensor, it counts the choices of each expert.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.top_k, self.scores = sizes.top_k, sizes.scores
        self.normalized, self.scale = sizes.normalized, sizes.routed_scale
        self.groups, self.top_groups = sizes.expert_groups, sizes.top_groups
        # Factors of the losses: of each sequence, of the batch, of the scores' size.
        self.sequence_loss, self.batch_loss = sizes.sequence_loss, sizes.batch_loss
        self.z_loss = sizes.z_loss
        self.experts = sizes.experts
        self.tally: Tensor | None = None
        self.weight = nn.Parameter(torch.empty(sizes.experts, sizes.hidden))
        self.logit_bias = (
            nn.Parameter(torch.empty(sizes.experts)) if sizes.bias == "all" else None
        )
        self.bias = (
            nn.Parameter(torch.empty(sizes.experts))
            if sizes.balance == "bias"
            else None
        )

    @property
    def has_losses(self) -> bool:
        return bool(self.sequence_loss or self.batch_loss or self.z_loss)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routed:
        """Routes x (B, T, hidden). Tokens that are not `valid` (B, T) pad; they are sent like others and
        not counted."""
        logits = self.logits(x)
        scores = self.scored(logits)  # (B, T, experts)
        chosen = self.ranked(scores).topk(self.top_k, -1).indices  # (B, T, top_k)
        sent = (
            torch.ones_like(chosen)
            if valid is None
            else valid.unsqueeze(-1).expand_as(chosen)
        )
        if self.tally is not None:
            self.tally.scatter_add_(0, chosen.flatten(), sent.flatten().to(torch.int64))
        gates = scores.gather(-1, chosen)  # (B, T, top_k)
        if self.normalized:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates * self.scale if self.scale != 1 else gates
        balances = self.bias is not None and torch.is_grad_enabled()
        if not (balances or self.has_losses):
            return Routed(gates, chosen, {})
        sent = sent.to(gates.dtype)
        each = sent.new_zeros(len(x), len(self.weight))  # of each sequence
        each.scatter_add_(1, chosen.flatten(1), sent.flatten(1))
        terms = (
            self._terms(logits, scores, each, sent[..., 0]) if self.has_losses else {}
        )
        if not balances:
            return Routed(gates, chosen, terms)
        counts = each.sum(0)  # (experts): of the batch
        excess = (counts * len(counts) - sent.sum()).to(torch.float32)
        counted: Tensor = _Counted.apply(gates, self.bias, excess)  # type: ignore[no-untyped-call]
        return Routed(counted, chosen, terms)

    def _terms(
        self, logits: Tensor, scores: Tensor, choices: Tensor, sent: Tensor
    ) -> dict[str, Tensor]:
        """The terms that these tokens, of which `sent` (B, T) count, give to the losses."""
        terms = {CHOICES: choices}
        if not torch.is_grad_enabled():
            return terms
        if self.sequence_loss or self.batch_loss:
            p = (
                scores / scores.sum(-1, keepdim=True)
                if self.scores == "sigmoid"
                else scores
            )
            terms[SCORED] = (p * sent.unsqueeze(-1)).sum(1)  # (B, experts)
        if self.z_loss:
            terms[SQUARED] = (logits.logsumexp(-1).square() * sent).sum()
        return terms

    def term_gradients(
        self, share: Tensor, of_sequences: Tensor, of_batch: Tensor
    ) -> dict[str, Tensor]:
        """The gradients of the terms. `share` (one number) is what a token is of all tokens of the step;
        choices of whole sequences are (B, experts), those of the batch (1, experts)."""
        share = share.view(()).to(of_sequences.dtype)
        gradients = {}
        if self.sequence_loss or self.batch_loss:
            count = of_sequences.shape[1]
            f = of_sequences.new_zeros(1, count)  # (1 or B, experts)
            if self.sequence_loss:
                f = f + self.sequence_loss * self._per_token(of_sequences)
            if self.batch_loss:
                f = f + self.batch_loss * self._per_token(of_batch)
            gradients[SCORED] = (share * count * f).expand_as(of_sequences)
        if self.z_loss:
            gradients[SQUARED] = share * self.z_loss
        return gradients

    def _per_token(self, choices: Tensor) -> Tensor:
        """The mean number of times that a token chooses each expert; together top_k."""
        return self.top_k * choices / choices.sum(-1, keepdim=True)

    def logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.logit_bias is None else self.logit_bias.to(wide)
        return F.linear(x.to(wide), self.weight.to(wide), bias)

    def scored(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()

    def ranked(self, scores: Tensor) -> Tensor:
        """The scores that decide the choice, without gradients. Among groups of experts, only those
        whose two best scores have the highest sums remain (DeepSeek-V3 2024, 2.1.2)."""
        ranked = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        if self.groups == 1:
            return ranked.detach()
        # (B, T, groups, experts / groups)
        grouped = ranked.detach().view(*ranked.shape[:-1], self.groups, -1)
        # (B, T, top_groups)
        best = grouped.topk(2, -1).values.sum(-1).topk(self.top_groups, -1).indices
        left = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(
            -1, best, True
        )
        return grouped.masked_fill(~left.unsqueeze(-1), -math.inf).view(scores.shape)


def loss_router(piece: nn.Module) -> Router | None:
    """The router whose losses' terms a piece puts out beside its output, if it does."""
    router: Router | None = getattr(piece, "loss_router", None)
    return router


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )


class _Ordered(torch.autograd.Function):
    """Rows in another order, which names each row once. The gradients return by the inverse order.

    The backward of `index_select` would add them up: on a GPU with atomics, whose order differs from
    run to run, and in the digits of the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, _inverse(order)), None


class _Repeated(torch.autograd.Function):
    """Each row so many `times`, in an order of all copies. The gradients of a row's copies are summed
    with one rounding, always in the same order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.times = times
        return x.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        # (rows * times, hidden), the copies of a row side by side
        copies = gradient.index_select(0, _inverse(order))
        of_rows = copies.view(-1, ctx.times, copies.shape[-1])
        return of_rows.sum(1), None, None


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    y: Tensor = _Ordered.apply(x, order)  # type: ignore[no-untyped-call]
    return y


class Spread(nn.Module):
    """Tokens as often as experts were chosen for them, sorted by expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts  # in the uncut model

    def forward(
        self, x: Tensor, gates: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens (n, hidden), gates, from where each comes (n), and how many for each expert."""
        flat = chosen.flatten()  # (n), n = B * T * top_k
        order = flat.argsort(stable=True)  # by expert, and within one by token
        counts = flat.new_zeros(self.experts)  # (experts)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        top_k = chosen.shape[-1]
        tokens: Tensor = _Repeated.apply(x.flatten(0, 1), order, top_k)  # type: ignore[no-untyped-call]
        return tokens, gates, order, counts


class Merge(nn.Module):
    """Merges the experts' results: restores the tokens' order, multiplies by the gates, and sums."""

    def forward(self, y: Tensor, gates: Tensor, order: Tensor) -> Tensor:
        # (B, T, top_k, hidden)
        each = _ordered(y, _inverse(order)).view(*gates.shape, -1)
        return (each * gates.unsqueeze(-1)).sum(-2).to(y.dtype)  # (B, T, hidden)


class ExpertProducts(nn.Module):
    """The products of experts, each a gated MLP: down(silu(gate(x)) * up(x)), on tokens that are sorted
    already. Weights are (experts, out, in), biases (experts, out). Where `ranks` have parts of each expert,
    each adds its share of down's bias."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        hidden, ffn, experts = sizes.hidden, sizes.expert_ffn, sizes.experts
        self.activation, self.ranks = sizes.activation, 1
        self.product: Product = F.linear  # of an expert's tokens with its weight
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        biases = sizes.bias == "all"
        self.gate_bias = nn.Parameter(torch.empty(experts, ffn)) if biases else None
        self.up_bias = nn.Parameter(torch.empty(experts, ffn)) if biases else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if biases else None

    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The biases of gate, up and down, in the form in which they are added here."""
        down = self.down_bias
        if down is not None and self.ranks > 1:
            down = _Share.apply(down, self.ranks)  # type: ignore[no-untyped-call]
        return self.gate_bias, self.up_bias, down

    def on_runs(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each expert on its tokens, of which several senders have sent a run each, sorted by expert:
        `counts` (senders, experts). Results are in the order of the tokens."""
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(
            counts.shape[0]
        )
        # (n): each token's expert
        runs = expert.repeat_interleave(counts.flatten(), output_size=len(tokens))
        order = runs.argsort(stable=True)
        y = self.on_sorted(_ordered(tokens, order), counts.sum(0))
        return _ordered(y, _inverse(order))

    def on_sorted(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each expert on its run of the tokens (n, hidden): `counts` (experts) are their lengths."""
        if tokens.is_meta:
            return self._as_if_even(tokens)
        widths = self.up.shape[1:]
        plain, narrow = self.product is F.linear, tokens.dtype in HALVES
        if tokens.is_cuda and plain and narrow and not any(n % 8 for n in widths):
            return self.grouped(tokens, counts)
        # Unbound at once: the gradient of `weight[e]` would be of the size of all experts.
        parts: list[Any] = [x.unbind() for x in (self.gate, self.up, self.down)]
        parts += [
            (x,) * len(self.up) if x is None else x.unbind() for x in self.biases()
        ]
        runs, product = torch.split(tokens, counts.tolist()), self.product
        return torch.cat(
            [
                product(
                    gated(product(run, g, gb), product(run, u, ub), self.activation),
                    d,
                    db,
                )
                for run, g, u, d, gb, ub, db in zip(runs, *parts, strict=True)
            ]
        )

    def grouped(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The three products as three grouped kernels, which read the lengths on the device."""
        offsets = counts.cumsum(0).to(torch.int32)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = F.grouped_mm(x, weight.mT, offs=offsets)
            if bias is None:
                return y
            return y + bias.repeat_interleave(counts, 0, output_size=len(tokens))

        return self._by(product, tokens)

    def _by(self, product: Product, x: Tensor) -> Tensor:
        """The experts by a product with all their weights."""
        of_gate, of_up, of_down = self.biases()
        gate, up = product(x, self.gate, of_gate), product(x, self.up, of_up)
        return product(gated(gate, up, self.activation), self.down, of_down)

    def _as_if_even(self, tokens: Tensor) -> Tensor:
        """Without numbers nobody knows who goes where: as many tokens for each expert."""
        each = -(-len(tokens) // len(self.up))
        # (experts * each, hidden)
        padded = F.pad(tokens, (0, 0, 0, each * len(self.up) - len(tokens)))
        runs = padded.view(len(self.up), each, -1)  # (experts, each, hidden)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = x @ weight.mT
            return y if bias is None else y + bias.unsqueeze(1)

        return self._by(product, runs).flatten(0, 1)[: len(tokens)]


class ExpertMlps(ExpertProducts):
    """The experts in one place: their products, with the tokens sorted before them and merged after."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self._sizes = sizes
        self.spread, self.merge = Spread(sizes.experts), Merge()

    def forward(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """x (B, T, hidden); gates and chosen (B, T, top_k)."""
        tokens, gates, order, counts = self.spread(x, gates, chosen)
        y: Tensor = self.merge(self.on_sorted(tokens, counts), gates, order)
        return y

    def products(self) -> ExpertProducts:
        """The products alone, with these weights."""
        with torch.device("meta"):
            made = ExpertProducts(self._sizes)
        for name, weight in self.named_parameters(recurse=False):
            setattr(made, name, weight)
        return made


class Experts(nn.Module):
    """Routed experts, and beside them `shared`, through which all tokens go."""

    def __init__(
        self, router: Router, routed: ExpertMlps, shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.router, self.routed, self.shared = router, routed, shared

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.with_terms(x, valid)[0]

    def with_terms(
        self, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The experts' output, and what the router's losses are made of."""
        gates, chosen, terms = self.router(x, valid)
        y: Tensor = self.routed(x, gates, chosen)
        return y if self.shared is None else y + self.shared(x), terms


class Sending(nn.Module):
    """The part of a block's experts before tokens travel: where each token goes, and the shared experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.router, self.shared = experts.router, experts.shared
        self.spread = experts.routed.spread

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of what travels to the part that merges the results, and to the experts."""
        beside = () if self.shared is None else ("shared",)
        return ("sent", "counts", "gates", "order", *beside)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> dict[str, Tensor]:
        """The tokens to send, their number for each expert, the gates and the order that merge the
        results, the output of the shared experts, and what the router's losses are made of."""
        gates, chosen, terms = self.router(x, valid)
        tokens, gates, order, counts = self.spread(x, gates, chosen)
        beside = {} if self.shared is None else {"shared": self.shared(x)}
        routes = {"sent": tokens, "counts": counts, "gates": gates, "order": order}
        return {**routes, **beside, **terms}
