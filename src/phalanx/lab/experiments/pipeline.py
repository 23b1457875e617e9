"""Pipeline: the batch in microbatches, so that stages work at the same time, forward and backward.

Each rank has a range of layers. While it works on one microbatch, its neighbour works on the next.
All forwards first, then all backwards (GPipe, Huang et al. 2019): every stage keeps what all
microbatches need for backward. Gradients add up over microbatches to those of the batch, as each
loss is its part of the batch's mean. With M microbatches and P stages of equal cost a rank works in
M of M+P-1 turns, each way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Kept, backward, batch, forward, loss_of, start, update

MICROBATCHES = 4


class PipelineStage:
    """A range of layers: forward and backward of one microbatch, gradients added up."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.group, self.size = lab, lab.group, lab.size
        self.weights = start(lab.size)[lab.part("layers")]
        self.first, self.last = lab.rank == 0, lab.rank == lab.n - 1
        self.most = 0

    def begin(self, step: int) -> None:
        self.step = step
        self.gradients = [torch.zeros_like(w) for w in self.weights]
        self.kept: dict[int, list[Kept]] = {}
        self.out: dict[int, Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64)

    def empty(self) -> Tensor:
        """Space for a message: an activation, or its gradient."""
        rows = self.size.part("batch", 0, MICROBATCHES).stop
        return torch.empty(rows, self.size.width, dtype=torch.float64)

    def receive(self, source: int) -> Tensor:
        """The next message from a neighbour."""
        x = self.empty()
        self.group.receive(x, source)
        return x

    def send(self, x: Tensor, to: int) -> None:
        self.group.send(x, to)

    def forward(self, micro: int) -> None:
        """Of the batch's rows, or of what the stage before sends."""
        if self.first:
            x = batch(self.size, self.step)[self.size.part("batch", micro, MICROBATCHES)]
        else:
            x = self.receive(self.lab.rank - 1)
        with self.lab.doing(f"F{micro}"):
            self.kept[micro] = []
            for w in self.weights:
                x, saved = forward(x, w)
                self.kept[micro].append(saved)
        self.most = max(self.most, len(self.kept))
        if self.last:
            self.out[micro] = x
        else:
            self.send(x, self.lab.rank + 1)

    def backward(self, micro: int) -> None:
        """From the own loss, or from the gradient that the next stage sends."""
        if self.last:
            loss, g = loss_of(self.out.pop(micro), rows=self.size.batch)
            self.loss += loss
        else:
            g = self.receive(self.lab.rank + 1)
        with self.lab.doing(f"B{micro}"):
            kept = self.kept.pop(micro)
            for i in reversed(range(len(self.weights))):
                g, gradient = backward(g, kept.pop(), self.weights[i])
                self.gradients[i] += gradient
        if not self.first:
            self.send(g, self.lab.rank - 1)

    def train(self, order: Sequence[tuple[str, int]], most: int, extra: int = 0) -> None:
        """All steps, each with these operations in this order; and how much it kept and sent."""

        def train_step(step: int) -> tuple[Tensor | None, list[Tensor]]:
            self.begin(step)
            for kind, micro in order:
                self.forward(micro) if kind == "F" else self.backward(micro)
            update(self.weights, self.gradients)
            return self.loss if self.last else None, self.gradients

        size, lab = self.size, self.lab
        lab.train(train_step, self.weights, lambda layers: layers[lab.part("layers")])
        neighbours = (not self.first) + (not self.last)
        formula = size.steps * neighbours * (8 * size.batch * size.width + extra)
        lab.claim("it sent activations to each neighbour", lab.sent(), formula)
        lab.claim("it kept so many microbatches at once", self.most, most)


def all_forwards_first() -> list[tuple[str, int]]:
    return [(kind, micro) for kind in "FB" for micro in range(MICROBATCHES)]


def run(lab: Lab) -> None:
    PipelineStage(lab).train(all_forwards_first(), most=MICROBATCHES)
