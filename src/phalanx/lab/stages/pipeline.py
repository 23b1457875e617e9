"""Pipeline: the batch in microbatches, so that stages work at the same time, forward and backward.

Each rank has a run of layers. While it works on one microbatch its left neighbour works on the next.
All forwards first, then all backwards (GPipe, Huang et al. 2019): every stage holds what all
microbatches keep for backward. Gradients add up over microbatches to those of the batch, each loss
being its part of the batch's mean. With M microbatches and P stages of equal cost a rank works
M of M+P-1 turns, each way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import Kept, backward, batch, forward, loss_of, one_process, start, update
from phalanx.lab.note import Note, everyone

MICROBATCHES = 4


class Stage:
    """A run of layers: forward and backward of one microbatch, gradients added up."""

    def __init__(self, wire: Group, size: Size, note: Note) -> None:
        self.wire, self.size, self.note = wire, size, note
        self.weights = start(size)[size.part("layers", wire.rank, wire.size)]
        self.first, self.last = wire.rank == 0, wire.rank == wire.size - 1
        self.rows = size.batch // MICROBATCHES
        size.part("batch", 0, MICROBATCHES)
        self.begin(0)

    def begin(self, step: int) -> None:
        self.step = step
        self.gradients = [torch.zeros_like(w) for w in self.weights]
        self.kept: dict[int, list[Kept]] = {}
        self.out: dict[int, Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64)
        self.most = 0

    def own_rows(self, micro: int) -> Tensor:
        """The first stage's input."""
        return batch(self.size, self.step)[self.size.part("batch", micro, MICROBATCHES)]

    def empty(self) -> Tensor:
        """Room for a message: an activation, or its gradient."""
        return torch.empty(self.rows, self.size.width, dtype=torch.float64)

    def forward(self, micro: int, x: Tensor) -> Tensor:
        with self.note.doing(f"F{micro}"):
            kept = []
            for w in self.weights:
                x, saved = forward(x, w)
                kept.append(saved)
            self.kept[micro] = kept
            self.most = max(self.most, len(self.kept))
            if self.last:
                self.out[micro] = x
        return x

    def backward(self, micro: int, g: Tensor | None) -> Tensor:
        with self.note.doing(f"B{micro}"):
            if g is None:  # the last stage: from its own loss
                loss, g = loss_of(self.out.pop(micro), rows=self.size.batch)
                self.loss += loss
            kept = self.kept.pop(micro)
            for i in reversed(range(len(self.weights))):
                g, gradient = backward(g, kept.pop(), self.weights[i])
                self.gradients[i] += gradient
        return g


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    stage = Stage(wire, size, note)
    losses: list[Tensor] = []
    first: list[Tensor] = []
    most = 0
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", weights=stage.weights)
        stage.begin(step)
        for micro in range(MICROBATCHES):
            x = stage.own_rows(micro) if stage.first else stage.empty()
            if not stage.first:
                wire.receive(x, source=wire.rank - 1)
            y = stage.forward(micro, x)
            if not stage.last:
                wire.send(y, to=wire.rank + 1)
        for micro in range(MICROBATCHES):
            g = None if stage.last else stage.empty()
            if g is not None:
                wire.receive(g, source=wire.rank + 1)
            gx = stage.backward(micro, g)
            if not stage.first:
                wire.send(gx, to=wire.rank - 1)
        most = max(most, stage.most)
        finish(stage, losses, first)
        note.holds("after", gradients=stage.gradients, weights=stage.weights)
    return results_of(stage, losses, first) | {"most": most}


def finish(stage: Stage, losses: list[Tensor], first: list[Tensor]) -> None:
    """The update at the end of a step, and what is remembered of it."""
    losses.append(stage.loss.clone())
    if not first:
        first += [g.clone() for g in stage.gradients]
    for w, gradient in zip(stage.weights, stage.gradients, strict=True):
        update(w, gradient)


def results_of(stage: Stage, losses: list[Tensor], first: list[Tensor]) -> Held:
    """What is handed to the check: the last stage tells everyone the losses."""
    sent = stage.note.sent()
    told = torch.stack(losses)
    stage.wire.broadcast(told, root=stage.wire.size - 1)
    return {"losses": told, "gradients": first, "weights": stage.weights, "sent": sent}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from stages_of_one_process(results, size)
    for rank, held in enumerate(results):
        yield equal(f"rank {rank} held all microbatches at once", held["most"], MICROBATCHES)


def stages_of_one_process(results: list[Held], size: Size) -> Iterator[Claim]:
    """Every rank's layers are as one process trains them, and only activations were sent."""
    n, alone = len(results), one_process(size)
    for rank, held in enumerate(results):
        mine = size.part("layers", rank, n)
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        yield equal(
            f"rank {rank}: gradients of its layers", held["gradients"], alone.gradients[mine]
        )
        yield equal(f"rank {rank}: its layers at the end", held["weights"], alone.weights[mine])
        neighbours = (rank > 0) + (rank < n - 1)
        formula = size.steps * neighbours * 8 * size.batch * size.width
        yield equal(f"rank {rank} sent activations to each neighbour", held["sent"], formula)
