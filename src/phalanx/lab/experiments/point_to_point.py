"""Send and receive: a value passes through all ranks and is changed, its gradient travels back.

A send does not wait for its peer, a receive does. Two ranks that both send first do not block each
other; two that both receive first wait for ever. Messages between two ranks keep their order, and
only the order identifies them: the first one sent is the first one received.
"""

import torch

from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import draw


def run(lab: Lab) -> Values:
    group, rank, n = lab.group, lab.rank, lab.n
    factor = draw(rank, 4)

    lab.step("forward: every rank multiplies by its factor and sends the result on")
    x = torch.ones(4, dtype=torch.float64)
    if rank > 0:
        group.receive(x, source=rank - 1)
    lab.shows("before", x=x, factor=factor)
    y = x * factor
    if rank < n - 1:
        group.send(y, to=rank + 1)
    lab.shows("after", y=y)

    lab.step("backward: the gradient comes from the next rank and goes to the previous one")
    g = torch.ones(4, dtype=torch.float64)
    if rank < n - 1:
        group.receive(g, source=rank + 1)
    lab.shows("before", gradient_of_y=g)
    if rank > 0:
        group.send(g * factor, to=rank - 1)
    lab.shows("after", gradient_of_factor=g * x)

    lab.step("two messages to the next rank arrive in order")
    first, second = torch.tensor([1.0 + rank]), torch.tensor([100.0 + rank])
    lab.shows("before", first=first, second=second)
    # Everyone sends before anyone receives, so the ring does not block.
    group.send(first, to=(rank + 1) % n)
    group.send(second, to=(rank + 1) % n)
    arrived = [torch.empty(1), torch.empty(1)]
    for message in arrived:
        group.receive(message, source=(rank - 1) % n)
    lab.shows("after", arrived_first=arrived[0], arrived_second=arrived[1])
    return {"y": y, "gradient": g * x, "arrived": torch.cat(arrived)}


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    factors = [draw(rank, 4).requires_grad_() for rank in range(n)]
    products = [factors[0]]
    for factor in factors[1:]:
        products.append(products[-1] * factor)
    torch.autograd.backward(products[-1].sum())
    yield from every(results, "y", "y is that of one process", lambda rank: products[rank])
    says = "the gradient is autograd's"
    yield from every(results, "gradient", says, lambda rank: factors[rank].grad)
    says = "messages kept their order"
    yield from every(
        results, "arrived", says, lambda rank: [1 + (rank - 1) % n, 100 + (rank - 1) % n]
    )
