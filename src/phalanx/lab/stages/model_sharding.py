"""Model sharding: some layers here, the others there, and autograd walks across by itself.

Between two devices of one process nothing is needed but x.to(device): autograd knows the way back.
Between two ranks the crossing is written once, as two autograd functions: what one sends forward,
it receives back as a gradient. Then every rank calls backward on what it has, and gradients arrive
in each on their own. One device works at a time, the others wait: with n devices, 1/n of the time
is used. It makes a model fit, it makes nothing faster; a pipeline does.

Without two GPUs the two devices are the CPU under two names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import batch, one_process, start, trained_as_one, update
from phalanx.lab.note import Note, everyone


class Give(torch.autograd.Function):
    """Send x to the right; backward receives its gradient from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Group) -> Tensor:
        ctx.wire, ctx.like = wire, torch.empty_like(x)
        wire.send(x.contiguous(), to=wire.rank + 1)
        return x.new_zeros(())  # something to call backward on

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        ctx.wire.receive(ctx.like, source=ctx.wire.rank + 1)
        return ctx.like, None


class Take(torch.autograd.Function):
    """Receive into x from the left; backward sends its gradient there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Group) -> Tensor:
        ctx.wire = wire
        came = torch.empty_like(x)
        wire.receive(came, source=wire.rank - 1)
        return came

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.wire.send(gradients[0].contiguous(), to=ctx.wire.rank - 1)
        return None, None


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    mine = size.part("layers", rank, n)
    weights = [w.requires_grad_() for w in start(size)[mine]]
    losses = []
    first: list[Tensor] = []
    for step in range(size.steps):
        note.step(f"step {step}, a rank for each run of layers")
        note.holds("before", weights=weights)
        x = batch(size, step)
        if rank > 0:
            x = Take.apply(x.requires_grad_(), wire)  # type: ignore[no-untyped-call]
        with note.doing("F"):
            for w in weights:
                x = F.gelu(x @ w)
        end = x.square().mean() if rank == n - 1 else Give.apply(x, wire)  # type: ignore[no-untyped-call]
        with note.doing("B"):
            gradients = autograd(end, weights)
        with torch.no_grad():
            for w, gradient in zip(weights, gradients, strict=True):
                update(w, gradient)
        losses.append(end.item())
        first = first or gradients
        note.holds("after", gradients=gradients, weights=weights)
    loss = torch.tensor(losses, dtype=torch.float64)
    wire.broadcast(loss, root=n - 1)
    held = {"losses": loss, "gradients": first, "weights": [w.detach() for w in weights]}
    two = two_devices(size, note)
    return held | {f"{what}, two devices": value for what, value in two.items()}


def autograd(end: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """`backward`, which also runs through what leads nowhere here: the crossing to the left."""
    torch.autograd.backward(end)
    gradients = [w.grad for w in weights if w.grad is not None]
    for w in weights:
        w.grad = None
    return gradients


def two_devices(size: Size, note: Note) -> Held:
    """The first half of the layers on one device, the second on another, in this process alone."""
    gpus = torch.cuda.device_count() > 1
    devices = [torch.device("cuda", i) if gpus else torch.device("cpu") for i in range(2)]
    where = [devices[2 * i // size.layers] for i in range(size.layers)]
    weights = [w.to(at).requires_grad_() for w, at in zip(start(size), where, strict=True)]
    losses = []
    first: list[Tensor] = []
    note.step(f"one process, devices {devices[0]} and {devices[1]}")
    note.holds("before", weights=weights)
    for step in range(size.steps):
        x = batch(size, step).to(devices[0])
        for w, at in zip(weights, where, strict=True):
            x = F.gelu(x.to(at) @ w)
        loss = x.square().mean()
        gradients = autograd(loss, weights)
        with torch.no_grad():
            for w, gradient in zip(weights, gradients, strict=True):
                update(w, gradient)
        losses.append(loss.item())
        first = first or gradients
    note.holds("after", gradients=first, weights=weights)
    return {"losses": losses, "gradients": first, "weights": [w.detach() for w in weights]}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n, alone = len(results), one_process(size)
    yield from trained_as_one(results, size, how=", two devices")
    for rank, held in enumerate(results):
        mine = size.part("layers", rank, n)
        yield equal(f"rank {rank}: losses are one process's", held["losses"], alone.losses)
        yield equal(
            f"rank {rank}: gradients of its layers", held["gradients"], alone.gradients[mine]
        )
        yield equal(f"rank {rank}: its layers at the end", held["weights"], alone.weights[mine])
