"""ZeRO-2: gradients too. Each layer has an owner; its gradient is reduced to the owner and dropped.

As soon as backward has a layer's gradient it goes to the layer's owner, who keeps the sum; the
others free theirs. At the end of backward a rank holds the gradients of its own layers and no
others, and that is all its optimizer needs. Owners update and broadcast their weights. Whole layers
as shards keep the code short; they balance only if layers divide by ranks.
"""

from collections.abc import Iterator

import torch

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import Adam, backward, batch, forward, loss_of, one_process, start
from phalanx.lab.note import Note, everyone


def owner(layer: int, size: Size, n: int) -> int:
    """Who looks after a layer: runs of layers, as equal as can be."""
    return layer * n // size.layers


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    mine = [i for i in range(size.layers) if owner(i, size, n) == rank]
    weights = start(size)
    states = {i: Adam(weights[i].shape) for i in mine}
    losses, most = [], 0
    first: dict[int, torch.Tensor] = {}
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", weights=weights, state=[states[i].m for i in mine])
        x = batch(size, step)[size.part("batch", rank, n)]
        kept = []
        for layer, w in enumerate(weights):
            with note.doing(f"F{layer}"):
                x, saved = forward(x, w)
                kept.append(saved)
        loss, g = loss_of(x)
        losses.append(loss)
        owned: dict[int, torch.Tensor] = {}
        for layer in reversed(range(size.layers)):
            with note.doing(f"B{layer}"):
                g, gradient = backward(g, kept.pop(), weights[layer])
            wire.reduce(gradient, owner(layer, size, n), "average")
            if layer in states:
                owned[layer] = gradient
            del gradient  # the others' copy ends here
        most = max(most, sum(each.nbytes for each in owned.values()))
        for layer in range(size.layers):
            if layer in states:
                states[layer].update(weights[layer], owned[layer])
            wire.broadcast(weights[layer], owner(layer, size, n))
        first = first or owned
        note.holds("after", gradients=list(owned.values()), weights=weights)
    sent = note.sent()
    whole = sum(w.nbytes for w in weights)
    note.says(
        f"Rank {rank} sent {sent / size.steps:,.0f} bytes a step; 2(n-1)/n of the weights are "
        f"{2 * (n - 1) / n * whole:,.0f}. It held gradients of {most:,} bytes of {whole:,}."
    )
    mean = torch.stack(losses)
    wire.all_reduce(mean, "average")
    held = {"losses": mean, "weights": weights, "gradients": [first[i] for i in sorted(first)]}
    return held | {"gradient bytes": most, "sent": sent}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n, alone = len(results), one_process(size, adam=True)
    layer_bytes = 8 * size.width**2
    for rank, held in enumerate(results):
        mine = [i for i in range(size.layers) if owner(i, size, n) == rank]
        gradients = [alone.gradients[i] for i in mine]
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        yield equal(f"rank {rank}: gradients of its layers", held["gradients"], gradients)
        yield equal(f"rank {rank}: all weights at the end", held["weights"], alone.weights)
        bytes_held = len(mine) * layer_bytes
        yield equal(f"rank {rank} held gradients of its own", held["gradient bytes"], bytes_held)
        # It gives up the gradients of the others' layers and hands out the weights of its own.
        given = size.layers - len(mine) + len(mine) * (n - 1)
        formula = size.steps * given * layer_bytes
        yield equal(f"rank {rank} sent gradients out and weights round", held["sent"], formula)
