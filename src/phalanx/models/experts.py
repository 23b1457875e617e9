"""Experts in place of a block's MLP: a router sends tokens to those that score best.

No token is dropped: an expert takes all tokens routed to it, and may get none. Scores
are computed in float32 or wider. Not here: the placement of experts on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .dense import gated
from .kernels import HALVES
from .routed import CHOICES, SCORED, SQUARED, Chooser, RoutedProducts
from .sizes import DecoderSizes

# takes x, a weight and a bias
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Counted(torch.autograd.Function):
    """Identity on the gates; the bias's gradient is each expert's excess of tokens.

    It is a gradient because backward runs once for each microbatch, and forward again
    when recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, bias: Tensor, excess: Tensor
    ) -> Tensor:
        ctx.save_for_backward(excess)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (excess,) = ctx.saved_tensors
        return gradient, excess, None


class _Share(torch.autograd.Function):
    """One rank's 1 / ranks of a bias that all ranks add, with the full gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        return weight / ranks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Routed(NamedTuple):
    """A router's result: gates and experts, both (B, T, top_k), and loss terms."""

    gates: Tensor
    chosen: Tensor
    terms: dict[str, Tensor]


class Router(Chooser):
    """Chooses the experts of each token, and the gates that multiply their results.

    With `balanced`, a bias is added to the scores for this choice alone (Wang et al.
    2024). Its gradient is experts x (the expert's tokens) - (all choices), an integer:
    negative for an expert with fewer tokens than the mean. An update moves the bias by
    a fixed rate against the sign of that gradient.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes.experts)
        self.top_k, self.scores = sizes.top_k, sizes.scores
        self.normalized, self.scale = sizes.normalized, sizes.routed_scale
        self.groups, self.top_groups = sizes.expert_groups, sizes.top_groups
        # Factors of the losses: the per-sequence loss, the batch loss and the z-loss.
        self.sequence_loss, self.batch_loss = (
            sizes.sequence_loss,
            sizes.batch_loss,
        )
        self.z_loss = sizes.z_loss
        self.weight = nn.Parameter(torch.empty(sizes.experts, sizes.hidden))
        self.logit_bias = (
            nn.Parameter(torch.empty(sizes.experts))
            if sizes.bias == "all"
            else None
        )
        self.bias = (
            nn.Parameter(torch.empty(sizes.experts))
            if sizes.balance == "bias"
            else None
        )

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routed:
        """Route x (B, T, hidden); tokens that are not `valid` (B, T) do not count."""
        logits = self.logits(x)  # (B, T, experts)
        scores = self.scored(logits)  # (B, T, experts)
        # (B, T, top_k)
        chosen = self.ranked(scores).topk(self.top_k, -1).indices
        # sent: (B, T, top_k), 1 for each choice that counts
        sent = (
            torch.ones_like(chosen)
            if valid is None
            else valid.unsqueeze(-1).expand_as(chosen)
        )
        if self.tally is not None:
            self.tally.scatter_add_(
                0, chosen.flatten(), sent.flatten().to(torch.int64)
            )
        # The bias decides who is chosen, but a gate is the expert's own score: no
        # gradient of the model's loss reaches the bias.
        gates = scores.gather(-1, chosen)  # (B, T, top_k)
        if self.normalized:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates * self.scale if self.scale != 1 else gates
        # The rest is for training alone: the bias's counts and the losses' terms.
        balances = self.bias is not None and torch.is_grad_enabled()
        if not (balances or self.has_losses):
            return Routed(gates, chosen, {})
        sent = sent.to(gates.dtype)
        # (B, experts): choices per sequence
        each = sent.new_zeros(len(x), len(self.weight))
        each.scatter_add_(1, chosen.flatten(1), sent.flatten(1))
        terms = (
            self._terms(logits, scores, each, sent[..., 0])
            if self.has_losses
            else {}
        )
        if not balances:
            return Routed(gates, chosen, terms)
        counts = each.sum(0)  # (experts): choices in the whole batch
        excess = (counts * len(counts) - sent.sum()).to(torch.float32)
        counted: Tensor = _Counted.apply(gates, self.bias, excess)  # type: ignore[no-untyped-call]
        return Routed(counted, chosen, terms)

    def _terms(
        self, logits: Tensor, scores: Tensor, choices: Tensor, sent: Tensor
    ) -> dict[str, Tensor]:
        """The loss terms of these tokens. `sent` (B, T) is 1 for tokens that count."""
        terms = {CHOICES: choices}
        if not torch.is_grad_enabled():
            return terms
        if self.sequence_loss or self.batch_loss:
            # p: (B, T, experts), where a token's sum is 1; sigmoid scores need dividing
            p = (
                scores / scores.sum(-1, keepdim=True)
                if self.scores == "sigmoid"
                else scores
            )
            terms[SCORED] = (p * sent.unsqueeze(-1)).sum(1)  # (B, experts)
        if self.z_loss:
            # Scalar.
            squares = logits.logsumexp(-1).square()
            terms[SQUARED] = (squares * sent).sum()
        return terms

    def logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.logit_bias is None else self.logit_bias.to(wide)
        # (B, T, experts)
        return F.linear(x.to(wide), self.weight.to(wide), bias)

    def scored(self, logits: Tensor) -> Tensor:
        return (
            logits.softmax(-1)
            if self.scores == "softmax"
            else logits.sigmoid()
        )

    def ranked(self, scores: Tensor) -> Tensor:
        """The scores that decide the choice, without gradients.

        With groups of experts, only the groups whose two best scores have the highest
        sums remain (DeepSeek-V3 2024, 2.1.2).
        """
        ranked = (
            scores
            if self.bias is None
            else scores + self.bias.to(scores.dtype)
        )
        if self.groups == 1:
            return ranked.detach()
        # grouped: (B, T, groups, experts / groups)
        outer = ranked.shape[:-1]
        grouped = ranked.detach().view(*outer, self.groups, -1)
        # best: (B, T, top_groups)
        two_best = grouped.topk(2, -1).values.sum(-1)
        best = two_best.topk(self.top_groups, -1).indices
        left = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(
            -1, best, True
        )
        return grouped.masked_fill(~left.unsqueeze(-1), -math.inf).view(
            scores.shape
        )


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation of `order` (n)."""
    return torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )


