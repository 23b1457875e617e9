"""nanoGPT (karpathy/nanoGPT, model.py, MIT license), shortened, with a description beside it.

The classes down to `GPT` are its own: fused attention, tied head, a forward that returns logits and the mean
loss. What a description adds stands below them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.layout import Rules, Shape
from phalanx.parallel import Model


@dataclass
class GPTConfig:
    block_size: int = 12
    vocab_size: int = 37
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        projected: Tensor = self.c_proj(y)
        return projected


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(self.gelu(self.c_fc(x)))
        return projected


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = (
            nn.LayerNorm(config.n_embd),
            CausalSelfAttention(config),
        )
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = config = GPTConfig()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(
                    [Block(config) for _ in range(config.n_layer)]
                ),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        tok_emb = self.transformer["wte"](idx)
        pos_emb = self.transformer["wpe"](pos)
        x = tok_emb + pos_emb
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        x = self.transformer["ln_f"](x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1)
        )
        return logits, loss


# ---- the description


class Embed(nn.Module):
    def __init__(self, words: nn.Module, places: nn.Module) -> None:
        super().__init__()
        self.words, self.places = words, places

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.words(tokens) + self.places(positions)
        return embedded


class SummedLoss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="sum"
        )


class Head(nn.Module):
    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm, self.output, self.loss = norm, output, SummedLoss()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        summed: Tensor = self.loss(self.output(self.norm(x)), targets)
        return summed


RULES = """\
embed.words.weight : vocab embed
embed.places.weight : position embed
h.*.mlp.c_fc.weight : ffn embed
h.*.mlp.c_fc.bias : ffn
h.*.mlp.c_proj.weight : embed ffn
h.*.mlp.c_proj.bias : embed
h.*.attn.*.weight : - -
h.*.attn.*.bias : -
*.ln_*.* : embed
head.norm.* : embed
head.output.weight : vocab embed
"""


def describe(model: GPT) -> Model:
    config, parts = model.config, model.transformer
    shape = Shape(
        "nanogpt", layers=config.n_layer, hidden=config.n_embd, heads=config.n_head,
        ffn=4 * config.n_embd, vocab=config.vocab_size, sequence=config.block_size, batch=9,
        positions="learned", gated=False, tied=True,
    )  # fmt: skip
    blocks: nn.ModuleList = parts["h"]  # type: ignore[assignment]
    pieces = (
        ("embed", Embed(parts["wte"], parts["wpe"])),
        *((f"h.{n}", block) for n, block in enumerate(blocks)),
        ("head", Head(parts["ln_f"], model.lm_head)),
    )
    return Model(
        pieces,
        Rules.parse(RULES),
        {"heads": math.gcd(4, config.n_head)},
        shape=shape,
    )
