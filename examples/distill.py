"""Distillation in a user's own loop: a small model learns from a larger, frozen one.

python examples/distill.py
torchrun --nproc-per-node 4 examples/distill.py "dp2 pp2 zero1 1f1b:2"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx

VOCAB, TIME, ROWS = 64, 16, 8
HOT, SOFT = 2.0, 0.8  # temperature, and weight of the teacher's loss


class Language(nn.Module):
    """A causal transformer of torch's own layers; it returns logits."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Embedding(TIME, width)
        terms = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        blocks = (
            nn.TransformerEncoderLayer(width, 2, 2 * width, **terms)
            for _ in range(layers)
        )
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        x = self.words(tokens) + self.places(torch.arange(time))
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.out(x)


def distillation(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict]:
    """The loss against the teacher's probabilities and against the text, as sums over tokens."""
    mine, theirs = (F.log_softmax(x / HOT, -1) for x in (logits, batch["teacher"]))
    soft = F.kl_div(mine, theirs, log_target=True, reduction="sum") * HOT**2
    hard = F.cross_entropy(logits.mT, batch["targets"], reduction="sum")
    return SOFT * soft + (1 - SOFT) * hard, {"hard": hard}


def texts(steps: int) -> Iterator[dict[str, Tensor]]:
    """Sequences that count in steps of 1 to 5."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        start = torch.randint(VOCAB, (ROWS, 1), generator=draw)
        each = torch.randint(1, 6, (ROWS, 1), generator=draw)
        ids = (start + each * torch.arange(TIME + 1)) % VOCAB
        yield {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def main(world, layout: str = "", steps: int = 20) -> dict[str, Tensor]:
    torch.manual_seed(0)  # all ranks have the same teacher
    teacher, student = Language(64, 4).requires_grad_(False), Language(32, 2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    own = {"loss": distillation, "metrics": ["hard"], "clip": 1.0, "world": world}
    run = phalanx.prepare(student, optimizer, layout, example=next(texts(1)), **own)
    for batch in run.shard(texts(steps)):
        result = run.step({**batch, "teacher": teacher(batch["tokens"])})
        schedule.step()
        if run.first and result.step % 5 == 0:
            print(f"step {result.step}  loss {result.loss:.4f}  {result.metrics}")
    return run.state_dict()


if __name__ == "__main__":
    main(phalanx.join(), *sys.argv[1:2])
