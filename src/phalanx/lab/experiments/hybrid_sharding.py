"""Hybrid sharding: K ranks share the weights, M such groups are copies; what each group sends.

K x M ranks form a grid. Inside a group of K (one machine, fast links) each rank has 1/K of every
layer, gathers it before forward and again before backward, and reduce-scatters the gradient.
Across the M groups (slow links) only the 1/K of a rank's own shard is summed. For weights of W
bytes each rank sends 3W(K-1)/K inside and 2(M-1)/M x W/K across. The rule of thumb is 3x inside
and 1x across. The first is close for large K; the second is too much by at least K/2: little leaves
the machine, and that is the point of the scheme.
"""

from torch import Tensor

from phalanx.lab.lab import Lab, gathered, scattered
from phalanx.lab.mlp import loss_of, start, update


def run(lab: Lab) -> None:
    # K inside and M across: as square as n allows, the inside larger.
    size, m = lab.size, next(m for m in range(int(lab.n**0.5), 0, -1) if lab.n % m == 0)
    k = lab.n // m
    inside = lab.split("inside", [range(i * k, (i + 1) * k) for i in range(m)])
    across = lab.split("across", [range(i, lab.n, k) for i in range(k)])
    rows = size.part("width", inside.rank, k)
    shards = [w[rows].clone() for w in start(size)]

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x = lab.rows(step)
        for layer, shard in enumerate(shards):
            x = lab.forward(layer, x, gathered(inside, shard))
        loss, g = loss_of(x)
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            g, whole = lab.backward(layer, g, gathered(inside, shards[layer]))
            part = scattered(inside, whole, "average")
            across.all_reduce(part, "average")
            gradients.insert(0, part)
        update(shards, gradients)
        return loss, gradients

    lab.train(train_step, shards, lambda layers: [w[rows] for w in layers])
    sent = [lab.sent("inside") / size.steps, lab.sent("across") / size.steps]
    formula = [3 * size.bytes * (k - 1) / k, 2 * (m - 1) / m * size.bytes / k]
    lab.claim("it sent 3W(K-1)/K inside and 2(M-1)/M x W/K across in each step", sent, formula)
    if lab.rank == 0:
        title = f"bytes that rank 0 sends in a step; K = {k}, M = {m}, W = {size.bytes:,}"
        rule = (3 * size.bytes, size.bytes)
        rows_ = zip(("inside", "across"), sent, formula, rule, strict=True)
        table = [(name, *(f"{number:,.0f}" for number in numbers)) for name, *numbers in rows_]
        lab.table(title, ("group", "measured", "formula", "rule of thumb"), table)
