"""A decoder-only transformer in plain torch: GPT-2, Llama 2/3, Mistral, Qwen2/3, Gemma 2/3, Phi-3,
OLMo-2, Mixtral, Qwen3 with experts and DeepSeek-V3 are configurations of its constructor.

It is a list of pieces: `embed` (tokens to activations), `layers` (blocks, each called
`x = block(x, **shared)`) and `head` (last norm, output projection, loss). Each can be called alone;
`Decoder.forward` only chains them. Activations are (batch, time, hidden). No head count, width or
vocabulary size is read in a forward, so weights may be cut before a call; attention's core, the
token lookup and the loss are children of their own, so each may be replaced by one that works on a
part. Not here: sampling.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, HeadsAttention, LatentAttention, Rope, RopeScaling
from .experts import ExpertMlps, Experts, Router, RouterLosses
from .loss import CrossEntropy
from .noise import Dropout, block_noise
from .norm import norm_of

RULES = """\
embed.tokens.weight : vocab embed
embed.positions.weight : position embed
layers.*.piece : -
layers.*.attn_norm.* : embed
layers.*.attn_post_norm.* : embed
layers.*.attn.heads : heads
layers.*.attn.wq.weight : heads embed
layers.*.attn.wq.bias : heads
layers.*.attn.w[kv].weight : kv embed
layers.*.attn.w*_a.weight : latent embed
layers.*.attn.*_a_norm.weight : latent
layers.*.attn.w*_b.weight : heads latent
layers.*.attn.w[kv].bias : kv
layers.*.attn.[qk]_norm.weight : head
layers.*.attn.q_wide_norm.weight : heads
layers.*.attn.k_wide_norm.weight : kv
layers.*.attn.wo.weight : embed heads
layers.*.attn.wo.bias : embed
layers.*.mlp_norm.* : embed
layers.*.mlp_post_norm.* : embed
layers.*.mlp.gate.weight : ffn embed
layers.*.mlp.gate.bias : ffn
layers.*.mlp.up.weight : ffn embed
layers.*.mlp.up.bias : ffn
layers.*.mlp.down.weight : embed ffn
layers.*.mlp.down.bias : embed
layers.*.mlp.router.weight : - embed
layers.*.mlp.router.bias : -
layers.*.mlp.routed.gate : experts ffn embed
layers.*.mlp.routed.up : experts ffn embed
layers.*.mlp.routed.down : experts embed ffn
layers.*.mlp.shared.gate.weight : ffn embed
layers.*.mlp.shared.up.weight : ffn embed
layers.*.mlp.shared.down.weight : embed ffn
head.norm.* : embed
head.output.weight : vocab embed
"""


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x)) when gated, else down(act(up(x))); gelu in its tanh form."""

    def __init__(self, hidden: int, ffn: int, *, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(hidden, ffn, bias=bias) if gated else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = self._activated(self.up(x) if self.gate is None else self.gate(x))
        y: Tensor = self.down(wide if self.gate is None else wide * self.up(x))
        return y

    def _activated(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.activation == "silu" else F.gelu(x, approximate="tanh")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Norms may also, or only, stand behind attention
    and mlp; one that is None is not there.

    `piece` is the block's number in the model and enters its noise. It is a tensor, as an int that
    differs from block to block would have each block compiled anew.
    """

    piece: Tensor

    def __init__(
        self,
        piece: int,
        attn: HeadsAttention,
        mlp: nn.Module,
        norms: Sequence[nn.Module | None],  # before attention and mlp, behind them
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self._piece = piece
        self.attn_norm, self.mlp_norm, self.attn_post_norm, self.mlp_post_norm = norms
        self.attn, self.mlp = attn, mlp
        # Outside attn and mlp: whatever completes their outputs comes before the features are
        # dropped, and where the residual stream is cut in time, their noise is cut with it.
        self.attn_dropout = Dropout(dropout, place=1)
        self.mlp_dropout = Dropout(dropout, place=2)
        self.register_buffer("piece", torch.tensor([piece]), persistent=False)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        noise = None if noise is None else block_noise(noise, self.piece)
        return self.feed(self.attend(x, positions, documents, noise), noise)

    def attend(
        self, x: Tensor, positions: Tensor, documents: Tensor | None, noise: Tensor | None
    ) -> Tensor:
        """The block's first half; the noise is its own."""
        normed = x if self.attn_norm is None else self.attn_norm(x)
        a = self.attn(normed, positions, documents, noise)
        a = a if self.attn_post_norm is None else self.attn_post_norm(a)
        y: Tensor = x + self.attn_dropout(a, noise)
        return y

    def feed(self, x: Tensor, noise: Tensor | None, *more: Tensor | None) -> Tensor:
        """The block's second half; `more` is for its MLP."""
        return self.added(
            x, self.mlp(x if self.mlp_norm is None else self.mlp_norm(x), *more), noise
        )

    def added(self, x: Tensor, m: Tensor, noise: Tensor | None) -> Tensor:
        """The residual stream with what the MLP makes of it."""
        m = m if self.mlp_post_norm is None else self.mlp_post_norm(m)
        y: Tensor = x + self.mlp_dropout(m, noise)
        return y

    def reset_buffers(self) -> None:
        """Number the block again, after `to_empty` has left its number undefined."""
        self.piece.fill_(self._piece)


class ExpertBlock(Block):
    """A block with experts. Where the batch is padded in time, `valid` (B, T) says which tokens count;
    `token_share`, what a token is of all of the step, makes its router add its losses."""

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
        token_share: Tensor | None = None,
    ) -> Tensor:
        noise = None if noise is None else block_noise(noise, self.piece)
        return self.feed(self.attend(x, positions, documents, noise), noise, valid, token_share)

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The block as three modules with its own weights, between which tokens may travel: up to where
        they are sent to experts, the experts, and what puts their results together."""
        names = "attn_norm attn attn_post_norm attn_dropout mlp_norm mlp.router mlp.shared"
        return (
            _part(self, RoutingPart, (*names.split(), "mlp.routed.spread")),
            _part(self, ExpertsPart, ("mlp.routed.*",)),
            _part(self, MergingPart, ("mlp_post_norm", "mlp_dropout", "mlp.routed.merge")),
        )


class RoutingPart(ExpertBlock):
    """Of a block with experts: attention, and which experts a token goes through."""

    mlp: Experts

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
        token_share: Tensor | None = None,
    ) -> dict[str, Tensor]:
        noise = None if noise is None else block_noise(noise, self.piece)
        x = self.attend(x, positions, documents, noise)
        normed = x if self.mlp_norm is None else self.mlp_norm(x)
        return {"x": x, **self.mlp.sent(normed, valid, token_share)}


class ExpertsPart(ExpertBlock):
    """Of a block with experts: those on tokens that came, `routes` (senders, experts) of them."""

    mlp: Experts

    def forward(self, sent: Tensor, routes: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"sent": self.mlp.routed.on_runs(sent, routes)}


class MergingPart(ExpertBlock):
    """Of a block with experts: the results that came back, added to the residual stream."""

    mlp: Experts

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        sent: Tensor,
        gates: Tensor,
        order: Tensor,
        *,
        shared: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        noise = None if noise is None else block_noise(noise, self.piece)
        m = self.mlp.routed.merge(sent, gates, order)
        return self.added(x, m if shared is None else m + shared, noise)


def _part(block: nn.Module, kind: type[nn.Module], keep: Collection[str]) -> nn.Module:
    """A module of that class with those of the block's modules; `*` are a module's own weights."""
    part = kind.__new__(kind)
    nn.Module.__init__(part)
    part.__dict__ |= {k: v for k, v in vars(block).items() if k not in part.__dict__}
    part._buffers |= block._buffers
    part._parameters |= block._parameters if "*" in keep else {}
    for name, child in block._modules.items():
        inside = [path[len(name) + 1 :] for path in keep if path.startswith(name + ".")]
        if child is None or not inside:
            part._modules[name] = child if name in keep else None
        else:
            part._modules[name] = _part(child, type(child), inside)
    return part


class Embed(nn.Module):
    """The tokens' vectors times `scale`, and those of their positions where these are learned."""

    def __init__(
        self, vocab: int, hidden: int, sequence: int | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = None if sequence is None else nn.Embedding(sequence, hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.scale != 1:
            x = x * x.new_full((), self.scale)  # rounded to x's dtype first, as Gemma was trained
        return x if self.positions is None else x + self.positions(positions)


class Head(nn.Module):
    """Norm, output projection, loss. The loss is a sum: who knows all tokens divides by their count.

    `output.weight` may be the embedding's own parameter or another of that shape. With a `softcap` c
    a logit l is c tanh(l / c); that keeps a second matrix of logits for backward.
    """

    def __init__(self, hidden: int, vocab: int, norm: nn.Module, softcap: float = 0.0) -> None:
        super().__init__()
        self.norm, self.softcap = norm, softcap
        self.output = nn.Linear(hidden, vocab, bias=False)
        self.loss = CrossEntropy()

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(self.norm(x))
        return self.softcap * torch.tanh(y / self.softcap) if self.softcap else y

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.logits(x), targets)
        return loss


class Decoder(nn.Module):
    """The whole model; see the module's first lines. `sequence` limits learned positions only."""

    def __init__(
        self,
        *,
        vocab: int,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: int | None = None,
        sequence: int = 1024,
        norm: Literal["rms", "rms1", "layer"] = "rms",
        norms: Literal["pre", "post", "both"] = "pre",
        positions: Literal["rope", "learned"] = "rope",
        rope_theta: float = 10000.0,
        rope_local_theta: float = 0.0,
        rope_scaling: RopeScaling | None = None,
        rope_pairs: Literal["halves", "neighbours"] = "halves",
        kv_latent: int = 0,
        q_latent: int = 0,
        rope_dim: int = 0,
        value_dim: int = 0,
        windows: tuple[int, ...] = (),
        softcap: float = 0.0,
        logit_softcap: float = 0.0,
        query_scalar: float = 0.0,
        embed_scale: float = 1.0,
        activation: Literal["", "silu", "gelu"] = "",
        gated: bool = True,
        tied: bool = False,
        bias: Literal["none", "qkv", "all"] = "none",
        qk_norm: bool = False,
        qk_norm_wide: bool = False,
        dropout: float = 0.0,
        eps: float = 1e-5,
        experts: int = 0,
        top_k: int = 1,
        expert_ffn: int = 0,
        shared_experts: int = 0,
        expert_groups: int = 1,
        top_groups: int = 1,
        dense_layers: int = 0,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalized: bool = True,
        routed_scale: float = 1.0,
        balance: Literal["none", "bias"] = "none",
        sequence_loss: float = 0.0,
        batch_loss: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads, head_dim = kv_heads or heads, head_dim or hidden // heads
        learned = positions == "learned"
        _refuse(
            {
                f"norm={norm!r}: choose rms, rms1 or layer": norm not in ("rms", "rms1", "layer"),
                f"norms={norms!r}: choose pre, post or both": norms not in ("pre", "post", "both"),
                f"activation={activation!r}: choose silu or gelu": activation
                not in ("", "silu", "gelu"),
                f"positions={positions!r}: choose rope or learned": positions
                not in ("rope", "learned"),
                f"bias={bias!r}: choose none, qkv or all": bias not in ("none", "qkv", "all"),
                f"kv_heads={kv_heads} does not divide heads={heads}": heads % kv_heads != 0,
                f"head_dim={rope_dim or head_dim} is odd, and rope turns pairs": not learned
                and (rope_dim or head_dim) % 2,
                f"dropout={dropout} is not in [0, 1)": not 0 <= dropout < 1,
            }
        )
        rope = None if learned else Rope(rope_theta, rope_scaling)
        local = rope if learned or not rope_local_theta else Rope(rope_local_theta)
        common: Any = {"dropout": dropout, "softcap": softcap, "query_scalar": query_scalar}
        common |= {"rope_pairs": rope_pairs}
        plain: dict[str, Any] = {"bias": bias}
        plain |= {"qk_norm": qk_norm, "qk_norm_wide": qk_norm_wide, "norm": norm, "eps": eps}
        latents: dict[str, Any] = {"kv_latent": kv_latent, "q_latent": q_latent}
        latents |= {"rope_dim": rope_dim or head_dim, "value_dim": value_dim or head_dim}
        activation = activation or ("silu" if gated else "gelu")
        there = [norms != "post"] * 2 + [norms != "pre"] * 2
        self._depth, self._plus_one = layers, norm == "rms1"
        self.embed = Embed(vocab, hidden, sequence if learned else None, embed_scale)
        self.layers = nn.ModuleList()

        def feed_forward(width: int) -> nn.Module:
            return Mlp(hidden, width, gated=gated, bias=bias == "all", activation=activation)

        def routed() -> nn.Module:
            router = Router(
                hidden,
                experts,
                top_k,
                scores=scores,
                normalized=normalized,
                scale=routed_scale,
                balanced=balance == "bias",
                groups=(expert_groups, top_groups),
                losses=RouterLosses(sequence_loss, batch_loss, z_loss),
            )
            width = expert_ffn or ffn or 4 * hidden
            shared = feed_forward(shared_experts * width) if shared_experts else None
            return Experts(router, ExpertMlps(hidden, width, experts), shared)

        def attention(**options: Any) -> HeadsAttention:
            options |= common
            if kv_latent:
                return LatentAttention(hidden, heads, head_dim, **latents, **options)
            return Attention(hidden, heads, kv_heads, head_dim, **plain, **options)

        for piece in range(layers):
            window = windows[piece % len(windows)] if windows else 0
            attn = attention(rope=local if window else rope, window=window)
            sparse = experts > 0 and piece >= dense_layers
            mlp = routed() if sparse else feed_forward(ffn or 4 * hidden)
            norms_of_block = [norm_of(norm, hidden, eps) if each else None for each in there]
            kind = ExpertBlock if sparse else Block
            self.layers.append(kind(piece, attn, mlp, norms_of_block, dropout=dropout))
        self.head = Head(hidden, vocab, norm_of(norm, hidden, eps), logit_softcap)
        if tied:
            self.head.output.weight = self.embed.tokens.weight
        for name, weight in self.named_parameters():
            self.draw(name, weight)

    def forward(self, tokens: Tensor, targets: Tensor, **shared: Tensor | None) -> Tensor:
        """The summed loss. `shared` is what every block is called with: positions, if need be
        documents and noise."""
        if shared.get("positions") is None:
            shared["positions"] = torch.arange(tokens.shape[1], device=tokens.device).expand_as(
                tokens
            )
        x = self.embed(tokens, shared["positions"])
        for block in self.layers:
            x = block(x, **shared)
        loss: Tensor = self.head(x, targets)
        return loss

    @torch.no_grad()
    def draw(self, name: str, weight: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill the whole `weight` of that name with its start, as GPT-2 did (Radford et al. 2019).

        By name, so that each weight can be drawn alone, in any order, wherever it will live.
        """
        if name.endswith("bias"):
            weight.zero_()
        elif name.endswith("norm.weight"):
            weight.fill_(0.0 if self._plus_one else 1.0)
        else:
            # Each block adds twice to the residual stream; this keeps its variance level.
            into_residual = name.endswith(("wo.weight", "down.weight", "routed.down"))
            spread = 0.02 / math.sqrt(2 * self._depth) if into_residual else 0.02
            weight.normal_(0.0, spread, generator=generator)


def _refuse(faults: dict[str, Any]) -> None:
    """One error that tells all the faults that hold."""
    wrong = [fault for fault, holds in faults.items() if holds]
    if wrong:
        raise ValueError("Decoder: " + "; ".join(wrong) + ".")


def describe(model: Decoder) -> tuple[tuple[tuple[str, nn.Module], ...], str]:
    """The pieces in their order, and a line `pattern : dim dim` for every weight and buffer.

    Dims: vocab, embed (the residual width), experts, heads and kv (whole heads times head_dim), head (one
    head's features, shared by all heads), ffn, position. A line that names nothing is left out.
    """
    blocks = tuple((f"layers.{n}", block) for n, block in enumerate(model.layers))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers()]
    lines = [line for line in RULES.splitlines() if fnmatch.filter(names, line.split(" : ")[0])]
    return (("embed", model.embed), *blocks, ("head", model.head)), "\n".join(lines)
