"""Data parallel: own rows, own loss, the same gradient and the same weights everywhere.

Every rank works on its rows with a copy of all weights. The losses differ; the average of the
gradients over ranks is the gradient of the whole batch, so the copies never part. The gradient of
the last layer is ready first. The second form starts its all-reduce at once and goes on with the
layer below: each message travels while the rest of backward computes.
Each rank sends 2(n-1)/n of the gradients, whatever the batch.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.comm import Group, Work, World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import backward, batch, forward, loss_of, start, trained_as_one, update
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    held: Held = {}
    for overlapped in (False, True):
        how = " overlapped" if overlapped else ""
        weights, losses, own = start(size), [], []
        for step in range(size.steps):
            note.step(f"step {step}{how}")
            x = batch(size, step)[size.part("batch", world.rank, world.size)]
            note.holds("before", rows=x, weights=weights)
            loss, gradients, own_gradients = train_step(weights, x, wire, note, overlapped)
            own.append(loss.item())
            wire.all_reduce(loss, "average")  # to print; training does not need it
            losses.append(loss.item())
            note.holds("own", loss=own[-1], gradients=own_gradients)
            note.holds("after", loss=losses[-1], gradients=gradients, weights=weights)
            if step == 0:
                held |= {f"gradients{how}": gradients, f"own gradient{how}": own_gradients[0]}
        held |= {f"losses{how}": losses, f"own losses{how}": own, f"weights{how}": weights}
    held["sent"] = note.sent()
    return held


def train_step(
    weights: Sequence[Tensor], x: Tensor, wire: Group, note: Note, overlapped: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    kept = []
    for layer, w in enumerate(weights):
        with note.doing(f"F{layer}"):
            x, saved = forward(x, w)
            kept.append(saved)
    loss, g = loss_of(x)
    gradients: list[Tensor] = []
    own: list[Tensor] = []
    works: list[Work] = []
    for layer in reversed(range(len(weights))):
        with note.doing(f"B{layer}"):
            g, gradient = backward(g, kept.pop(), weights[layer])
        own.insert(0, gradient.clone())
        gradients.insert(0, gradient)
        if overlapped:
            works.append(wire.all_reduce(gradient, "average", wait=False))
    if not overlapped:
        works = [wire.all_reduce(gradient, "average") for gradient in reversed(gradients)]
    for work in works:
        work.wait()
    with note.doing("U"):
        for w, gradient in zip(weights, gradients, strict=True):
            update(w, gradient)
    return loss, gradients, own


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    for how in ("", " overlapped"):
        yield from trained_as_one(results, size, how=how)
        for rank, held in enumerate(results):
            x = batch(size, 0)[size.part("batch", rank, n)]
            w = [each.requires_grad_() for each in start(size)]
            for each in w:
                x = torch.nn.functional.gelu(x @ each)
            torch.autograd.backward(x.square().mean())
            own = held[f"own gradient{how}"]
            yield equal(f"rank {rank}: its own gradient{how} is that of its rows", own, w[0].grad)
            first = held[f"own losses{how}"][0]
            yield equal(f"rank {rank}: its own first loss{how}", first, x.square().mean().item())
        own = [held[f"own losses{how}"] for held in results]
        mean = [sum(losses) / n for losses in zip(*own, strict=True)]
        yield equal(f"losses{how} average to one process's", mean, results[0][f"losses{how}"])
        differ = all(len(set(losses)) == n for losses in zip(*own, strict=True))
        yield holds(f"every rank has another loss{how}", differ)
    weights = 8 * size.layers * size.width**2
    formula = 2 * size.steps * 2 * (n - 1) / n * (weights + 8)
    for rank, held in enumerate(results):
        says = f"rank {rank} sent 2(n-1)/n of gradients and loss, every step, in both forms"
        yield equal(says, held["sent"], formula)