class _Ordered(torch.autograd.Function):
    """Permutes rows by `order`; backward applies the inverse permutation.

    The backward of `index_select` would add rows instead: on a GPU with atomics, in an
    order that differs from run to run, and in the precision of the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, inverse(order)), None


class _Repeated(torch.autograd.Function):
    """Repeats each row `times` times, then permutes the copies by `order`.

    Backward sums the gradients of a row's copies with one rounding, always in the same
    order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.times = times
        # Copy i of row r has index r * times + i, so order // times is its row.
        return x.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        # (rows * times, hidden), the copies of a row side by side
        copies = gradient.index_select(0, inverse(order))
        # (rows, times, hidden)
        of_rows = copies.view(-1, ctx.times, copies.shape[-1])
        return of_rows.sum(1), None, None


def ordered(x: Tensor, order: Tensor) -> Tensor:
    """The rows of x, permuted by `order`."""
    y: Tensor = _Ordered.apply(x, order)  # type: ignore[no-untyped-call]
    return y


class Spread(nn.Module):
    """Copies each token once for every expert it chose, sorted by expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts  # the count in the unsharded model

    def forward(
        self, x: Tensor, gates: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens (n, hidden), gates, source indices (n), tokens per expert."""
        flat = chosen.flatten()  # (n), n = B * T * top_k
        order = flat.argsort(stable=True)  # by expert, then by token
        counts = flat.new_zeros(self.experts)  # (experts)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        top_k = chosen.shape[-1]
        tokens: Tensor = _Repeated.apply(x.flatten(0, 1), order, top_k)  # type: ignore[no-untyped-call]
        return tokens, gates, order, counts


class Merge(nn.Module):
    """Merges experts' results: restores order, multiplies by the gates, and sums."""

    def forward(self, y: Tensor, gates: Tensor, order: Tensor) -> Tensor:
        return self.weighted(ordered(y, inverse(order)), gates)

    def weighted(self, y: Tensor, gates: Tensor) -> Tensor:
        """The sum of each token's results y (n, hidden), multiplied by its gates."""
        # each: (B, T, top_k, hidden)
        each = y.view(*gates.shape, y.shape[-1])
        # Gates are float32 or wider, so products and sum are too: one rounding.
        # (B, T, hidden)
        weighted = each * gates.unsqueeze(-1)
        return weighted.sum(-2).to(y.dtype)


