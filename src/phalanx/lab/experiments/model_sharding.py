"""Model sharding: some layers here, the others there, and autograd crosses over by itself.

Between two devices of one process x.to(device) is enough: autograd knows the way back. Between two
ranks the crossing is written once, as two autograd functions: what one sends in forward, it receives
back as a gradient. Then every rank calls backward on what it has, and the gradients of each arrive
by themselves. One device works at a time, the others wait: with n devices, 1/n of the time is used.
It makes a model fit, but nothing faster; a pipeline does.

Without two GPUs the two devices are the CPU under two names.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import Group
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import batch, start, update


class Send(torch.autograd.Function):
    """Send x to the next rank; backward receives its gradient from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.like = group, torch.empty_like(x)
        group.send(x.contiguous(), to=group.rank + 1)
        return x.new_zeros(())  # something to call backward on

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        ctx.group.receive(ctx.like, source=ctx.group.rank + 1)
        return ctx.like, None


class Receive(torch.autograd.Function):
    """What the previous rank sends, in the shape of x; backward sends its gradient there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(x)
        group.receive(arrived, source=group.rank - 1)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.group.send(gradients[0].contiguous(), to=ctx.group.rank - 1)
        return None, None


def run(lab: Lab) -> None:
    size, last, own = lab.size, lab.n - 1, lab.part("layers")
    weights = [w.requires_grad_() for w in start(size)[own]]
    # Two devices of one process: the first half of the layers on one, the second on the other.
    gpus = torch.cuda.device_count() > 1
    devices = [torch.device("cuda", i) if gpus else torch.device("cpu") for i in range(2)]
    where = [devices[2 * i // size.layers] for i in range(size.layers)]
    moved = [w.to(at).requires_grad_() for w, at in zip(start(size), where, strict=True)]

    def on_two_devices(step: int) -> tuple[Tensor, list[Tensor]]:
        x = batch(size, step)
        for w, device in zip(moved, where, strict=True):
            x = F.gelu(x.to(device) @ w)
        loss = x.square().mean()
        return loss, updated(loss, moved)

    def on_ranks(step: int) -> tuple[Tensor | None, list[Tensor]]:
        x = batch(size, step)
        if lab.rank > 0:
            x = Receive.apply(x.requires_grad_(), lab.group)  # type: ignore[no-untyped-call]
        with lab.doing("F"):
            for w in weights:
                x = F.gelu(x @ w)
        loss = x.square().mean() if lab.rank == last else None
        end = Send.apply(x, lab.group) if loss is None else loss  # type: ignore[no-untyped-call]
        with lab.doing("B"):
            return loss, updated(end, weights)

    lab.train(on_ranks, weights, lambda x: x[own], how=", a rank for each range of layers")
    lab.train(on_two_devices, moved, how=", one process with two devices")


def updated(end: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradients, after the update. `backward` also runs through the crossing to the left,
    which `grad` would leave out."""
    torch.autograd.backward(end)
    gradients = [w.grad for w in weights if w.grad is not None]
    with torch.no_grad():
        update(weights, gradients)
    for w in weights:
        w.grad = None
    return gradients
