"""Tensor parallel by columns: every rank computes some features of every layer, then all meet.

A rank has some columns of each weight, and so computes some features of the output for *all* rows.
The next layer needs all features: an all-gather. Backward mirrors it: each rank's columns give a
part of the input's whole gradient, the parts must be summed, and a rank goes on with its own
features only: a reduce-scatter. Nothing about weights travels: a weight's gradient is where the
weight is. Two messages a layer, each of (n-1)/n of the activations.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import backward, batch, forward, loss_of, one_process, start, update
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    columns = size.part("width", wire.rank, wire.size)
    weights = [w[:, columns].clone() for w in start(size)]
    losses = []
    first: list[Tensor] = []
    for step in range(size.steps):
        note.step(f"step {step}")
        x, kept = batch(size, step), []  # every rank has all rows
        note.holds("before", x=x, columns=weights)
        for layer, w in enumerate(weights):
            with note.doing(f"F{layer}"):
                part, saved = forward(x, w)
                kept.append(saved)
            x = gather_features(wire, part)
        loss, g = loss_of(x)
        losses.append(loss.item())
        g = g[:, columns]
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            with note.doing(f"B{layer}"):
                g, gradient = backward(g, kept.pop(), weights[layer])
            gradients.insert(0, gradient)
            g = sum_to_own_features(wire, g)
        for w, gradient in zip(weights, gradients, strict=True):
            update(w, gradient)
        first = first or gradients
        if step == 0:
            to_input = g
        note.holds("after", y=x, gradients=gradients, columns=weights)
    held = {"losses": losses, "gradients": first, "columns": weights, "sent": note.sent()}
    return held | {"to input": to_input}


def gather_features(wire: Group, part: Tensor) -> Tensor:
    """All features from everyone's part of them. Collectives join along the first dim: transposed."""
    rows, features = part.shape
    out = torch.empty(features * wire.size, rows, dtype=part.dtype)
    wire.all_gather(out, part.T.contiguous())
    return out.T


def sum_to_own_features(wire: Group, g: Tensor) -> Tensor:
    """Of the sum over ranks, the features of this rank: the gradient of `gather_features`."""
    rows, features = g.shape
    out = torch.empty(features // wire.size, rows, dtype=g.dtype)
    wire.reduce_scatter(out, g.T.contiguous())
    return out.T


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n, alone = len(results), one_process(size)
    x = batch(size, 0).requires_grad_()
    y = x
    for w in start(size):
        y = torch.nn.functional.gelu(y @ w)
    torch.autograd.backward(y.square().mean())
    assert x.grad is not None
    for rank, held in enumerate(results):
        columns = size.part("width", rank, n)
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        for what, whole in (("gradients", alone.gradients), ("columns", alone.weights)):
            want = [each[:, columns] for each in whole]
            yield equal(f"rank {rank}: {what} are those columns", held[what], want)
        says = f"rank {rank}: the gradient that leaves through the input"
        yield equal(says, held["to input"], x.grad[:, columns])
        formula = size.steps * size.layers * 2 * (n - 1) / n * 8 * size.batch * size.width
        yield equal(f"rank {rank} sent 2(n-1)/n of every layer's output", held["sent"], formula)
