"""Hand-written Llama-style decoder in plain torch, without phalanx.

It has the parameter names of `Decoder`, so that weights can be copied, and computes the
same loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-5
THETA = 10000.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin), -1
    )


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.wq = nn.Linear(hidden, heads * self.size, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            # (batch, heads, time, size)
            linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(
        self, hidden: int, heads: int, kv_heads: int, ffn: int
    ) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(hidden, EPS)
        self.attn = Attention(hidden, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(hidden, EPS)
        self.mlp = Mlp(hidden, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Embed(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        return x


class Head(nn.Module):
    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, EPS)
        self.output = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        # The loss of 16-bit logits is computed in float32.
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(
            logits.flatten(0, 1).to(wide), targets.flatten(), reduction="sum"
        )


class HandModel(nn.Module):
    """Returns the summed loss of tokens and targets (batch, time); positions count from
    0."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        vocab: int,
        sequence: int,
    ) -> None:
        super().__init__()
        self.embed = Embed(vocab, hidden)
        self.layers = nn.ModuleList(
            Block(hidden, heads, kv_heads, ffn) for _ in range(layers)
        )
        self.head = Head(hidden, vocab)
        size = hidden // heads
        frequency = THETA ** -(torch.arange(0, size, 2) / size)
        # (time, size / 2)
        angles = torch.outer(torch.arange(sequence), frequency)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        for block in self.layers:
            x = block(x, cos, sin)
        loss: Tensor = self.head(x, targets)
        return loss
