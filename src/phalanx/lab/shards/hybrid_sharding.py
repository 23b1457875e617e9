"""Hybrid sharding: K ranks share the weights, M such groups are copies; what goes over which wire.

K x M ranks stand in a grid. Inside a group of K (one machine, fast wires) each rank holds 1/K of
every layer, gathers it before forward and again before backward, and scatters the gradient's sum.
Across the M groups (slow wires) only the 1/K of a rank's own shard is summed. For weights of W
bytes each rank sends 3W(K-1)/K inside and 2(M-1)/M x W/K across. The rule of thumb is 3x inside
and 1x across. The first is close for large K; the second is too much by at least K/2: what leaves
the machine is little, and that is the point of the scheme.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import backward, batch, forward, loss_of, one_process, start, update
from phalanx.lab.note import Note, everyone


def grid(n: int) -> tuple[int, int]:
    """K inside and M across: as square as n allows, the inside longer."""
    across = next(m for m in range(int(n**0.5), 0, -1) if n % m == 0)
    return n // across, across


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    k, m = grid(n)
    inside = world.split("inside", [range(i * k, (i + 1) * k) for i in range(m)])
    across = world.split("across", [range(i, n, k) for i in range(k)])
    rows = size.part("width", inside.rank, k)
    shards = [w[rows].clone() for w in start(size)]
    losses = []
    first: list[Tensor] = []
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", shards=shards)
        x, kept = batch(size, step)[size.part("batch", rank, n)], []
        for layer, shard in enumerate(shards):
            w = gathered(inside, shard)
            with note.doing(f"F{layer}"):
                x, saved = forward(x, w)
                kept.append(saved)
            del w
        loss, g = loss_of(x)
        losses.append(loss)
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            w = gathered(inside, shards[layer])
            with note.doing(f"B{layer}"):
                g, whole = backward(g, kept.pop(), w)
            part = torch.empty_like(shards[layer])
            inside.reduce_scatter(part, whole, "average")
            across.all_reduce(part, "average")
            gradients.insert(0, part)
        for shard, gradient in zip(shards, gradients, strict=True):
            update(shard, gradient)
        first = first or gradients
        note.holds("after", gradients=gradients, shards=shards)
    sent = [note.sent("inside"), note.sent("across")]
    mean = torch.stack(losses)
    wire.all_reduce(mean, "average")
    if rank == 0:
        whole_bytes = sum(8 * w.numel() for w in shards) * k
        formulas = [3 * whole_bytes * (k - 1) / k, 2 * (m - 1) / m * whole_bytes / k]
        thumb = [3 * whole_bytes, whole_bytes]
        rows_said = [
            (name, *(f"{number:,.0f}" for number in (measured / size.steps, formula, rule)))
            for name, measured, formula, rule in zip(
                ("inside", "across"), sent, formulas, thumb, strict=True
            )
        ]
        title = f"bytes that rank 0 sends a step; K = {k}, M = {m}, W = {whole_bytes:,}"
        note.table(title, ("wire", "measured", "formula", "rule of thumb"), rows_said)
    return {"losses": mean, "gradients": first, "shards": shards, "sent": sent}


def gathered(inside: Group, shard: Tensor) -> Tensor:
    """The whole layer from the shards of a group."""
    whole = torch.empty(inside.size * shard.shape[0], shard.shape[1], dtype=shard.dtype)
    inside.all_gather(whole, shard)
    return whole


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n, alone = len(results), one_process(size)
    k, m = grid(n)
    whole = 8 * size.layers * size.width**2
    for rank, held in enumerate(results):
        rows = size.part("width", rank % k, k)
        gradients = [g[rows] for g in alone.gradients]
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        yield equal(f"rank {rank}: gradients of its shard", held["gradients"], gradients)
        shards = [w[rows] for w in alone.weights]
        yield equal(f"rank {rank}: its shard at the end", held["shards"], shards)
        inside, across = held["sent"]
        formula = size.steps * 3 * whole * (k - 1) / k
        yield equal(f"rank {rank} sent 3W(K-1)/K inside, a step", inside, formula)
        formula = size.steps * 2 * (m - 1) / m * whole / k
        yield equal(f"rank {rank} sent 2(M-1)/M x W/K across, a step", across, formula)
