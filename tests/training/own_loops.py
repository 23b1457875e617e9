"""Loops of a user's own, as phalanx runs them and as plain torch does; ranks of processes import them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.comm import World
from phalanx.layout import Rules, Shape
from phalanx.parallel import Model

# Ranks that are processes import this file too.
EXAMPLES = str(Path(__file__).parents[2] / "examples")
sys.path.append(EXAMPLES)

VOCAB, HIDDEN, FFN, LAYERS, TIME, ROWS, STEPS, CLIP = (
    37,
    16,
    24,
    4,
    6,
    8,
    3,
    0.5,
)

RULES = """\
embed.words.weight : vocab embed
blocks.*.mlp.up.weight : ffn embed
blocks.*.mlp.up.bias : ffn
blocks.*.mlp.down.weight : embed ffn
blocks.*.mlp.down.bias : embed
*norm.* : embed
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
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class SummedLoss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), reduction="sum")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.loss = SummedLoss()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.output(self.norm(x)), targets)
        return loss


class Tiny(nn.Module):
    """A model with a description, of which `logits` is what a plain script trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Words()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = Head()

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head.output(self.head.norm(x))
        return y

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.head.loss(self.logits(tokens), targets)
        return loss


def describe(model: Tiny) -> Model:
    blocks = tuple(
        (f"blocks.{n}", block) for n, block in enumerate(model.blocks)
    )
    shape = Shape(
        "tiny", layers=LAYERS, hidden=HIDDEN, heads=2, ffn=FFN, vocab=VOCAB,
        sequence=TIME, batch=ROWS, gated=False,
    )  # fmt: skip
    pieces = (("embed", model.embed), *blocks, ("head", model.head))
    return Model(pieces, Rules.parse(RULES), shape=shape)


def tiny(dtype: torch.dtype = torch.float64) -> Tiny:
    """The model with weights that threads may draw at the same time: torch's own generator is shared."""
    model = Tiny().to(dtype)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(
                weight.shape, generator=draw, dtype=torch.float64
            )
            weight.copy_(0.3 * drawn)
    return model


def batches() -> list[dict[str, Tensor]]:
    """Batches whose tokens have weights, and a last one of fewer rows."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for rows in (ROWS, ROWS, ROWS - 3, ROWS):
        ids = torch.randint(VOCAB, (rows, TIME + 1), generator=draw)
        weights = torch.rand(rows, TIME, generator=draw, dtype=torch.float64)
        tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        made.append({"tokens": tokens, "targets": targets, "weights": weights})
    return made


def weighted_loss(
    logits: Tensor, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy with a weight for each token, and the tokens that are guessed right."""
    flat, targets = logits.flatten(0, 1), batch["targets"].flatten()
    weights = batch["weights"].flatten().to(logits.dtype)
    each = F.cross_entropy(flat, targets, reduction="none")
    right = (flat.argmax(-1) == targets).to(logits.dtype)
    metrics = {"right": (right * weights).sum(), "weight": weights.sum()}
    return (each * weights).sum(), metrics


def count_weights(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["weights"].sum()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(
        groups, lr=0.02, weight_decay=0.1
    ),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.02, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, nesterov=True
    ),
    "RMSprop": lambda groups: torch.optim.RMSprop(
        groups, lr=0.01, momentum=0.5
    ),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with two groups: biases and norms do not decay, and learn at another rate."""
    weights = [x for x in model.parameters() if x.dim() > 1]
    others = [x for x in model.parameters() if x.dim() < 2]
    still = {"params": others, "weight_decay": 0.0, "lr": 0.03}
    made: torch.optim.Optimizer = OPTIMIZERS[name](
        [{"params": weights}, still]
    )
    return made


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


@dataclass
class Trained:
    """What a loop has: losses and metrics by step, the loss of a last batch, its weights."""

    losses: list[float]
    norms: list[float]
    right: list[float]
    last: float
    weights: dict[str, Tensor]


def run_loop(
    world: World, layout: str, optimizer: str, clip: float
) -> Trained:
    """The loop with phalanx."""
    model = tiny()
    # Ranks begin with the weights of rank 0, whatever they have drawn.
    if world.rank:
        with torch.no_grad():
            model.head.output.weight.zero_()
    own = optimizer_of(optimizer, model)
    scheduler = scheduler_of(own)
    run = phalanx.prepare(
        model, own, layout, loss=weighted_loss, count=count_weights,
        metrics=["right", "weight"], clip=clip, world=world,
    )  # fmt: skip
    *train, last = batches()
    steps = []
    for batch in run.shard(train):
        steps.append(run.step(batch))
        scheduler.step()
    (own_rows,) = run.shard([last])
    evaluated = run.evaluate(own_rows)
    assert abs(evaluated.metrics["weight"] - 1.0) < 1e-12
    return Trained(
        [step.loss for step in steps],
        [step.norm for step in steps],
        [step.metrics["right"] for step in steps],
        evaluated.loss,
        run.state_dict(),
    )


def plain_loop(optimizer: str, clip: float) -> Trained:
    """The same script in plain torch."""
    model = tiny()
    own = optimizer_of(optimizer, model)
    scheduler = scheduler_of(own)
    *train, last = batches()
    made = Trained([], [], [], 0.0, {})
    for batch in train:
        total, metrics = weighted_loss(model.logits(batch["tokens"]), batch)
        count = batch["weights"].sum()
        loss = total / count
        own.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), clip or float("inf")
        )
        own.step()
        scheduler.step()
        made.losses.append(loss.item())
        made.norms.append(float(norm))
        made.right.append(float(metrics["right"] / count))
    with torch.no_grad():
        total, _ = weighted_loss(model.logits(last["tokens"]), last)
    made.last = float(total / last["weights"].sum())
    made.weights = model.state_dict()
    return made


def distilled(world: World, layout: str, steps: int) -> dict[str, Tensor]:
    """The student of examples/distill.py."""
    import distill

    with in_float64():
        weights: dict[str, Tensor] = distill.main(world, layout, steps)
        return weights


def example(
    world: World, name: str, layout: str, steps: int
) -> dict[str, Tensor]:
    """The weights that an example has after so many steps."""
    with in_float64():
        module = import_module(name)
        weights: dict[str, Tensor] = module.main(world, layout, steps)
        return weights


@contextmanager
def in_float64() -> Iterator[None]:
    """Modules are made in float64; Adam makes of a rounding in float32 a step of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
