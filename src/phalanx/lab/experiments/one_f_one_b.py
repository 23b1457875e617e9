"""1F1B: backward as soon as possible, so that a stage keeps few microbatches; and how many turns are used.

Stage p of P runs P-p forwards, then one backward and one forward in turn. There are as many turns
as with all forwards first, but stage p never keeps more than P-p microbatches instead of all M
(Narayanan et al. 2019). Turns are counted in the real run: each message carries its sender's count,
and an operation stands one turn after the latest operation that it needs (Lamport's clock). Cells
are turns x ranks. The whole batch at once fills P x 2 of P x 2P cells: 1/4 on 4 ranks. With 4
microbatches 4 x 8 of 4 x 14 are filled: 16/28.
"""

from fractions import Fraction

import torch
from torch import Tensor

from phalanx.lab.experiments.pipeline import MICROBATCHES, PipelineStage
from phalanx.lab.lab import Lab


def order(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """One stage's operations: warm up, one forward and one backward in turn, drain."""
    warm = min(ranks - rank, microbatches)
    ops = [("F", i) for i in range(warm)]
    for i in range(microbatches):
        ops.append(("B", i))
        if warm + i < microbatches:
            ops.append(("F", warm + i))
    return ops


class CountedStage(PipelineStage):
    """A stage that counts its turns, and sends the count along with every message."""

    def begin(self, step: int) -> None:
        super().begin(step)
        self.now, self.turns = 0, list[int]()

    def receive(self, source: int) -> Tensor:
        x, theirs = super().receive(source), torch.empty(1, dtype=torch.int64)
        self.group.receive(theirs, source)
        self.now = max(self.now, int(theirs))
        return x

    def send(self, x: Tensor, to: int) -> None:
        super().send(x, to)
        self.group.send(torch.tensor([self.now + 1]), to)  # the turn that ends with this message

    def forward(self, micro: int) -> None:
        super().forward(micro)
        self.take()

    def backward(self, micro: int) -> None:
        super().backward(micro)
        self.take()

    def take(self) -> None:
        self.now += 1
        self.turns.append(self.now)


def run(lab: Lab) -> None:
    stage, rank, n, m = CountedStage(lab), lab.rank, lab.n, MICROBATCHES
    # It keeps P-p microbatches; with every activation goes a count of eight bytes.
    stage.train(order(rank, n, m), most=min(n - rank, m), extra=8 * m)
    cells = lab.everyone(torch.tensor(stage.turns))  # (ranks, operations)
    used, count = cells.numel(), int(cells.max()) * n
    if rank == 0:
        lab.note(
            f"The whole batch at once uses 1/{n} of the cells. Counted here: {used} of {count}, "
            f"{used // 2}/{count // 2}."
        )
        show(lab, cells.tolist())
    says = f"used cells are M/(M+P-1) = {m}/{m + n - 1}"
    lab.claim(says, Fraction(used, count) == Fraction(m, m + n - 1))
    # The first forwards come down the diagonal; the last stage begins backward at once.
    ends = [rank + 1, 2 * (m + n - 1) - rank]
    says = "it began in turn p and ended as the pipeline drained"
    lab.claim(says, [stage.turns[0], stage.turns[-1]], ends)
    lab.claim("its turns rise", sorted(set(stage.turns)), stage.turns)


def show(lab: Lab, cells: list[list[int]]) -> None:
    turns = range(1, max(map(max, cells)) + 1)
    rows = []
    for rank, taken in enumerate(cells):
        ops = (f"{kind}{micro}" for kind, micro in order(rank, lab.n, MICROBATCHES))
        row = dict(zip(taken, ops, strict=True))
        rows.append([f"rank {rank}", *(row.get(turn, ".") for turn in turns)])
    lab.table("which operation each rank runs in each turn", ("", *map(str, turns)), rows)
