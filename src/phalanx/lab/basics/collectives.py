"""Every collective once, with numbers that show who brought what, and which is whose gradient.

Rank r brings 10 r + 0, 10 r + 1, ...: the tens tell who sent a number, the ones where it stood.
Collectives come in pairs. What one does to values on the way forward, the other does to gradients
on the way back: all-gather and reduce-scatter, broadcast and reduce, all-reduce and all-to-all
with themselves. That is why splitting a layer always costs a message in each direction.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    mine = brought(rank, n)
    held: Held = {}

    def after(name: str, result: Tensor) -> None:
        note.holds("after", result=result)
        held[name] = result

    def fresh(name: str) -> Tensor:
        note.step(name)
        note.holds("before", x=mine)
        return mine.clone()

    x = fresh("all-reduce")  # everyone gets the sum
    wire.all_reduce(x)
    after("all-reduce", x)

    x = fresh("reduce")  # only rank 0 gets it
    wire.reduce(x, root=0)
    after("reduce", x)

    x = fresh("broadcast")  # everyone gets what the last rank has
    wire.broadcast(x, root=n - 1)
    after("broadcast", x)

    x = fresh("all-gather")  # everyone gets everything
    out = torch.empty(n * n, dtype=x.dtype)
    wire.all_gather(out, x)
    after("all-gather", out)

    x = fresh("reduce-scatter")  # everyone gets one part of the sum
    out = torch.empty(1, dtype=x.dtype)
    wire.reduce_scatter(out, x)
    after("reduce-scatter", out)

    x = fresh("all-to-all")  # part j of mine goes to rank j: a transpose over ranks
    out = torch.empty_like(x)
    wire.all_to_all(out, x)
    after("all-to-all", out)

    x = fresh("gather")  # rank 0 gets everything
    parts = [torch.empty_like(x) for _ in range(n)] if rank == 0 else None
    wire.gather(parts, x, root=0)
    after("gather", torch.cat(parts) if parts else x)

    x = fresh("scatter")  # rank 0 deals out its parts
    out = torch.empty(1, dtype=x.dtype)
    wire.scatter(out, [x[i : i + 1].clone() for i in range(n)] if rank == 0 else None, root=0)
    after("scatter", out)

    # The loss is the sum over ranks of weight_r . all_gather(x): its gradient comes back summed.
    note.step("the gradient of an all-gather is a reduce-scatter")
    gradient = torch.empty_like(mine)
    note.holds("before", gradient_of_what_was_gathered=weight(rank, n))
    wire.reduce_scatter(gradient, weight(rank, n))
    after("gradient", gradient)
    return held


def brought(rank: int, n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64) + 10 * rank


def weight(rank: int, n: int) -> Tensor:
    return torch.cos(torch.arange(n * n, dtype=torch.float64) + rank)


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    table = torch.stack([brought(rank, n) for rank in range(n)])  # table[r] is what rank r brings
    leaves = [brought(rank, n).requires_grad_() for rank in range(n)]
    losses = [weight(r, n) @ torch.cat(leaves) for r in range(n)]
    torch.autograd.backward(losses)
    for rank, held in enumerate(results):
        at_root = rank == 0
        want = {
            "all-reduce": table.sum(0),
            "reduce": table.sum(0) if at_root else table[rank],
            "broadcast": table[n - 1],
            "all-gather": table.flatten(),
            "reduce-scatter": table.sum(0)[rank],
            "all-to-all": table[:, rank],
            "gather": table.flatten() if at_root else table[rank],
            "scatter": table[0, rank],
            "gradient": leaves[rank].grad,
        }
        for name, expected in want.items():
            yield equal(f"rank {rank}: {name} is what one process computes", held[name], expected)