class ExpertWeights(NamedTuple):
    """The weights of all experts (experts, out, in), and biases (experts, out)."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def _unbound(weight: Tensor) -> Sequence[Tensor]:
    """The weights of single experts."""
    # All at once: the gradient of `weight[e]` would have the size of all experts.
    return weight.unbind()


class ExpertProducts(RoutedProducts):
    """The matmuls of the experts, each a gated MLP, on tokens already sorted by expert.

    Weights are (experts, out, in), biases (experts, out). Where tp shards each expert,
    every one of the `ranks` adds its share of down's bias.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        hidden, ffn, experts = sizes.hidden, sizes.expert_ffn, sizes.experts
        self.activation, self.ranks = sizes.activation, 1
        # Replaceable, for example by an fp8 matmul: the product with one expert's weight,
        # as `each_expert` returns it. Without grouped kernels, all are computed so.
        self.product: Callable[[Tensor, Any, Tensor | None], Tensor] = F.linear
        self.each_expert: Callable[[Tensor], Sequence[Any]] = _unbound
        self.grouped_kernels = True
        # If set, each run of tokens is multiplied separately. Called with a weight's
        # name, the weight and a run, it returns the weight with a separate gradient.
        self.weight_of_run: Callable[[str, Tensor, int], Tensor] | None = None
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        biases = sizes.bias == "all"
        self.gate_bias = (
            nn.Parameter(torch.empty(experts, ffn)) if biases else None
        )
        self.up_bias = (
            nn.Parameter(torch.empty(experts, ffn)) if biases else None
        )
        self.down_bias = (
            nn.Parameter(torch.empty(experts, hidden)) if biases else None
        )

    def weights(self, run: int | None = None) -> ExpertWeights:
        """The weights, and the biases as this rank adds them, for one run or all."""
        weights: dict[str, Any] = {}
        for name in ExpertWeights._fields:
            weight = getattr(self, name)
            if run is not None and weight is not None:
                assert self.weight_of_run is not None
                weight = self.weight_of_run(name, weight, run)
            weights[name] = weight
        if self.down_bias is not None and self.ranks > 1:
            share: Any = _Share.apply
            weights["down_bias"] = share(weights["down_bias"], self.ranks)
        return ExpertWeights(**weights)

    def on_runs(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Apply experts to tokens that arrive in runs, each sorted by expert.

        There is one run per sender, or per sender and part of time. `counts`
        (runs, experts) are the numbers of tokens sent. Results keep the order of
        `tokens` (n, hidden).
        """
        if self.weight_of_run is not None:
            own = [self.weights(run) for run in range(len(counts))]
            return self.on_each(tokens, counts, own)
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(
            counts.shape[0]
        )
        # runs: (n), each token's expert
        runs = expert.repeat_interleave(
            counts.flatten(), output_size=len(tokens)
        )
        # One run per expert, not per run and expert: fewer, larger matmuls.
        order = runs.argsort(stable=True)
        y = self.on_sorted(ordered(tokens, order), counts.sum(0))
        return ordered(y, inverse(order))

    def on_each(
        self,
        tokens: Tensor,
        counts: Tensor,
        weights: Sequence[ExpertWeights],
    ) -> Tensor:
        """Apply experts to each run of tokens separately, with its own weights."""
        if tokens.is_meta:
            # One run's share of the tokens cannot be known: all at once.
            return self._as_if_even(tokens, weights[0])
        runs = torch.split(tokens, counts.sum(1).tolist())
        by_run = zip(runs, counts, weights, strict=True)
        return torch.cat([self.on_sorted(*each) for each in by_run])

    def on_own(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Apply experts to this rank's own tokens, sorted by expert."""
        return self.on_sorted(tokens, counts)

    def on_sorted(
        self,
        tokens: Tensor,
        counts: Tensor,
        own: ExpertWeights | None = None,
    ) -> Tensor:
        """Apply experts to runs of rows (n, hidden) with lengths `counts` (experts)."""
        own = own or self.weights()
        if tokens.is_meta:
            return self._as_if_even(tokens, own)
        widths, narrow = self.up.shape[1:], tokens.dtype in HALVES
        # `grouped_mm` loads 16 bytes at once, so widths in 16 bits must be multiples of
        # 8.
        if (
            tokens.is_cuda
            and self.grouped_kernels
            and narrow
            and not any(n % 8 for n in widths)
        ):
            return self.grouped(tokens, counts, own)
        parts: list[Any] = [
            *map(self.each_expert, (own.gate, own.up, own.down))
        ]
        parts += [
            (None,) * len(self.up) if x is None else x.unbind()
            for x in (own.gate_bias, own.up_bias, own.down_bias)
        ]
        # `tolist` waits for a GPU: the lengths of the runs are read on the host.
        runs, product = torch.split(tokens, counts.tolist()), self.product
        return torch.cat(
            [
                product(
                    gated(
                        product(run, g, gb),
                        product(run, u, ub),
                        self.activation,
                    ),
                    d,
                    db,
                )
                for run, g, u, d, gb, ub, db in zip(runs, *parts, strict=True)
            ]
        )

    def grouped(
        self,
        tokens: Tensor,
        counts: Tensor,
        own: ExpertWeights | None = None,
    ) -> Tensor:
        """The three matmuls as grouped kernels, with run lengths on the device.

        A microbatch's weight gradient is rounded to 16 bits before it is added to a
        float32 sum: torch's grouped kernel refuses a wider output (2.13).
        """
        # (experts): the end of each expert's rows, on the device
        offsets = counts.cumsum(0).to(torch.int32)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            # (n, in) with (experts, out, in) becomes (n, out)
            y = F.grouped_mm(x, weight.mT, offs=offsets)
            if bias is None:
                return y
            return y + bias.repeat_interleave(
                counts, 0, output_size=len(tokens)
            )

        return self._by(product, tokens, own or self.weights())

    def _by(self, product: Product, x: Tensor, own: ExpertWeights) -> Tensor:
        """Apply the experts by a `product` with the stacked weights of all."""
        # gate, up: (..., ffn)
        gate = product(x, own.gate, own.gate_bias)
        up = product(x, own.up, own.up_bias)
        wide = gated(gate, up, self.activation)
        return product(wide, own.down, own.down_bias)

    def _as_if_even(self, tokens: Tensor, own: ExpertWeights) -> Tensor:
        """Apply the experts to equal numbers of tokens: meta tensors have no counts."""
        each = -(-len(tokens) // len(self.up))
        # padded: (experts * each, hidden)
        missing = each * len(self.up) - len(tokens)
        padded = F.pad(tokens, (0, 0, 0, missing))
        runs = padded.view(len(self.up), each, -1)  # (experts, each, hidden)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = x @ weight.mT  # (experts, each, out)
            return y if bias is None else y + bias.unsqueeze(1)

        made = self._by(product, runs, own).flatten(0, 1)
        return made[: len(tokens)]


class ExpertMlps(ExpertProducts):
    """All experts on one rank: sorts tokens, applies the MLPs, merges results."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self._sizes = sizes
        self.spread, self.merge = Spread(sizes.experts), Merge()

    def forward(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """Route x (B, T, hidden) to `chosen` with `gates`, both (B, T, top_k)."""
        tokens, gates, order, counts = self.spread(x, gates, chosen)
        y: Tensor = self.merge(self.on_own(tokens, counts), gates, order)
        return y

    def products(self) -> ExpertProducts:
        """The expert matmuls alone, sharing these weights."""
        # On meta, so that the weights which are replaced at once take no memory.
        with torch.device("meta"):
            made = ExpertProducts(self._sizes)
        for name, weight in self.named_parameters(recurse=False):
            setattr(made, name, weight)
        return made


class SharedGate(nn.Module):
    """One number for each token, by which the output of shared experts is multiplied."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()  # (B, T, 1)


def _of_shared(experts: Experts | Sending, x: Tensor) -> Tensor | None:
    """The output of the experts that every token passes through, if there are any."""
    if experts.shared is None:
        return None
    y: Tensor = experts.shared(x)
    gate = experts.shared_gate
    return y if gate is None else y * gate(x)


class Experts(nn.Module):
    """Routed experts, and the `shared` experts that every token passes through."""

    def __init__(
        self,
        router: Router,
        routed: ExpertMlps,
        shared: nn.Module | None,
        shared_gate: SharedGate | None = None,
    ) -> None:
        super().__init__()
        self.router, self.routed, self.shared = router, routed, shared
        self.shared_gate = shared_gate

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.with_terms(x, valid)[0]

    def with_terms(
        self, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the experts' output and the terms of the router's losses."""
        gates, chosen, terms = self.router(x, valid)
        y: Tensor = self.routed(x, gates, chosen)
        beside = _of_shared(self, x)
        return y if beside is None else y + beside, terms


class Sending(nn.Module):
    """The part of an expert MLP before tokens travel: routing and shared experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.router, self.shared = experts.router, experts.shared
        self.shared_gate = experts.shared_gate
        self.spread = experts.routed.spread

    @property
    def gives(self) -> tuple[str, ...]:
        """The outputs' names: what travels to the experts, and what merging needs."""
        beside = () if self.shared is None else ("shared",)
        return ("sent", "counts", "gates", "order", *beside)

    def forward(
        self, x: Tensor, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return sorted tokens, tokens per expert, and gates and order for merging.

        Where they exist, also the output of the shared experts and the terms of the
        router's losses.
        """
        gates, chosen, terms = self.router(x, valid)
        tokens, gates, order, counts = self.spread(x, gates, chosen)
        of_shared = _of_shared(self, x)
        beside = {} if of_shared is None else {"shared": of_shared}
        routes = {
            "sent": tokens,
            "counts": counts,
            "gates": gates,
            "order": order,
        }
        return {**routes, **beside, **terms}
