"""Pipeline: the batch in microbatches, so that stages work at the same time, forward and backward.

Each rank has a range of layers. While it works on one microbatch, its neighbour works on the next.
All forwards first, then all backwards (GPipe, Huang et al. 2019): every stage keeps what all
microbatches need for backward. Gradients add up over microbatches to those of the batch, as each
loss is its part of the batch's mean. With M microbatches and P stages of equal cost a rank works in
M of M+P-1 turns, each way.
"""

import torch
from torch import Tensor

from phalanx.lab.claims import Claims, Held, Results, Size, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Kept, backward, batch, forward, loss_of, start, trained, update

MICROBATCHES = 4


class Stage:
    """A range of layers: forward and backward of one microbatch, gradients added up."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.size = lab, lab.size
        self.weights = start(lab.size)[lab.part("layers")]
        self.first, self.last = lab.rank == 0, lab.rank == lab.n - 1
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
        """Space for a message: an activation, or its gradient."""
        rows = self.size.part("batch", 0, MICROBATCHES).stop
        return torch.empty(rows, self.size.width, dtype=torch.float64)

    def received(self, source: int) -> Tensor:
        """The next message from a neighbour."""
        x = self.empty()
        self.lab.group.receive(x, source)
        return x

    def forward(self, micro: int, x: Tensor) -> Tensor:
        with self.lab.doing(f"F{micro}"):
            self.kept[micro] = []
            for w in self.weights:
                x, saved = forward(x, w)
                self.kept[micro].append(saved)
            self.most = max(self.most, len(self.kept))
            if self.last:
                self.out[micro] = x
        return x

    def backward(self, micro: int, g: Tensor | None) -> Tensor:
        with self.lab.doing(f"B{micro}"):
            if g is None:  # the last stage: from its own loss
                loss, g = loss_of(self.out.pop(micro), rows=self.size.batch)
                self.loss += loss
            kept = self.kept.pop(micro)
            for i in reversed(range(len(self.weights))):
                g, gradient = backward(g, kept.pop(), self.weights[i])
                self.gradients[i] += gradient
        return g

    def finish(self) -> tuple[Tensor | None, list[Tensor]]:
        """The update at the end of a step; the loss, which the last stage knows, and gradients."""
        for w, gradient in zip(self.weights, self.gradients, strict=True):
            update(w, gradient)
        return self.loss if self.last else None, self.gradients


def run(lab: Lab) -> Held:
    stage, group, rank = Stage(lab), lab.group, lab.rank

    def train_step(step: int) -> tuple[Tensor | None, list[Tensor]]:
        stage.begin(step)
        for micro in range(MICROBATCHES):
            x = stage.own_rows(micro) if stage.first else stage.received(rank - 1)
            y = stage.forward(micro, x)
            if not stage.last:
                group.send(y, to=rank + 1)
        for micro in range(MICROBATCHES):
            gx = stage.backward(micro, None if stage.last else stage.received(rank + 1))
            if not stage.first:
                group.send(gx, to=rank - 1)
        return stage.finish()

    return lab.train(train_step, stage.weights) | {"sent": lab.sent(), "most": stage.most}


def check(results: Results, size: Size) -> Claims:
    yield from trained_in_stages(results, size)
    yield from every(results, "most", "it kept all microbatches at once", MICROBATCHES)


def trained_in_stages(results: Results, size: Size) -> Claims:
    """Every rank's layers are as one process trains them, and only activations were sent."""
    n, activations = len(results), size.steps * 8 * size.batch * size.width
    yield from trained(results, size, lambda layers, rank: layers[size.part("layers", rank, n)])
    says = "it sent activations to each neighbour"
    yield from every(results, "sent", says, lambda r: ((r > 0) + (r < n - 1)) * activations)
