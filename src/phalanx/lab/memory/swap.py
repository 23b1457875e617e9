"""Swapping: the model lives in the host's memory, and only the layers at work are on the device.

Forward brings a layer in, and the next one behind it, and throws out the one before. Backward comes
the other way; the last layer is still there. Gradients leave for the host as soon as they are made,
and the update happens there. The device holds two layers however many there are; each step moves
every layer in twice less the last, and every gradient out once. It pays where computing a layer
takes longer than moving one: with many rows. On a GPU the copies go on a stream of their own from
pinned memory; without one, the device is a second copy in the host's memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import backward, batch, forward, loss_of, start, trained_as_one, update
from phalanx.lab.note import Note, everyone


class Device:
    """The few layers that are in, and the bytes that went in and out."""

    def __init__(self, host: list[Tensor]) -> None:
        self.host, self.here = host, dict[int, Tensor]()
        self.at = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.most = self.moved_in = self.moved_out = 0

    def bring(self, layer: int) -> None:
        if 0 <= layer < len(self.host) and layer not in self.here:
            self.here[layer] = self.host[layer].to(self.at, copy=True)
            self.moved_in += self.host[layer].nbytes
            self.most = max(self.most, len(self.here))

    def drop(self, layer: int) -> None:
        self.here.pop(layer, None)

    def hand_back(self, gradient: Tensor) -> Tensor:
        self.moved_out += gradient.nbytes
        return gradient.to("cpu", copy=True)


def run(world: World, size: Size, note: Note) -> Held:
    wire = everyone(world)
    host = start(size)
    device = Device(host)
    last = size.layers - 1
    losses = []
    first: list[Tensor] = []
    for step in range(size.steps):
        note.step(f"step {step}")
        note.holds("before", host=host, device=list(device.here.values()))
        x, kept = batch(size, step)[size.part("batch", world.rank, world.size)].to(device.at), []
        device.bring(0)
        for layer in range(size.layers):
            device.bring(layer + 1)
            with note.doing(f"F{layer}"):
                x, saved = forward(x, device.here[layer])
                kept.append(saved)
            if layer != last:
                device.drop(layer)
        loss, g = loss_of(x)
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            device.bring(layer - 1)
            with note.doing(f"B{layer}"):
                g, gradient = backward(g, kept.pop(), device.here[layer])
            gradients.insert(0, device.hand_back(gradient))
            device.drop(layer)
        for w, gradient in zip(host, gradients, strict=True):
            wire.all_reduce(gradient, "average")
            update(w, gradient)
        wire.all_reduce(loss, "average")
        losses.append(loss.item())
        first = first or gradients
        note.holds("after", host=host, gradients=gradients, most_layers_on_the_device=device.most)
    held = {"losses": losses, "gradients": first, "weights": host}
    return held | {"most": device.most, "moved": [device.moved_in, device.moved_out]}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from trained_as_one(results, size)
    for rank, held in enumerate(results):
        most = min(2, size.layers)
        yield equal(f"rank {rank}: the device held two layers", held["most"], most)
        layer = size.steps * 8 * size.width**2
        moved = [(2 * size.layers - 1) * layer, size.layers * layer]
        yield equal(f"rank {rank}: bytes in and out", held["moved"], moved)
