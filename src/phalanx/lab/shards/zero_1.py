"""ZeRO-1: everyone has all weights and all gradients, the optimizer's state is cut in n.

All weights lie in one flat vector, of which each rank looks after an equal slice. Gradients are
reduced and scattered, so that a rank gets the sum for its slice only. It updates that slice with
its own part of Adam's state, and an all-gather makes the weights whole again. An all-reduce is
those two messages, so ZeRO-1 sends exactly what data parallel sends, 2(n-1)/n of the weights, and
saves (n-1)/n of Adam's two numbers per weight (Rajbhandari et al. 2020).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import Adam, batch, gradients_of, start, trained_as_one
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    flat = padded(start(size), n)
    each = flat.numel() // n
    adam = Adam([each])
    losses: list[Tensor] = []
    first = torch.empty(0)
    for step in range(size.steps):
        note.step(f"step {step}")
        weights = opened(flat, size)
        note.holds("before", weights=weights, state=[adam.m, adam.v])
        with note.doing("F B"):
            rows = size.part("batch", rank, n)
            loss, gradients = gradients_of(weights, batch(size, step)[rows])
        summed = torch.empty(each, dtype=flat.dtype)
        wire.reduce_scatter(summed, padded(gradients, n), "average")
        del gradients
        part = flat[rank * each : (rank + 1) * each].clone()
        with note.doing("U"):
            adam.update(part, summed)
        wire.all_gather(flat, part)
        losses.append(loss)
        if step == 0:
            first = summed.clone()
        note.holds("after", gradient_slice=summed, weights=weights, state=[adam.m, adam.v])
    sent = note.sent()
    formula = 2 * (n - 1) / n * flat.nbytes
    note.says(
        f"Rank {rank} sent {sent / size.steps:,.0f} bytes a step; 2(n-1)/n of the weights are "
        f"{formula:,.0f}. Its state takes {adam.m.nbytes + adam.v.nbytes:,} bytes of "
        f"{2 * flat.nbytes:,}."
    )
    loss_of_all = torch.stack(losses)
    wire.all_reduce(loss_of_all, "average")
    whole = torch.empty_like(flat)
    wire.all_gather(whole, first)
    held = {"losses": loss_of_all, "gradients": opened(whole, size), "weights": opened(flat, size)}
    return held | {"state": adam.m.numel() + adam.v.numel(), "sent": sent}


def padded(parts: list[Tensor], n: int) -> Tensor:
    """All numbers in one vector that divides by n."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.nn.functional.pad(flat, (0, -len(flat) % n))


def opened(flat: Tensor, size: Size) -> list[Tensor]:
    """Views of the flat vector as weights."""
    each = size.width**2
    shape = (size.width, size.width)
    return [flat[i * each : (i + 1) * each].view(shape) for i in range(size.layers)]


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from trained_as_one(results, size, adam=True)
    n, count = len(results), size.layers * size.width**2
    count += -count % n
    for rank, held in enumerate(results):
        yield equal(
            f"rank {rank} holds 2/n numbers of state a weight", held["state"], 2 * count / n
        )
        formula = size.steps * 2 * (n - 1) / n * 8 * count
        yield equal(f"rank {rank} sent 2(n-1)/n of the weights a step", held["sent"], formula)
