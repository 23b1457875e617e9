"""A decoder-only transformer in plain torch. GPT-2, Llama 2/3, Mistral, Qwen2/3, Gemma
2/3, Phi-3, OLMo-2, Mixtral, Qwen3 MoE, DeepSeek-V3 and gpt-oss are configurations of
its constructor.

The model is a list of pieces: `embed` (tokens to activations), `layers` (blocks, each
called `x = block(x, **shared)`) and `head` (last norm, output projection, loss). Each
can be called alone; `Decoder.forward` only chains them. Activations are (B, T, hidden).

No forward reads a head count, a width or the vocabulary size, so weights may be sharded
before a call. The attention core, the token lookup and the loss are child modules, so
each can be replaced by one that works on a shard. Not here: sampling.
"""

from __future__ import annotations

import fnmatch
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import mixers, mtp
from .ends import Embed, Head
from .experts import ExpertMlps, Experts, Router, Sending, SharedGate, gated
from .noise import Dropout, block_noise
from .norm import norm_of
from .side_by_side import SideBySide
from .sizes import DecoderSizes

# A name pattern and one dim name for each dim of the tensor; the first match counts.
# `layout/rules.py` maps dim names to mesh axes, and "-" is never sharded.
RULES = f"""\
embed.tokens.weight : vocab embed
embed.positions.weight : position embed
layers.*.piece : -
layers.*.attn_norm.* : embed
layers.*.attn_post_norm.* : embed
{mixers.RULES}\
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
layers.*.mlp.shared_gate.weight : - embed
layers.*.mlp.routed.gate : experts ffn embed
layers.*.mlp.routed.up : experts ffn embed
layers.*.mlp.routed.down : experts embed ffn
layers.*.mlp.routed.gate_bias : experts ffn
layers.*.mlp.routed.up_bias : experts ffn
layers.*.mlp.routed.down_bias : experts partial
{mtp.RULES}\
head.norm.* : embed
head.output.weight : vocab embed
"""


