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
from phalanx.lab.experiments.zero_2 import owned, owner
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import AdamState, loss_of, start


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


def run(lab: Lab) -> None:
    size, n = lab.size, lab.n
    layers, last = Layers(lab), size.layers - 1
    mine = layers.mine
    states = {layer: AdamState(size.width, size.width) for layer in mine}

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
        return loss, [gradients[layer] for layer in mine]

    lab.train(train_step, list(layers.here.values()), lambda x: [x[i] for i in mine], adam=True)
    sent, received = lab.sent(), lab.received
    lab.note(
        f"Rank {lab.rank} received {received / size.steps:,.0f} bytes a step and sent "
        f"{sent / size.steps:,.0f}; 3(n-1)/n of the weights are "
        f"{3 * (n - 1) / n * size.bytes:,.0f}. It had {layers.most} layers at most, of {size.layers}."
    )
    lab.claim("it has only its own layers again", list(layers.here), mine)
    lab.claim("it had its own layers and at most two others", layers.most <= len(mine) + 2)
    # Every layer is broadcast once in forward and once in backward, the last layer only once.
    unit = size.steps * 8 * size.width**2
    broadcasts = 2 * len(mine) - (last in mine)
    others = 2 * size.layers - 1 - broadcasts
    formula = (broadcasts * (n - 1) + size.layers - len(mine)) * unit
    lab.claim("it sent its own layers twice, gradients once", sent, formula)
    formula = (others + len(mine) * (n - 1)) * unit
    lab.claim("it received weights twice, gradients once", received, formula)
    total = lab.everyone(torch.tensor(sent, dtype=torch.float64)).sum()
    says = "together: 3(n-1)/n of the weights a rank, less the last layer"
    lab.claim(says, total, (3 * size.layers - 1) * (n - 1) * unit)
