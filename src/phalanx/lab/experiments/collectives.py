"""Every collective once, with numbers that show which rank they come from; and which is whose gradient.

Rank r starts with 10 r + 0, 10 r + 1, ...: the tens digit is the sender, the ones digit the place.
Collectives come in pairs. What one does to values in forward, the other does to gradients in
backward: all-gather and reduce-scatter, broadcast and reduce; all-reduce and all-to-all are their
own partners. That is why splitting a layer always costs a message in each direction.
"""

import torch
from torch import Tensor

from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab, gathered, scattered


def run(lab: Lab) -> Values:
    group, rank, n = lab.group, lab.rank, lab.n
    values: Values = {}

    def begin(name: str) -> Tensor:
        lab.step(name)
        x = own(rank, n)
        lab.shows("before", x=x)
        return x

    def end(name: str, result: Tensor) -> None:
        lab.shows("after", result=result)
        values[name] = result

    x = begin("all-reduce")  # everyone gets the sum
    group.all_reduce(x)
    end("all-reduce", x)

    x = begin("reduce")  # only rank 0 gets it
    group.reduce(x, root=0)
    end("reduce", x)

    x = begin("broadcast")  # everyone gets what the last rank has
    group.broadcast(x, root=n - 1)
    end("broadcast", x)

    x = begin("all-gather")  # everyone gets everything
    end("all-gather", gathered(group, x))

    x = begin("reduce-scatter")  # everyone gets one part of the sum
    end("reduce-scatter", scattered(group, x))

    x = begin("all-to-all")  # part j goes to rank j: a transpose over ranks
    out = torch.empty_like(x)
    group.all_to_all(out, x)
    end("all-to-all", out)

    x = begin("gather")  # rank 0 gets everything
    parts = [torch.empty_like(x) for _ in range(n)] if rank == 0 else None
    group.gather(parts, x, root=0)
    end("gather", torch.cat(parts) if parts else x)

    x = begin("scatter")  # rank 0 hands out its parts
    out = torch.empty(1, dtype=x.dtype)
    group.scatter(out, [x[i : i + 1].clone() for i in range(n)] if rank == 0 else None, root=0)
    end("scatter", out)

    # The loss is the sum over ranks of weight_r . all_gather(x): its gradient comes back summed.
    begin("the gradient of an all-gather is a reduce-scatter")
    end("gradient", scattered(group, weight(rank, n)))
    return values


def own(rank: int, n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64) + 10 * rank


def weight(rank: int, n: int) -> Tensor:
    return torch.cos(torch.arange(n * n, dtype=torch.float64) + rank)


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    leaves = [own(rank, n).requires_grad_() for rank in range(n)]
    torch.autograd.backward([weight(r, n) @ torch.cat(leaves) for r in range(n)])
    table = torch.stack([leaf.detach() for leaf in leaves])  # table[r] is what rank r starts with
    want = {
        "all-reduce": table.sum(0),
        "reduce": lambda rank: table[rank] if rank else table.sum(0),
        "broadcast": table[n - 1],
        "all-gather": table.flatten(),
        "reduce-scatter": lambda rank: table.sum(0)[rank],
        "all-to-all": lambda rank: table[:, rank],
        "gather": lambda rank: table[rank] if rank else table.flatten(),
        "scatter": lambda rank: table[0, rank],
        "gradient": lambda rank: leaves[rank].grad,
    }
    for name, expected in want.items():
        yield from every(results, name, f"{name} is what one process computes", expected)
