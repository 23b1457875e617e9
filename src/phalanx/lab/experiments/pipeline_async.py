"""Pipeline with messages in flight: every receive is posted before it is needed, no send waits.

The same stages and the same order as the plain pipeline. The difference is when a rank asks: space
for all microbatches is posted at the start of the step, so a neighbour's message arrives while this
rank computes, and it waits only when there is nothing else to do. That costs the memory of the
space. It cannot fill the turns in which there is no work: that needs another order.
"""

from torch import Tensor

from phalanx.comm import Work
from phalanx.lab.experiments.pipeline import MICROBATCHES, PipelineStage, all_forwards_first
from phalanx.lab.lab import Lab


class PostedStage(PipelineStage):
    """A stage whose receives are all posted at the start of the step, and taken in order."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.in_flight: list[int] = []

    def begin(self, step: int) -> None:
        super().begin(step)
        neighbours = [self.lab.rank - 1] * (not self.first) + [self.lab.rank + 1] * (not self.last)
        self.posted: dict[int, list[tuple[Tensor, Work]]] = {}
        for source in neighbours:
            space = [self.empty() for _ in range(MICROBATCHES)]
            works = [self.group.receive(x, source, wait=False) for x in space]
            self.posted[source] = list(zip(space, works, strict=True))

    def receive(self, source: int) -> Tensor:
        x, work = self.posted[source].pop(0)
        work.wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self.in_flight.append(sum(map(len, self.posted.values())))
        super().send(x, to)


def run(lab: Lab) -> None:
    stage, m = PostedStage(lab), MICROBATCHES
    stage.train(all_forwards_first(), most=m)
    if lab.rank == 0:
        counts = " ".join(map(str, stage.in_flight[:m]))
        lab.note(f"Receives open on rank 0 when it had computed each microbatch: {counts}.")
    # Whenever it sends: what the two neighbours have not sent yet, or not been asked for.
    left, right = not stage.first, not stage.last
    forwards = [left * (m - 1 - i) + m for i in range(m)] * right
    backwards = [right * (m - 1 - i) for i in range(m)] * left
    want = (forwards + backwards) * lab.size.steps
    lab.claim("receives were open while it computed", stage.in_flight, want)
