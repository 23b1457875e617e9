"""1F1B: backward as soon as it can, so that a stage holds few microbatches; and how full turns are.

Stage p of P forwards P-p microbatches, then takes one backward and one forward in turn. The turns are
as many as with all forwards first, but stage p never holds more than P-p microbatches instead of
all M (Narayanan et al. 2019). Turns are counted on the real run: each message carries its sender's
count, and an operation stands one turn after the latest thing it needs (Lamport's clock). Cells are
turns x ranks. Taking the batch whole fills P x 2 of P x 2P cells: on 4 ranks 1/4. With 4
microbatches 4 x 8 of 4 x 14 are filled: 16/28.
"""

from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.note import Note, everyone
from phalanx.lab.stages.pipeline import (
    MICROBATCHES,
    Stage,
    finish,
    results_of,
    stages_of_one_process,
)


def order(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """One stage's operations: warm up, one forward and one backward in turn, drain."""
    warm = min(ranks - rank, microbatches)
    ops = [("F", i) for i in range(warm)]
    for i in range(microbatches):
        ops.append(("B", i))
        if warm + i < microbatches:
            ops.append(("F", warm + i))
    return ops


class Turns:
    """This rank's count of turns, sent along with every message."""

    def __init__(self, wire: Group) -> None:
        self.wire, self.now = wire, 0
        self.cells: list[tuple[int, str]] = []

    def send(self, x: Tensor, to: int) -> None:
        self.wire.send(x, to)
        self.wire.send(torch.tensor([self.now]), to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        theirs = torch.empty(1, dtype=torch.int64)
        self.wire.receive(x, source)
        self.wire.receive(theirs, source)
        self.now = max(self.now, int(theirs))
        return x

    def take(self, name: str) -> None:
        self.now += 1
        self.cells.append((self.now, name))


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    stage, rank = Stage(wire, size, note), world.rank
    losses: list[Tensor] = []
    first: list[Tensor] = []
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", weights=stage.weights)
        stage.begin(step)
        turns = Turns(wire)
        for kind, micro in order(rank, world.size, MICROBATCHES):
            if kind == "F":
                own = stage.first
                x = stage.own_rows(micro) if own else turns.receive(stage.empty(), rank - 1)
                y = stage.forward(micro, x)
                turns.take(f"F{micro}")
                if not stage.last:
                    turns.send(y, rank + 1)
            else:
                g = None if stage.last else turns.receive(stage.empty(), rank + 1)
                gx = stage.backward(micro, g)
                turns.take(f"B{micro}")
                if not stage.first:
                    turns.send(gx, rank - 1)
        finish(stage, losses, first)
        note.holds("after", gradients=stage.gradients, weights=stage.weights)
    held = results_of(stage, losses, first)
    cells = torch.zeros(world.size * 2 * MICROBATCHES, dtype=torch.int64)
    wire.all_gather(cells, torch.tensor([turn for turn, _ in turns.cells]))
    used, all_cells = len(cells), int(cells.max()) * world.size
    if rank == 0:
        note.says(
            f"Taking the batch whole uses 1/{world.size} of the cells. Counted here: {used} of "
            f"{all_cells}, {used // 2}/{all_cells // 2}."
        )
        _draw(note, cells.view(world.size, -1), world.size)
    held["sent"] -= size.steps * MICROBATCHES * 8 * (int(rank > 0) + int(rank < world.size - 1))
    return held | {"turns": [turn for turn, _ in turns.cells], "most": stage.most}


def _draw(note: Note, cells: Tensor, n: int) -> None:
    turns = int(cells.max())
    rows = []
    for rank in range(n):
        row = ["."] * turns
        ops = order(rank, n, MICROBATCHES)
        for turn, (kind, micro) in zip(cells[rank].tolist(), ops, strict=True):
            row[turn - 1] = f"{kind}{micro}"
        rows.append([f"rank {rank}", *row])
    note.table("who did what in which turn", ("", *map(str, range(1, turns + 1))), rows)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from stages_of_one_process(results, size)
    n, m = len(results), MICROBATCHES
    turns = max(max(held["turns"]) for held in results)
    used = Fraction(sum(len(held["turns"]) for held in results), turns * n)
    yield Claim(
        f"used cells are M/(M+P-1) = {m}/{m + n - 1}", used == Fraction(m, m + n - 1), str(used)
    )
    for rank, held in enumerate(results):
        yield equal(f"rank {rank} held P-p microbatches", held["most"], min(n - rank, m))
        # Forwards come down the diagonal; the last stage turns round at once.
        says = f"rank {rank} began in turn p and ended as the pipeline drained"
        yield equal(says, [held["turns"][0], held["turns"][-1]], [rank + 1, 2 * (m + n - 1) - rank])
        yield Claim(f"rank {rank}'s turns rise", sorted(set(held["turns"])) == held["turns"])
