"""A decoder-only transformer in plain torch: GPT-2, Llama 2/3, Mistral, Qwen2/3, Gemma 2/3, Phi-3,
OLMo-2, Mixtral, Qwen3 with experts, DeepSeek-V3 and gpt-oss are configurations of its constructor.

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
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, HeadsAttention, LatentAttention
from .experts import ExpertMlps, Experts, Router, gated
from .loss import CrossEntropy
from .noise import Dropout, block_noise
from .norm import norm_of
from .rope import shared_angles
from .sizes import DecoderSizes

RULES = """\
embed.tokens.weight : vocab embed
embed.positions.weight : position embed
layers.*.piece : -
layers.*.attn_norm.* : embed
layers.*.attn_post_norm.* : embed
layers.*.attn.heads : heads
layers.*.attn.sinks : heads
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
layers.*.mlp*.gate.weight : ffn embed
layers.*.mlp*.gate.bias : ffn
layers.*.mlp*.up.weight : ffn embed
layers.*.mlp*.up.bias : ffn
layers.*.mlp*.down.weight : embed ffn
layers.*.mlp*.down.bias : embed
layers.*.mlp.router.weight : - embed
layers.*.mlp.router.*bias : -
layers.*.mlp.routed.gate : experts ffn embed
layers.*.mlp.routed.up : experts ffn embed
layers.*.mlp.routed.down : experts embed ffn
layers.*.mlp.routed.gate_bias : experts ffn
layers.*.mlp.routed.up_bias : experts ffn
layers.*.mlp.routed.down_bias : experts partial
head.norm.* : embed
head.output.weight : vocab embed
"""


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x)) when gated, else down(act(up(x))); gelu in its tanh form."""

    def __init__(self, sizes: DecoderSizes, width: int) -> None:
        super().__init__()
        self.activation = sizes.activation
        up, bias = (sizes.hidden, width), sizes.bias == "all"
        self.gate = nn.Linear(*up, bias=bias) if sizes.gated else None
        self.up = nn.Linear(*up, bias=bias)
        self.down = nn.Linear(width, sizes.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            wide = self.up(x)
            wide = F.silu(wide) if self.activation == "silu" else F.gelu(wide, approximate="tanh")
        else:
            wide = gated(self.gate(x), self.up(x), self.activation)
        y: Tensor = self.down(wide)
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Norms may also, or only, stand behind attention
    and mlp; one that is None is not there.

    `piece` is the block's number in the model and enters its noise. It is a tensor, as an int that
    differs from block to block would have each block compiled anew.
    """

    piece: Tensor

    def __init__(
        self, piece: int, attn: HeadsAttention, mlp: nn.Module, sizes: DecoderSizes
    ) -> None:
        super().__init__()
        self._piece = piece
        norm = partial(norm_of, sizes.norm, sizes.hidden, sizes.eps)
        before, behind = sizes.norms != "post", sizes.norms != "pre"
        self.attn_norm = norm() if before else None
        self.mlp_norm = norm() if before else None
        self.attn_post_norm = norm() if behind else None
        self.mlp_post_norm = norm() if behind else None
        self.attn, self.mlp = attn, mlp
        # Outside attn and mlp: whatever completes their outputs comes before the features are
        # dropped, and where the residual stream is cut in time, their noise is cut with it.
        self.attn_dropout = Dropout(sizes.dropout, place=1)
        self.mlp_dropout = Dropout(sizes.dropout, place=2)
        self.register_buffer("piece", torch.tensor([piece]), persistent=False)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        return self.feed(*self.attend(x, positions, angles, documents, noise))

    def attend(
        self,
        x: Tensor,
        positions: Tensor,
        angles: Tensor | None,
        documents: Tensor | None,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The block's first half, and its own noise."""
        noise = self.own(noise)
        normed = x if self.attn_norm is None else self.attn_norm(x)
        a = self.attn(normed, positions, documents, noise, angles)
        a = a if self.attn_post_norm is None else self.attn_post_norm(a)
        return x + self.attn_dropout(a, noise), noise

    def own(self, noise: Tensor | None) -> Tensor | None:
        return None if noise is None else block_noise(noise, self.piece)

    def feed(self, x: Tensor, noise: Tensor | None, *more: Tensor | None) -> Tensor:
        """The block's second half; `more` is for its MLP."""
        return self.added(x, self.mlp(self.normed(x), *more), noise)

    def normed(self, x: Tensor) -> Tensor:
        return x if self.mlp_norm is None else self.mlp_norm(x)

    def added(self, x: Tensor, m: Tensor, noise: Tensor | None) -> Tensor:
        m = m if self.mlp_post_norm is None else self.mlp_post_norm(m)
        y: Tensor = x + self.mlp_dropout(m, noise)
        return y

    def reset_buffers(self) -> None:
        """Number the block again, after `to_empty` has left its number undefined."""
        self.piece.fill_(self._piece)


class ExpertBlock(Block):
    """A block with experts. Where the batch is padded in time, `valid` (B, T) says which tokens count.
    The losses of its router are left out here: see `with_losses`."""

    mlp: Experts

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        return self.feed(*self.attend(x, positions, angles, documents, noise), valid)

    @property
    def loss_router(self) -> Router | None:
        """The router whose losses' terms this module puts out beside its output."""
        return None

    def with_losses(self) -> nn.Module:
        """The block as a module that also puts out what its router's losses are made of."""
        if not self.mlp.router.has_losses:
            return self
        return _part(self, BlockWithLosses, ("*", *self._modules))

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The block as three modules with its own weights, between which tokens may travel: up to where
        they are sent to experts, the experts, and what puts their results together."""
        names = "attn_norm attn attn_post_norm attn_dropout mlp_norm mlp.router mlp.shared"
        return (
            _part(self, RoutingPart, (*names.split(), "mlp.routed.spread")),
            _part(self, ExpertsPart, ("mlp.routed.*",)),
            _part(self, MergingPart, ("mlp_post_norm", "mlp_dropout", "mlp.routed.merge")),
        )


class _PutsOutLosses(ExpertBlock):
    @property
    def loss_router(self) -> Router | None:
        router = self.mlp.router
        return router if router.has_losses else None


class BlockWithLosses(_PutsOutLosses):
    """A block with experts that puts out what its router's losses are made of."""

    def feed(  # type: ignore[override]
        self, x: Tensor, noise: Tensor | None, *more: Tensor | None
    ) -> dict[str, Tensor]:
        m, terms = self.mlp.with_terms(self.normed(x), *more)
        return {"x": self.added(x, m, noise), **terms}


class RoutingPart(_PutsOutLosses):
    """Of a block with experts: attention, and which experts a token goes through."""

    def feed(  # type: ignore[override]
        self, x: Tensor, noise: Tensor | None, *more: Tensor | None
    ) -> dict[str, Tensor]:
        return {"x": x, **self.mlp.sent(self.normed(x), *more)}


class ExpertsPart(ExpertBlock):
    """Of a block with experts: those on tokens that came, `routes` (senders, experts) of them."""

    def forward(self, sent: Tensor, routes: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"sent": self.mlp.routed.on_runs(sent, routes)}


class MergingPart(ExpertBlock):
    """Of a block with experts: the results that came back, added to the residual stream."""

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
        m = self.mlp.routed.merge(sent, gates, order)
        return self.added(x, m if shared is None else m + shared, self.own(noise))


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


def _block(sizes: DecoderSizes, piece: int) -> Block:
    window = sizes.windows[piece % len(sizes.windows)] if sizes.windows else 0
    attn = (LatentAttention if sizes.kv_latent else Attention)(sizes, window)
    if not sizes.experts or piece < sizes.dense_layers:
        return Block(piece, attn, Mlp(sizes, sizes.ffn), sizes)
    shared = sizes.shared_experts * sizes.expert_ffn
    beside = Mlp(sizes, shared) if shared else None
    return ExpertBlock(piece, attn, Experts(Router(sizes), ExpertMlps(sizes), beside), sizes)


class Decoder(nn.Module):
    """The whole model; see the module's first lines. Its keywords are those of `DecoderSizes`."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        of = DecoderSizes(**sizes)
        self._sizes = of
        self._depth, self._plus_one = of.layers, of.norm == "rms1"
        learned = of.sequence if of.positions == "learned" else None
        self.embed = Embed(of.vocab, of.hidden, learned, of.embed_scale)
        self.layers = nn.ModuleList(_block(of, piece) for piece in range(of.layers))
        norm = norm_of(of.norm, of.hidden, of.eps)
        self.head = Head(of.hidden, of.vocab, norm, of.logit_softcap)
        if of.tied:
            self.head.output.weight = self.embed.tokens.weight
        for name, weight in self.named_parameters():
            self.draw(name, weight)

    def forward(self, tokens: Tensor, targets: Tensor, **shared: Tensor | None) -> Tensor:
        """The summed loss. `shared` is what every block is called with: positions, if need be
        documents and noise."""
        if shared.get("positions") is None:
            time = torch.arange(tokens.shape[1], device=tokens.device)
            shared["positions"] = time.expand_as(tokens)
        x = self.embed(tokens, shared["positions"])
        shared |= {name: make(shared, x.dtype) for name, make in self.derived.items()}
        for block in self.layers:
            x = block(x, **shared)
        loss: Tensor = self.head(x, targets)
        return loss

    @property
    def derived(self) -> dict[str, Callable[[Mapping[str, Any], torch.dtype], Tensor]]:
        """What all blocks take that follows from a batch: its name, and how it is computed."""
        return {"angles": self.angles} if self._sizes.ropes else {}

    def angles(self, batch: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        """The angles of a batch's positions, see `shared_angles`; activations are of this dtype."""
        sizes = self._sizes
        return shared_angles(sizes.ropes, batch["positions"], sizes.turned_dim, dtype)

    @torch.no_grad()
    def draw(self, name: str, weight: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill the `weight` of that name, or a part, with its start, as GPT-2 did (Radford et al. 2019).

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