class Mlp(SideBySide):
    """down(act(gate(x)) * up(x)) when gated, else down(act(up(x))); gelu in its tanh form."""

    side_by_side = ("gate", "up")

    def __init__(self, sizes: DecoderSizes, width: int) -> None:
        super().__init__()
        self.activation = sizes.activation
        up, bias = (sizes.hidden, width), sizes.bias == "all"
        self.gate = nn.Linear(*up, bias=bias) if sizes.gated else None
        self.up = nn.Linear(*up, bias=bias)
        self.down = nn.Linear(width, sizes.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            wide = self.up(x)  # (B, T, ffn)
            wide = (
                F.silu(wide)
                if self.activation == "silu"
                else F.gelu(wide, approximate="tanh")
            )
        else:
            gate, up = self.products(x)  # (B, T, ffn)
            wide = gated(gate, up, self.activation)
        y: Tensor = self.down(wide)  # (B, T, hidden)
        return y


class NumberedPart(nn.Module):
    """A block of the decoder, or a part of one.

    `piece` is the block's number in the model and seeds its dropout. It is a tensor
    because an int that differs from block to block would make torch.compile compile
    each block anew.
    """

    piece: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        # The underscore hides the number: blocks that differ in nothing else are of one
        # kind.
        self._number = number
        self.register_buffer("piece", torch.tensor([number]), persistent=False)

    def own_noise(self, noise: Tensor | None) -> Tensor | None:
        return None if noise is None else block_noise(noise, self.piece)

    def reset_buffers(self) -> None:
        """Number the block again, after `to_empty` has left its number undefined."""
        self.piece.fill_(self._number)


class Block(NumberedPart):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Norms may also, or only, follow attention and the MLP. A norm that is None is
    absent.
    """

    def __init__(
        self,
        piece: int,
        attn: nn.Module,
        mlp: nn.Module,
        sizes: DecoderSizes,
    ) -> None:
        super().__init__(piece)
        norm = partial(norm_of, sizes.norm, sizes.hidden, sizes.eps)
        before, behind = sizes.norms != "post", sizes.norms != "pre"
        self.attn_norm = norm() if before else None
        self.mlp_norm = norm() if before else None
        self.attn_post_norm = norm() if behind else None
        self.mlp_post_norm = norm() if behind else None
        self.attn, self.mlp = attn, mlp
        # Without a norm, the residual connection reads the input too.
        for part in (attn, mlp):
            if isinstance(part, SideBySide):
                part.only_reader = before and not part.reads_elsewhere
        # Dropout stands outside attn and mlp. So sums over ranks that complete their
        # outputs run first, and where the residual stream is sharded in time, its noise
        # is sharded with it.
        self.attn_dropout = Dropout(sizes.dropout, place=1)
        self.mlp_dropout = Dropout(sizes.dropout, place=2)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        noise = self.own_noise(noise)
        x = _attend(self, x, positions, angles, documents, document_ids, noise)
        m = self.mlp(_through(self.mlp_norm, x))
        return _add_mlp(self, x, m, noise)


class ExpertBlock(Block):
    """A block with experts. `valid` (B, T) marks the tokens that are not padding.

    Its router's losses are left out here: see `with_losses`.
    """

    mlp: Experts

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        noise = self.own_noise(noise)
        x = _attend(self, x, positions, angles, documents, document_ids, noise)
        m = self.mlp(_through(self.mlp_norm, x), valid)
        return _add_mlp(self, x, m, noise)

    def with_losses(self) -> nn.Module:
        """Return the block as a module that also outputs its router's loss terms."""
        return BlockWithLosses(self) if self.mlp.router.has_losses else self

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Split the block where tokens travel: routing, experts, merging.

        The three modules share the block's weights.
        """
        return RoutingPart(self), ExpertsPart(self), MergingPart(self)


class BlockWithLosses(NumberedPart):
    """A block with experts that also outputs the terms of its router's losses."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__(block._number)
        # The block's attribute names, so that the rules above match these weights too.
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.attn_post_norm, self.mlp_post_norm = (
            block.attn_post_norm,
            block.mlp_post_norm,
        )
        self.attn, self.mlp = block.attn, block.mlp
        self.attn_dropout, self.mlp_dropout = (
            block.attn_dropout,
            block.mlp_dropout,
        )

    @property
    def loss_router(self) -> Router:
        """The router whose loss terms this module outputs."""
        return self.mlp.router

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> dict[str, Tensor]:
        noise = self.own_noise(noise)
        x = _attend(self, x, positions, angles, documents, document_ids, noise)
        m, terms = self.mlp.with_terms(_through(self.mlp_norm, x), valid)
        return {"x": _add_mlp(self, x, m, noise), **terms}


class RoutingPart(NumberedPart):
    """The first part of a block with experts: attention, routing, and sorted tokens."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__(block._number)
        # As in the block: the attributes' names are the weights' names in the rules.
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.attn_post_norm = block.attn_post_norm
        self.attn = block.attn
        # The router, the shared experts and the sort by expert; no routed weights.
        self.mlp = Sending(block.mlp)
        self.attn_dropout = block.attn_dropout

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of the outputs for the next parts."""
        return ("x", *self.mlp.gives)

    @property
    def loss_router(self) -> Router | None:
        """The router whose loss terms this module outputs, if it has losses."""
        router = self.mlp.router
        return router if router.has_losses else None

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> dict[str, Tensor]:
        noise = self.own_noise(noise)
        x = _attend(self, x, positions, angles, documents, document_ids, noise)
        return {"x": x, **self.mlp(_through(self.mlp_norm, x), valid)}


class ExpertsPart(nn.Module):
    """The second part of a block with experts: MLPs of the tokens received."""

    gives = ("sent",)

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"routed": block.mlp.routed.products()})

    def forward(self, sent: Tensor, routes: Tensor) -> dict[str, Tensor]:
        """Apply experts to `sent` (n, hidden), in runs `routes` (senders, experts)."""
        routed: Any = self.mlp["routed"]
        return {"sent": routed.on_runs(sent, routes)}


class MergingPart(NumberedPart):
    """The last part of a block with experts: adds their results to the residual."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__(block._number)
        self.mlp_post_norm = block.mlp_post_norm
        self.merge = block.mlp.routed.merge
        self.mlp_dropout = block.mlp_dropout

    def forward(
        self,
        x: Tensor,
        sent: Tensor,
        gates: Tensor,
        order: Tensor,
        *,
        shared: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        # sent: (n, hidden), the experts' results, back where the tokens came from
        m = self.merge(sent, gates, order)  # (B, T, hidden)
        m = m if shared is None else m + shared
        return _add_mlp(self, x, m, self.own_noise(noise))


# ---- shared by blocks and their parts


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _attend(
    block: Block | BlockWithLosses | RoutingPart,
    x: Tensor,
    positions: Tensor,
    angles: Tensor | None,
    documents: Tensor | None,
    document_ids: Tensor | None,
    noise: Tensor | None,
) -> Tensor:
    """The first half of a block: attention and its residual connection."""
    # (B, T, hidden); with `seq`, x holds this rank's part of the time dim
    normed = _through(block.attn_norm, x)
    a = block.attn(normed, positions, documents, noise, angles, document_ids)
    a = _through(block.attn_post_norm, a)
    if noise is not None:
        a = block.attn_dropout(a, noise)
    y: Tensor = x + a
    return y


def _add_mlp(
    block: Block | BlockWithLosses | MergingPart,
    x: Tensor,
    m: Tensor,
    noise: Tensor | None,
) -> Tensor:
    """The end of a block: adds the MLP's output `m` (B, T, hidden) to the residual."""
    m = _through(block.mlp_post_norm, m)
    if noise is not None:
        m = block.mlp_dropout(m, noise)
    y: Tensor = x + m
    return y


