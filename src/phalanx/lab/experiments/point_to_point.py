"""Send and receive: a value passes through all ranks and is changed, its gradient travels back.

A send does not wait for its peer, a receive does. Two ranks that both send first do not block each
other; two that both receive first wait for ever. Messages between two ranks keep their order, and
only the order identifies them: the first one sent is the first one received.
"""

import torch

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import draw


def run(lab: Lab) -> None:
    group, rank, n = lab.group, lab.rank, lab.n
    factor = draw(rank, 4)

    lab.step("forward: every rank multiplies by its factor and sends the result on", factor=factor)
    x = torch.ones(4, dtype=torch.float64)
    if rank > 0:
        group.receive(x, source=rank - 1)
    y = x * factor
    if rank < n - 1:
        group.send(y, to=rank + 1)
    lab.after(x=x, y=y)

    lab.step("backward: the gradient comes from the next rank and goes to the previous one", y=y)
    g = torch.ones(4, dtype=torch.float64)
    if rank < n - 1:
        group.receive(g, source=rank + 1)
    if rank > 0:
        group.send(g * factor, to=rank - 1)
    lab.after(gradient_of_y=g, gradient_of_factor=g * x)

    factors = [draw(i, 4).requires_grad_() for i in range(n)]
    products = [torch.stack(factors[: i + 1]).prod(0) for i in range(n)]
    gradients = torch.autograd.grad(products[-1].sum(), factors)
    lab.claim("y is that of one process", y, products[rank])
    lab.claim("the gradient is autograd's", g * x, gradients[rank])

    first, second = torch.tensor([1.0 + rank]), torch.tensor([100.0 + rank])
    lab.step("two messages to the next rank arrive in order", first=first, second=second)
    # Everyone sends before anyone receives, so the ring does not block.
    group.send(first, to=(rank + 1) % n)
    group.send(second, to=(rank + 1) % n)
    arrived = [torch.empty(1), torch.empty(1)]
    for message in arrived:
        group.receive(message, source=(rank - 1) % n)
    lab.after(arrived_first=arrived[0], arrived_second=arrived[1])
    before = (rank - 1) % n
    lab.claim("messages kept their order", torch.cat(arrived), [1 + before, 100 + before])
