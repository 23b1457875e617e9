"""Tensor parallel in pairs: one layer cut by columns, the next by rows, one all-reduce for both.

What a column layer puts out is exactly what a row layer takes in: the rank's own features, so
nothing is sent between the two. The row layer's outputs are parts of a sum over all features:
an all-reduce, and then the gelu, which must see the whole sum. In backward the row layer needs
nothing and the column layer sums the gradient of its input. Two layers cost the messages of one
(Shoeybi et al. 2019). A last odd layer is computed whole by everyone.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import Kept, backward, batch, forward, loss_of, one_process, start, update
from phalanx.lab.note import Note, everyone


def cut(w: Tensor, layer: int, size: Size, rank: int, n: int) -> Tensor:
    """A rank's part of a layer: columns of even ones, rows of odd ones, all of a last even one."""
    part = size.part("width", rank, n)
    if layer % 2:
        return w[part]
    return w[:, part] if layer + 1 < size.layers else w


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    weights = [cut(w, i, size, rank, n).clone() for i, w in enumerate(start(size))]
    losses = []
    first: list[Tensor] = []
    for step in range(size.steps):
        note.step(f"step {step}")
        x: Tensor = batch(size, step)
        kept: list[Kept] = []
        note.holds("before", x=x, parts=weights)
        for layer, w in enumerate(weights):
            with note.doing(f"F{layer}"):
                x, saved = forward_part(x, w, layer, wire)
                kept.append(saved)
        loss, g = loss_of(x)
        losses.append(loss.item())
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            with note.doing(f"B{layer}"):
                g, gradient = backward(g, kept.pop(), weights[layer])
            if layer % 2 == 0 and layer + 1 < size.layers:
                wire.all_reduce(g)  # every rank's columns have given a part of it
            gradients.insert(0, gradient)
        for w, gradient in zip(weights, gradients, strict=True):
            update(w, gradient)
        first = first or gradients
        note.holds("after", y=x, gradients=gradients, parts=weights)
    return {"losses": losses, "gradients": first, "parts": weights, "sent": note.sent()}


def forward_part(x: Tensor, w: Tensor, layer: int, wire: Group) -> tuple[Tensor, Kept]:
    if layer % 2 == 0:
        return forward(x, w)
    z = x @ w
    wire.all_reduce(z)  # before the gelu: it is not linear
    return F.gelu(z), (x, z)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n, alone = len(results), one_process(size)
    for rank, held in enumerate(results):
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        for what, whole in (("gradients", alone.gradients), ("parts", alone.weights)):
            want = [cut(each, i, size, rank, n) for i, each in enumerate(whole)]
            yield equal(f"rank {rank}: {what} are those of its parts", held[what], want)
        pairs, output = size.layers // 2, 8 * size.batch * size.width
        formula = size.steps * pairs * 2 * 2 * (n - 1) / n * output
        yield equal(f"rank {rank} sent two all-reduces a pair", held["sent"], formula)
