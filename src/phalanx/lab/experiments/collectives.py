"""Every collective once, with numbers that show which rank they come from; and which is whose gradient.

Rank r starts with 10 r + 0, 10 r + 1, ...: the tens digit is the sender, the ones digit the place.
Collectives come in pairs. What one does to values in forward, the other does to gradients in
backward: all-gather and reduce-scatter, broadcast and reduce; all-reduce and all-to-all are their
own partners. That is why splitting a layer always costs a message in each direction.
"""

import torch
from torch import Tensor

from phalanx.lab.lab import Lab, gathered, scattered


def run(lab: Lab) -> None:
    group, rank, n = lab.group, lab.rank, lab.n
    # Row r is what rank r starts with: (ranks, numbers).
    table = torch.arange(n).double() + 10 * torch.arange(n)[:, None]

    def begin(name: str) -> Tensor:
        x = table[rank].clone()
        lab.step(name, x=x)
        return x

    def end(result: Tensor, want: Tensor) -> None:
        lab.after(result=result)
        lab.claim(f"{lab.now.title} is what one process computes", result, want)

    x = begin("all-reduce")  # everyone gets the sum
    group.all_reduce(x)
    end(x, table.sum(0))

    x = begin("reduce")  # only rank 0 gets it
    group.reduce(x, root=0)
    end(x, table[rank] if rank else table.sum(0))

    x = begin("broadcast")  # everyone gets what the last rank has
    group.broadcast(x, root=n - 1)
    end(x, table[n - 1])

    x = begin("all-gather")  # everyone gets everything
    end(gathered(group, x), table.flatten())

    x = begin("reduce-scatter")  # everyone gets one part of the sum
    end(scattered(group, x), table.sum(0)[rank])

    x = begin("all-to-all")  # part j goes to rank j: a transpose over ranks
    out = torch.empty_like(x)
    group.all_to_all(out, x)
    end(out, table[:, rank])

    x = begin("gather")  # rank 0 gets everything
    parts = [torch.empty_like(x) for _ in range(n)] if rank == 0 else None
    group.gather(parts, x, root=0)
    end(torch.cat(parts) if parts else x, table[rank] if rank else table.flatten())

    x = begin("scatter")  # rank 0 hands out its parts
    out = torch.empty(1, dtype=x.dtype)
    group.scatter(out, [x[i : i + 1].clone() for i in range(n)] if rank == 0 else None, root=0)
    end(out, table[0, rank])

    # The loss is the sum over ranks of weight_r . all_gather(x): its gradient comes back summed.
    begin("the gradient of an all-gather is a reduce-scatter")
    weights = torch.cos(torch.arange(n * n) + torch.arange(n)[:, None].double())  # (ranks, n n)
    leaves = [row.clone().requires_grad_() for row in table]
    want = torch.autograd.grad((weights @ torch.cat(leaves)).sum(), leaves)
    end(scattered(group, weights[rank].clone()), want[rank])