def _block(sizes: DecoderSizes, piece: int) -> Block:
    # Blocks of multi-token prediction are like the last one before them.
    like = min(piece, sizes.layers - 1)
    attn = mixers.mixer_of(sizes, like)
    if not sizes.experts or like < sizes.dense_layers:
        return Block(piece, attn, Mlp(sizes, sizes.ffn), sizes)
    # Shared experts add up, so they are one MLP of their summed width.
    shared = sizes.shared_experts * sizes.expert_ffn
    beside = Mlp(sizes, shared) if shared else None
    gate = SharedGate(sizes.hidden) if sizes.shared_gate else None
    mlp = Experts(Router(sizes), ExpertMlps(sizes), beside, gate)
    return ExpertBlock(piece, attn, mlp, sizes)


class Decoder(nn.Module):
    """The whole model; its keywords are the fields of `DecoderSizes`."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        of = DecoderSizes(**sizes)
        self._sizes = of
        self._depth, self._plus_one = of.layers, of.norm == "rms1"
        learned = of.sequence if of.positions == "learned" else None
        self.embed = Embed(
            of.vocab, of.hidden, learned, of.embed_scale, of.dropout
        )
        self.layers = nn.ModuleList(
            _block(of, piece) for piece in range(of.layers + of.mtp)
        )
        self.mtp = nn.ModuleList(
            mtp.join(of, self.embed.tokens, depth) for depth in range(of.mtp)
        )
        self.head = mtp.head(of) if of.mtp else Head.of(of)
        # One parameter under two names: its gradient is the sum of both uses.
        if of.tied:
            self.head.output.weight = self.embed.tokens.weight
        for name, weight in self.named_parameters():
            self.draw(name, weight)

    def forward(
        self, tokens: Tensor, targets: Tensor, **shared: Tensor | None
    ) -> Tensor:
        """Return the summed loss; `shared` are positions, documents and noise.

        Modules of multi-token prediction take no part in it.
        """
        if shared.get("positions") is None:
            time = torch.arange(tokens.shape[1], device=tokens.device)
            shared["positions"] = time.expand_as(tokens)
        noise = shared.get("noise")
        x = self.embed(tokens, shared["positions"], noise)  # (B, T, hidden)
        # Derived once here rather than in each block, for example the rotary angles.
        shared |= {
            name: make(shared, x.dtype) for name, make in self.derived.items()
        }
        for block in self.layers[: self._depth]:
            x = block(x, **shared)
        # scalar: a sum over tokens
        loss: Tensor = self.head.loss(self.head.logits(x), targets)
        return loss

    @property
    def derived(
        self,
    ) -> dict[str, mixers.Derive]:
        """Tensors for all blocks derived from a batch: names and their functions."""
        return mixers.derived(self._sizes)

    @torch.no_grad()
    def draw(
        self,
        name: str,
        weight: Tensor,
        generator: torch.Generator | None = None,
    ) -> None:
        """Fill a weight, or a part of it, with initial values like GPT-2's.

        Initialization goes by name, so each weight can be drawn alone, in any order, on
        any device.
        """
        if mixers.draw(name, weight, generator):
            return
        if name.endswith("bias"):
            weight.zero_()
        elif name.endswith("norm.weight"):
            weight.fill_(0.0 if self._plus_one else 1.0)
        else:
            # Each block adds twice to the residual stream. This keeps the stream's
            # variance constant in depth.
            into_residual = name.endswith(
                ("wo.weight", "attn.out.weight", "down.weight", "routed.down")
            )
            spread = (
                0.02 / math.sqrt(2 * self._depth) if into_residual else 0.02
            )
            weight.normal_(0.0, spread, generator=generator)


def describe(model: Decoder) -> tuple[tuple[tuple[str, nn.Module], ...], str]:
    """Return the pieces, and a line `pattern : dim dim` for every weight and buffer.

    Dims: vocab, embed (the residual width), experts, heads and kv (number of heads
    times head_dim), groups (of heads in other mixers), head (one head's
    features, shared by all heads), ffn, position.
    Lines that match no name are left out.
    """
    blocks = tuple(
        (f"layers.{n}", block) for n, block in enumerate(model.layers)
    )
    names = [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]
    names += [name for name, _ in model.named_buffers()]
    lines = [
        line
        for line in RULES.splitlines()
        if fnmatch.filter(names, line.split(" : ")[0])
    ]
    # Each module of multi-token prediction is a join and a block behind the others.
    count = len(blocks) - len(model.mtp)
    ahead = []
    for depth, join in enumerate(model.mtp):
        ahead += [(f"mtp.{depth}", join), blocks[count + depth]]
    ends = ("embed", model.embed), ("head", model.head)
    pieces = (ends[0], *blocks[:count], *ahead, ends[1])
    return pieces, "\n".join(lines)
