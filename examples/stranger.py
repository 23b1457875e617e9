"""A model that phalanx has never seen: parallel attention and MLP, squared ReLU, learned positions.

Everything above `describe` is plain torch and knows nothing of ranks. phalanx needs only `describe`:

    .venv/bin/phalanx verify --model examples/stranger.py:Stranger --layouts "pp2 tp2 zero3 1f1b:3"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.layout import Rules, Shape
from phalanx.parallel import Model

VOCAB, HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, SEQUENCE = 257, 32, 4, 2, 48, 4, 12
SIZE = HIDDEN // HEADS  # of one head


class Core(nn.Module):
    """Softmax attention, causal; a document's tokens see only each other."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None
        if documents is not None:
            same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
            mask = same.tril().unsqueeze(1).to(q.device)  # documents are on the host
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return y.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * SIZE, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * SIZE, bias=False)
        self.core = Core()
        self.out = nn.Linear(HEADS * SIZE, HIDDEN)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        # -1 and the head's size: a rank of tp holds fewer heads and need not know.
        q, k, v = (
            w(x).unflatten(-1, (-1, SIZE)) for w in (self.query, self.key, self.value)
        )
        return self.out(self.core(q, k, v, positions, documents).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Both halves read one norm, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(HIDDEN), Attention(), Mlp()

    def forward(
        self, x: Tensor, *, positions: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, positions, documents) + self.mlp(y)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.places = nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.words(tokens) + self.places(positions)


class SummedLoss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="sum"
        )


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.loss = SummedLoss()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.output(self.norm(x)), targets)


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = Head()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens, positions)
        for block in self.blocks:
            x = block(x, positions=positions)
        return self.head(x, targets)


RULES = """\
embed.words.weight : vocab embed
embed.places.weight : position embed
*.norm.* : embed
blocks.*.attention.query.weight : heads embed
blocks.*.attention.key.weight : kv embed
blocks.*.attention.value.weight : kv embed
blocks.*.attention.out.weight : embed heads
blocks.*.attention.out.bias : embed
blocks.*.mlp.up.weight : ffn embed
blocks.*.mlp.up.bias : ffn
blocks.*.mlp.down.weight : embed ffn
blocks.*.mlp.down.bias : embed
head.output.weight : vocab embed
"""


def describe(model: Stranger) -> Model:
    """The description for phalanx: the pieces in order, the rule table, head counts, sizes."""
    blocks = tuple((f"blocks.{n}", block) for n, block in enumerate(model.blocks))
    shape = Shape(
        "stranger", layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, ffn=FFN,
        vocab=VOCAB, sequence=SEQUENCE, batch=25, positions="learned", gated=False,
    )  # fmt: skip
    return Model(
        pieces=(("embed", model.embed), *blocks, ("head", model.head)),
        rules=Rules.parse(RULES),
        counts={"heads": HEADS, "kv": KV_HEADS},
        shape=shape,
    )
