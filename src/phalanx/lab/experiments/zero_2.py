"""ZeRO-2: gradients too. Each layer has an owner; its gradient is reduced to the owner and freed elsewhere.

As soon as backward has a layer's gradient, it is reduced to the layer's owner, who keeps the sum; the
others free theirs. After backward a rank has the gradients of its own layers only, and that is all
its optimizer needs. Owners update and broadcast their weights. Whole layers as shards keep the code
short; they balance only if the layers divide by the ranks.
"""

from torch import Tensor

from phalanx.lab.catalogue import Size
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import AdamState, loss_of, start


def owner(layer: int, size: Size, n: int) -> int:
    """Which rank keeps a layer: ranges of layers, as equal as possible."""
    return layer * n // size.layers


def owned(size: Size, rank: int, n: int) -> list[int]:
    return [layer for layer in range(size.layers) if owner(layer, size, n) == rank]


def run(lab: Lab) -> None:
    size, n = lab.size, lab.n
    weights, mine = start(size), owned(size, lab.rank, n)
    states = {layer: AdamState(size.width, size.width) for layer in mine}

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x = lab.rows(step)
        for layer, w in enumerate(weights):
            x = lab.forward(layer, x, w)
        loss, g = loss_of(x)
        gradients: dict[int, Tensor] = {}
        for layer in reversed(range(size.layers)):
            g, gradient = lab.backward(layer, g, weights[layer])
            lab.group.reduce(gradient, owner(layer, size, n), "average")
            if layer in states:
                gradients[layer] = gradient
            del gradient  # the others free it here
        for layer, w in enumerate(weights):
            if layer in states:
                states[layer].update(w, gradients[layer])
            lab.group.broadcast(w, owner(layer, size, n))
        return loss, [gradients[layer] for layer in mine]

    # The gradients of its own layers only, and all weights.
    lab.train(train_step, weights, lambda x: [x[i] for i in mine], of_weights=list, adam=True)
    sent = lab.sent()
    lab.note(
        f"Rank {lab.rank} sent {sent / size.steps:,.0f} bytes a step; 2(n-1)/n of the weights are "
        f"{2 * (n - 1) / n * size.bytes:,.0f}. It owns {len(mine)} of {size.layers} layers."
    )
    # The gradients of the others' layers once, its own weights to everyone.
    messages = size.layers - len(mine) + len(mine) * (n - 1)
    formula = messages * size.steps * 8 * size.width**2
    lab.claim("it sent others' gradients and its own weights", sent, formula)
