"""ZeRO-2: gradients too. Each layer has an owner; its gradient is reduced to the owner and freed elsewhere.

As soon as backward has a layer's gradient, it is reduced to the layer's owner, who keeps the sum; the
others free theirs. After backward a rank has the gradients of its own layers only, and that is all
its optimizer needs. Owners update and broadcast their weights. Whole layers as shards keep the code
short; they balance only if the layers divide by the ranks.
"""

from torch import Tensor

from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Adam, loss_of, one_process, start, trained


def owner(layer: int, size: Size, n: int) -> int:
    """Which rank keeps a layer: ranges of layers, as equal as possible."""
    return layer * n // size.layers


def owned(size: Size, rank: int, n: int) -> list[int]:
    return [layer for layer in range(size.layers) if owner(layer, size, n) == rank]


def run(lab: Lab) -> Values:
    size, rank, n = lab.size, lab.rank, lab.n
    weights = start(size)
    states = {layer: Adam(size.width, size.width) for layer in owned(size, rank, n)}
    most = 0

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        nonlocal most
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
        most = max(most, sum(gradient.nbytes for gradient in gradients.values()))
        for layer, w in enumerate(weights):
            if layer in states:
                states[layer].update(w, gradients[layer])
            lab.group.broadcast(w, owner(layer, size, n))
        return loss, [gradients[layer] for layer in sorted(gradients)]

    values = lab.train(train_step, weights)
    lab.note(
        f"Rank {rank} sent {lab.sent() / size.steps:,.0f} bytes a step; 2(n-1)/n of the weights are "
        f"{2 * (n - 1) / n * size.bytes:,.0f}. It had gradients of {most:,} of {size.bytes:,} bytes."
    )
    return values | {"gradient bytes": most, "sent": lab.sent()}


def check(results: Results, size: Size) -> Claims:
    n, layer_bytes = len(results), 8 * size.width**2
    mine = [owned(size, rank, n) for rank in range(n)]

    def part(layers: list[Tensor], rank: int) -> list[Tensor]:
        return [layers[i] for i in mine[rank]]

    yield from trained(results, size, part, adam=True, weights=False)
    says = "all weights are those of one process"
    yield from every(results, "weights", says, one_process(size, adam=True).weights)
    says = "it had gradients of its own layers only"
    yield from every(results, "gradient bytes", says, lambda rank: len(mine[rank]) * layer_bytes)

    def sent(rank: int) -> int:
        """The gradients of the others' layers once, its own weights to everyone."""
        return (
            (size.layers - len(mine[rank]) + len(mine[rank]) * (n - 1)) * size.steps * layer_bytes
        )

    yield from every(results, "sent", "it sent others' gradients and its own weights", sent)
