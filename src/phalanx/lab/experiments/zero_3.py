"""ZeRO-3: weights too. The owner broadcasts a layer when it is needed, the others free it after use.

While it is not used, a layer exists once among all ranks. Forward: while one layer computes, the
next is already on its way, so a rank has two at a time and the message is hidden. Backward needs
the layers again, last first; the last one is still there from forward and is not fetched twice.
Gradients are reduced to the owner as in ZeRO-2. Weights travel twice and gradients once: 3(n-1)/n of
the weights for each rank, less the last layer's second broadcast, against 2(n-1)/n before.
"""

import torch
from torch import Tensor

from phalanx.comm import Work
from phalanx.lab.claims import Claim, Claims, Results, Size, Values, equal, every
from phalanx.lab.experiments.zero_2 import owned, owner
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Adam, loss_of, start, trained


class Layers:
    """The layers a rank has: its own always, the others' from `fetch` to `free`."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.mine = lab, owned(lab.size, lab.rank, lab.n)
        whole = start(lab.size)
        self.here = {layer: whole[layer] for layer in self.mine}
        self.coming: dict[int, Work] = {}
        self.most = 0

    def fetch(self, layer: int) -> None:
        """Start the broadcast of a layer, if there is such a layer."""
        size = self.lab.size
        if 0 <= layer < size.layers:
            if layer not in self.here:
                self.here[layer] = torch.empty(size.width, size.width).double()
            root = owner(layer, size, self.lab.n)
            self.coming[layer] = self.lab.group.broadcast(self.here[layer], root, wait=False)
            self.most = max(self.most, len(self.here))

    def use(self, layer: int) -> Tensor:
        """The layer's weight, once it has arrived."""
        if layer in self.coming:
            self.coming.pop(layer).wait()
        return self.here[layer]

    def free(self, layer: int) -> None:
        if layer not in self.mine:
            del self.here[layer]


def run(lab: Lab) -> Values:
    size, n = lab.size, lab.n
    layers, last = Layers(lab), size.layers - 1
    states = {layer: Adam(size.width, size.width) for layer in layers.mine}

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x = lab.rows(step)
        layers.fetch(0)
        for layer in range(size.layers):
            layers.fetch(layer + 1)  # on its way while this one computes
            x = lab.forward(layer, x, layers.use(layer))
            if layer != last:  # backward begins with the last: it stays
                layers.free(layer)
        loss, g = loss_of(x)
        gradients: dict[int, Tensor] = {}
        for layer in reversed(range(size.layers)):
            layers.fetch(layer - 1)
            g, gradient = lab.backward(layer, g, layers.use(layer))
            layers.free(layer)
            lab.group.reduce(gradient, owner(layer, size, n), "average")
            if layer in states:
                gradients[layer] = gradient
        for layer, state in states.items():
            state.update(layers.here[layer], gradients[layer])
        return loss, [gradients[layer] for layer in layers.mine]

    values = lab.train(train_step, list(layers.here.values()))
    lab.note(
        f"Rank {lab.rank} received {lab.received() / size.steps:,.0f} bytes a step and sent "
        f"{lab.sent() / size.steps:,.0f}; 3(n-1)/n of the weights are "
        f"{3 * (n - 1) / n * size.bytes:,.0f}. It had {layers.most} layers at most, of {size.layers}."
    )
    values |= {"present": len(layers.here), "most": layers.most}
    return values | {"sent": lab.sent(), "received": lab.received()}


def check(results: Results, size: Size) -> Claims:
    n, unit = len(results), size.steps * 8 * size.width**2
    mine = [owned(size, rank, n) for rank in range(n)]
    yield from trained(
        results, size, lambda layers, rank: [layers[i] for i in mine[rank]], adam=True
    )
    says = "it has only its own layers again"
    yield from every(results, "present", says, lambda rank: len(mine[rank]))
    for rank, values in enumerate(results):
        says = f"rank {rank}: it had its own layers and at most two others"
        fits = values["most"] <= len(mine[rank]) + 2
        yield Claim(says, fits, f"{values['most']} of {size.layers}")

    def broadcasts(layers: list[int]) -> int:
        """Every layer once in forward and once in backward, the last layer only once."""
        return sum(1 if layer == size.layers - 1 else 2 for layer in layers)

    def received(rank: int) -> int:
        others = [layer for layer in range(size.layers) if layer not in mine[rank]]
        return (broadcasts(others) + len(mine[rank]) * (n - 1)) * unit

    def sent(rank: int) -> int:
        return (broadcasts(mine[rank]) * (n - 1) + size.layers - len(mine[rank])) * unit

    yield from every(results, "received", "it received weights twice, gradients once", received)
    yield from every(results, "sent", "it sent its own layers twice, gradients once", sent)
    total, formula = (
        sum(values["sent"] for values in results),
        (3 * size.layers - 1) * (n - 1) * unit,
    )
    yield equal("together: 3(n-1)/n of the weights a rank, less the last layer", total, formula)
