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
from typing import Any

import torch
from torch import Tensor, nn

from . import mixers, mlps, mtp
from .block import Block
from .ends import Embed, Head
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
{mlps.RULES}\
{mtp.RULES}\
head.norm.* : embed
head.output.weight : vocab embed
"""

# Pieces of a decoder that are no blocks.
ENDS = Embed, Head, mtp.Join, mtp.PredictingHead


def _block(sizes: DecoderSizes, piece: int) -> Block:
    # Blocks of multi-token prediction are like the last one before them.
    like = min(piece, sizes.layers - 1)
    attn, kind = mixers.mixer_of(sizes, like), mlps.kind_of(sizes, like)
    return kind.block(piece, attn, kind.make(sizes), sizes)


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
