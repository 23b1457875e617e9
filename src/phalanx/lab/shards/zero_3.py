"""ZeRO-3: weights too. The owner broadcasts a layer when it is needed, the others drop it after use.

Outside its turn a layer exists once in the world. Forward: while one layer computes, the next is
already on its way, so two are held and the message hides. Backward wants the layers again, last
first; the last one is still there from forward and is not fetched twice. Gradients are reduced to
the owner as in ZeRO-2. Weights travel twice and gradients once: 3(n-1)/n of the weights for each
rank, less the last layer's second journey, against 2(n-1)/n before.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import Group, Work, World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import Adam, backward, batch, forward, loss_of, one_process, start
from phalanx.lab.note import Note, everyone
from phalanx.lab.shards.zero_2 import owner


class Layers:
    """The layers a rank has: its own for good, the others' from fetch to drop."""

    def __init__(self, wire: Group, size: Size) -> None:
        self.wire, self.size = wire, size
        self.owners = [owner(i, size, wire.size) for i in range(size.layers)]
        whole = start(size)
        self.here = {i: whole[i] for i, who in enumerate(self.owners) if who == wire.rank}
        self.mine = list(self.here)
        self.coming: dict[int, Work] = {}
        self.most = 0

    def fetch(self, layer: int) -> None:
        """Start the broadcast of a layer, if there is such a layer."""
        if 0 <= layer < self.size.layers:
            if layer not in self.here:
                self.here[layer] = torch.empty(self.size.width, self.size.width).double()
            self.coming[layer] = self.wire.broadcast(
                self.here[layer], self.owners[layer], wait=False
            )
            self.most = max(self.most, len(self.here))

    def use(self, layer: int) -> Tensor:
        """The layer's weight, when it has come."""
        if layer in self.coming:
            self.coming.pop(layer).wait()
        return self.here[layer]

    def drop(self, layer: int) -> None:
        if layer not in self.mine:
            del self.here[layer]


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    layers, last = Layers(wire, size), size.layers - 1
    states = {i: Adam((size.width, size.width)) for i in layers.mine}
    losses = []
    first: dict[int, Tensor] = {}
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", weights=[layers.here[i] for i in layers.mine])
        x, kept = batch(size, step)[size.part("batch", rank, n)], []
        layers.fetch(0)
        for layer in range(size.layers):
            layers.fetch(layer + 1)  # on its way while this one computes
            w = layers.use(layer)
            with note.doing(f"F{layer}"):
                x, saved = forward(x, w)
                kept.append(saved)
            if layer != last:  # backward begins with the last: it stays
                layers.drop(layer)
        loss, g = loss_of(x)
        losses.append(loss)
        owned: dict[int, Tensor] = {}
        for layer in reversed(range(size.layers)):
            layers.fetch(layer - 1)
            w = layers.use(layer)
            with note.doing(f"B{layer}"):
                g, gradient = backward(g, kept.pop(), w)
            layers.drop(layer)
            wire.reduce(gradient, layers.owners[layer], "average")
            if layer in states:
                owned[layer] = gradient
        for layer, state in states.items():
            state.update(layers.here[layer], owned[layer])
        first = first or owned
        note.holds("after", gradients=list(owned.values()), weights=list(layers.here.values()))
    sent, received = note.sent(), note.received()
    whole = 8 * size.layers * size.width**2
    note.says(
        f"Rank {rank} received {received / size.steps:,.0f} bytes a step and sent "
        f"{sent / size.steps:,.0f}; 3(n-1)/n of the weights are {3 * (n - 1) / n * whole:,.0f}. "
        f"It held {layers.most} layers at most, of {size.layers}."
    )
    mean = torch.stack(losses)
    wire.all_reduce(mean, "average")
    held = {"losses": mean, "weights": [layers.here[i] for i in layers.mine]}
    held |= {"gradients": [first[i] for i in sorted(first)], "present": len(layers.here)}
    return held | {"most": layers.most, "sent": sent, "received": received}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n, alone = len(results), one_process(size, adam=True)
    owners = [owner(i, size, n) for i in range(size.layers)]
    for rank, held in enumerate(results):
        mine = [i for i, who in enumerate(owners) if who == rank]
        gradients = [alone.gradients[i] for i in mine]
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        yield equal(f"rank {rank}: gradients of its layers", held["gradients"], gradients)
        yield equal(
            f"rank {rank}: its layers at the end", held["weights"], [alone.weights[i] for i in mine]
        )
        yield equal(f"rank {rank} holds only its own layers again", held["present"], len(mine))
        says = f"rank {rank} held its own layers and at most two others"
        yield holds(says, held["most"] <= len(mine) + 2, f"{held['most']} of {size.layers}")
        fetched = sum(
            1 if i == len(owners) - 1 else 2 for i, who in enumerate(owners) if who != rank
        )
        given = sum(1 if i == len(owners) - 1 else 2 for i in mine) * (n - 1)
        others = size.layers - len(mine)
        unit = size.steps * 8 * size.width**2
        received = (fetched + len(mine) * (n - 1)) * unit
        yield equal(
            f"rank {rank} received weights twice, gradients once", held["received"], received
        )
        yield equal(f"rank {rank} sent as much of its own", held["sent"], (given + others) * unit)
    total = sum(held["sent"] for held in results)
    formula = (3 * size.layers - 1) * (n - 1) * size.steps * 8 * size.width**2
    yield equal("all together: 3(n-1)/n of the weights a rank, less the last layer", total, formula)
