"""Direct preference optimization in a loop of one's own: the model learns to prefer one answer to another.

python examples/dpo.py
torchrun --nproc-per-node 2 examples/dpo.py "dp2 zero1"
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import torch
from distill import TIME, VOCAB, Language
from torch import Tensor
from torch.nn import functional as F

import phalanx

ROWS, BETA = 8, 0.5


def said(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each text (rows, 2), by its targets that are not -100."""
    flat, wanted = logits.flatten(0, 2), targets.flatten()
    each = F.cross_entropy(flat, wanted, ignore_index=-100, reduction="none")
    return -each.view(targets.shape).sum(-1)


def preference(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict]:
    """A row is a pair: its chosen answer's tokens, then those of the rejected one."""
    gain = said(logits, batch["answers"]) - batch["reference"]
    margin = BETA * (gain[:, 0] - gain[:, 1])
    return -F.logsigmoid(margin).sum(), {"right": (margin > 0).sum()}


class Pairs(torch.nn.Module):
    """A language model that reads both texts of each row."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self.language = language

    def forward(self, pairs: Tensor) -> Tensor:
        return self.language(pairs.flatten(0, 1)).unflatten(0, (-1, 2))


def pairs(steps: int) -> Iterator[dict[str, Tensor]]:
    """Two continuations of one beginning: counting on by 1 is preferred to counting by 2."""
    draw = torch.Generator().manual_seed(0)
    step = torch.tensor([1, 2]).view(1, 2, 1)
    for _ in range(steps):
        start = torch.randint(VOCAB, (ROWS, 1, 1), generator=draw)
        ids = (start + step * torch.arange(TIME + 1)) % VOCAB
        answers = ids[..., 1:].clone()
        answers[..., : TIME // 2] = -100  # the prompt
        yield {"pairs": ids[..., :-1], "answers": answers}


def main(world, layout: str = "", steps: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Pairs(Language(32, 2))
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = {"loss": preference, "metrics": ["right"], "world": world}
    run = phalanx.prepare(model, optimizer, layout, example=next(pairs(1)), **own)
    for batch in run.shard(pairs(steps)):
        known = said(reference(batch["pairs"]), batch["answers"])
        result = run.step({**batch, "reference": known})
        if run.first and result.step % 4 == 0:
            print(f"step {result.step}  loss {result.loss:.4f}  {result.metrics}")
    return run.state_dict()


if __name__ == "__main__":
    main(phalanx.join(), *sys.argv[1:2])
