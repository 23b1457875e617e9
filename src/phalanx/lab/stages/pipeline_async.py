"""Pipeline with messages in flight: every receive is posted before it is needed, no send waits.

The same stages and the same order as the plain pipeline. The difference is when a rank asks: room
for all microbatches is offered at the start of the step, so a neighbour's message lands while this
rank computes, and waiting begins only when there is nothing else to do. It costs the memory of the
offered room. What it cannot do is fill the turns in which there is no work: that takes another order.
"""

from collections.abc import Iterator

from torch import Tensor

from phalanx.comm import Group, Work, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.note import Note, everyone
from phalanx.lab.stages.pipeline import (
    MICROBATCHES,
    Stage,
    finish,
    results_of,
    stages_of_one_process,
)


class Offers:
    """Room for messages from one neighbour, all offered at once, taken in order."""

    def __init__(self, wire: Group, stage: Stage, source: int) -> None:
        self.rooms = [stage.empty() for _ in range(MICROBATCHES)]
        self.works: list[Work] = [wire.receive(x, source, wait=False) for x in self.rooms]

    def take(self) -> Tensor:
        self.works.pop(0).wait()
        return self.rooms.pop(0)


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    stage = Stage(wire, size, note)
    losses: list[Tensor] = []
    first: list[Tensor] = []
    in_flight: list[int] = []
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", weights=stage.weights)
        stage.begin(step)
        left = None if stage.first else Offers(wire, stage, wire.rank - 1)
        right = None if stage.last else Offers(wire, stage, wire.rank + 1)
        for micro in range(MICROBATCHES):
            x = left.take() if left else stage.own_rows(micro)
            in_flight.append(open_receives(left, right))
            y = stage.forward(micro, x)
            if right:
                wire.send(y, to=wire.rank + 1)
        for micro in range(MICROBATCHES):
            g = right.take() if right else None
            in_flight.append(open_receives(left, right))
            gx = stage.backward(micro, g)
            if left:
                wire.send(gx, to=wire.rank - 1)
        finish(stage, losses, first)
        note.holds("after", gradients=stage.gradients, weights=stage.weights)
    if wire.rank == 0:
        said = " ".join(map(str, in_flight[: 2 * MICROBATCHES]))
        note.says(f"Receives open on rank 0 while it computed, operation by operation: {said}.")
    return results_of(stage, losses, first) | {"in flight": in_flight}


def open_receives(*offers: Offers | None) -> int:
    """How many messages may arrive while this rank computes."""
    return sum(len(each.works) for each in offers if each)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from stages_of_one_process(results, size)
    n, m = len(results), MICROBATCHES
    for rank, held in enumerate(results):
        left, right = rank > 0, rank < n - 1
        forwards = [left * (m - 1 - i) + right * m for i in range(m)]
        backwards = [right * (m - 1 - i) for i in range(m)]
        says = f"rank {rank}: receives were open while it computed"
        yield equal(says, held["in flight"], (forwards + backwards) * size.steps)
