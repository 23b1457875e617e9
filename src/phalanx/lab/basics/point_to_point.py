"""Send and receive: a value travels along all ranks and is changed, its gradient travels back.

A send does not wait for its peer, a receive does; two ranks that both send first do not block each
other, two that both receive first wait for ever. Between two ranks messages keep their order, and
nothing else names them: the first sent is the first received.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import draw
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    factor = draw(rank, 4)

    note.step("forward: every rank multiplies by its factor and sends on")
    x = torch.ones(4, dtype=torch.float64)
    if rank > 0:
        wire.receive(x, source=rank - 1)
    note.holds("before", x=x, factor=factor)
    y = x * factor
    if rank < n - 1:
        wire.send(y, to=rank + 1)
    note.holds("after", y=y)

    note.step("backward: the gradient comes from the right and leaves to the left")
    g = torch.ones(4, dtype=torch.float64)
    if rank < n - 1:
        wire.receive(g, source=rank + 1)
    note.holds("before", gradient_of_y=g)
    if rank > 0:
        wire.send(g * factor, to=rank - 1)
    note.holds("after", gradient_of_factor=g * x)

    note.step("two messages to the right neighbour arrive in their order")
    first, second = torch.tensor([1.0 + rank]), torch.tensor([100.0 + rank])
    note.holds("before", first=first, second=second)
    # Everyone sends before anyone receives: the ring does not lock.
    wire.send(first, to=(rank + 1) % n)
    wire.send(second, to=(rank + 1) % n)
    came = [torch.empty(1), torch.empty(1)]
    for each in came:
        wire.receive(each, source=(rank - 1) % n)
    note.holds("after", first_that_came=came[0], second_that_came=came[1])
    return {"y": y, "gradient": g * x, "came": torch.cat(came)}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    factors = [draw(rank, 4).requires_grad_() for rank in range(n)]
    values: list[Tensor] = [torch.ones(4, dtype=torch.float64)]
    for factor in factors:
        values.append(values[-1] * factor)
    torch.autograd.backward(values[-1].sum())
    for rank, held in enumerate(results):
        left = (rank - 1) % n
        yield equal(f"rank {rank}: y is that of one process", held["y"], values[rank + 1])
        gradient = factors[rank].grad
        yield equal(f"rank {rank}: the gradient is autograd's", held["gradient"], gradient)
        yield equal(f"rank {rank}: messages kept their order", held["came"], [1 + left, 100 + left])
