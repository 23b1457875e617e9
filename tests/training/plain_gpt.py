"""A language model in the form of nanoGPT's model.py, without a word about phalanx.

A configuration is its only argument. It has fused attention, a tied head, a start of its own, (logits, mean
loss), and -1 for targets that count nothing. Beside it stand smaller modules.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class PlainConfig:
    block_size: int = 24
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.0
    bias: bool = True


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(
            config.n_embd, 3 * config.n_embd, bias=config.bias
        )
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("mask", mask)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for y in (q, k, v)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(
            config.n_embd, 4 * config.n_embd, bias=config.bias
        )
        self.c_proj = nn.Linear(
            4 * config.n_embd, config.n_embd, bias=config.bias
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), Attention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), Mlp(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Plain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        print(
            f"number of parameters: {sum(p.numel() for p in self.parameters())}"
        )

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.3)
        if isinstance(module, nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        device = idx.device
        _, t = idx.size()
        assert t <= self.config.block_size, (
            f"{t} tokens, {self.config.block_size} fit"
        )
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


class Planned(Plain):
    """With a plan for tp, as the code of its author would hand it to parallelize_module."""

    def tp_plan(self):
        linears = {"attn.c_attn": "colwise", "attn.c_proj": "rowwise"}
        return linears | {"mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}


class Shared(nn.Module):
    """Attention of which query heads share keys and values, with a norm of a head's features."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 6
        self.wq, self.wk, self.wv = (
            nn.Linear(24, n, bias=False) for n in (24, 12, 12)
        )
        self.norm, self.wo = nn.LayerNorm(6), nn.Linear(24, 24)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.norm(self.wq(x).view(b, t, -1, self.head_dim)).transpose(1, 2)
        k = (
            self.wk(x)
            .view(b, t, self.num_kv_heads, self.head_dim)
            .transpose(1, 2)
        )
        v = (
            self.wv(x)
            .view(b, t, self.num_kv_heads, self.head_dim)
            .transpose(1, 2)
        )
        repeated = self.num_heads // self.num_kv_heads
        k, v = (y.repeat_interleave(repeated, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up in one linear; `over` mixes all features between, which no part of them can."""

    def __init__(self, over):
        super().__init__()
        self.gate_up, self.down = nn.Linear(24, 40), nn.Linear(20, 24)
        self.over = over

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(
            F.softmax(gate, -1) * up if self.over else F.silu(gate) * up
        )


class GroupedBlock(nn.Module):
    def __init__(self, over):
        super().__init__()
        self.attention, self.mlp = Shared(), Gated(over)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Grouped(nn.Module):
    def __init__(self, over: bool = False):
        super().__init__()
        self.words = nn.Embedding(37, 24)
        self.layers = nn.ModuleList(GroupedBlock(over) for _ in range(3))
        self.head = nn.Linear(24, 37)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class GroupedPlanned(Grouped):
    tp_plan = {  # noqa: RUF012 - as its author writes it
        "attention.w[qkv]": "colwise",
        "attention.wo": "rowwise",
        "mlp.gate_up": "colwise",
        "mlp.down": "rowwise",
    }


class Words(nn.Module):
    """Logits alone, and no table of positions; its arguments are its own."""

    def __init__(self, width: int, words: int = 256, layers: int = 2):
        super().__init__()
        self.words = nn.Embedding(words, width)
        linears = (nn.Linear(width, width) for _ in range(layers))
        self.layers = nn.ModuleList(linears)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Around(Words):
    """What its forward computes around a block needs more than what the block before gives."""

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


class Pixels(nn.Module):
    """No tokens anywhere."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = x.float()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
