"""A described model whose MLP has a gain for all its inner features; ranks of processes import it.

Under tp each rank sees the gradient of its own features alone. The rule `head` sums it, and `-` does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.layout import Rules, Shape
from phalanx.parallel import Model

VOCAB, HIDDEN, FFN, LAYERS, TIME = 256, 16, 24, 3, 6

RULES = """\
embed.words.weight : vocab embed
blocks.*.mlp.up.weight : ffn embed
blocks.*.mlp.down.weight : embed ffn
blocks.*.mlp.gain : DIM
head.output.weight : - embed
"""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.words(tokens)
        return y


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gain * torch.tanh(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(x)
        return y


class SummedLoss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), reduction="sum")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.loss = SummedLoss()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.output(x), targets)
        return loss


class Right(nn.Module):
    dim = "head"

    def __init__(self) -> None:
        super().__init__()
        self.embed = Words()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = Head()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x, targets)
        return loss


class Wrong(Right):
    dim = "-"


def describe(model: Right) -> Model:
    blocks = tuple(
        (f"blocks.{n}", block) for n, block in enumerate(model.blocks)
    )
    shape = Shape(
        "gained", layers=LAYERS, hidden=HIDDEN, heads=2, ffn=FFN, vocab=VOCAB,
        sequence=TIME, batch=4, gated=False,
    )  # fmt: skip
    pieces = (("embed", model.embed), *blocks, ("head", model.head))
    rules = Rules.parse(RULES.replace("DIM", model.dim))
    return Model(pieces, rules, shape=shape)
