"""Pipeline with messages in flight: every receive is posted before it is needed, no send waits.

The same stages and the same order as the plain pipeline. The difference is when a rank asks: space
for all microbatches is posted at the start of the step, so a neighbour's message arrives while this
rank computes, and it waits only when there is nothing else to do. That costs the memory of the
space. It cannot fill the turns in which there is no work: that needs another order.
"""

from torch import Tensor

from phalanx.comm import Work
from phalanx.lab.claims import Claims, Held, Results, Size, every
from phalanx.lab.experiments.pipeline import MICROBATCHES, Stage, trained_in_stages
from phalanx.lab.lab import Lab


class Posted:
    """Receives from one neighbour, all posted at once, taken in order."""

    def __init__(self, stage: Stage, source: int) -> None:
        self.space = [stage.empty() for _ in range(MICROBATCHES)]
        group = stage.lab.group
        self.works: list[Work] = [group.receive(x, source, wait=False) for x in self.space]

    def take(self) -> Tensor:
        self.works.pop(0).wait()
        return self.space.pop(0)


def run(lab: Lab) -> Held:
    stage, group, rank = Stage(lab), lab.group, lab.rank
    in_flight: list[int] = []

    def train_step(step: int) -> tuple[Tensor | None, list[Tensor]]:
        stage.begin(step)
        left = None if stage.first else Posted(stage, rank - 1)
        right = None if stage.last else Posted(stage, rank + 1)
        for micro in range(MICROBATCHES):
            x = left.take() if left else stage.own_rows(micro)
            in_flight.append(sum(len(side.works) for side in (left, right) if side))
            y = stage.forward(micro, x)
            if right:
                group.send(y, to=rank + 1)
        for micro in range(MICROBATCHES):
            g = right.take() if right else None
            in_flight.append(sum(len(side.works) for side in (left, right) if side))
            gx = stage.backward(micro, g)
            if left:
                group.send(gx, to=rank - 1)
        return stage.finish()

    held = lab.train(train_step, stage.weights)
    if rank == 0:
        counts = " ".join(map(str, in_flight[: 2 * MICROBATCHES]))
        lab.note(f"Receives open on rank 0 while it computed, operation by operation: {counts}.")
    return held | {"sent": lab.sent(), "in flight": in_flight}


def check(results: Results, size: Size) -> Claims:
    yield from trained_in_stages(results, size)
    n, m = len(results), MICROBATCHES

    def open_receives(rank: int) -> list[int]:
        left, right = rank > 0, rank < n - 1
        forwards = [left * (m - 1 - i) + right * m for i in range(m)]
        return (forwards + [right * (m - 1 - i) for i in range(m)]) * size.steps

    yield from every(results, "in flight", "receives were open while it computed", open_receives)
