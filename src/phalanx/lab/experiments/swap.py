"""Swapping: the model is in the host's memory, and only the layers in use are on the device.

Forward copies a layer in, and the next one after it, and frees the one before. Backward comes the
other way; the last layer is still there. Gradients are copied to the host as soon as they are made,
and the update happens there. The device has two layers however many there are; each step copies
every layer in twice, except the last, and every gradient out once. It pays where computing a layer
takes longer than copying one: with many rows. On a GPU the copies use a stream of their own and
pinned memory; without one, the device is a second copy in the host's memory.
"""

import torch
from torch import Tensor

from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import loss_of, start, trained, update


class Device:
    """The few layers that are on the device, and the bytes that were copied in and out."""

    def __init__(self, host: list[Tensor]) -> None:
        self.host, self.here = host, dict[int, Tensor]()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.most = self.copied_in = self.copied_out = 0

    def load(self, layer: int) -> None:
        if 0 <= layer < len(self.host) and layer not in self.here:
            self.here[layer] = self.host[layer].to(self.device, copy=True)
            self.copied_in += self.host[layer].nbytes
            self.most = max(self.most, len(self.here))

    def free(self, layer: int) -> None:
        self.here.pop(layer, None)

    def to_host(self, gradient: Tensor) -> Tensor:
        self.copied_out += gradient.nbytes
        return gradient.to("cpu", copy=True)


def run(lab: Lab) -> Values:
    host = start(lab.size)
    device, last = Device(host), lab.size.layers - 1

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x = lab.rows(step).to(device.device)
        device.load(0)
        for layer in range(lab.size.layers):
            device.load(layer + 1)
            x = lab.forward(layer, x, device.here[layer])
            if layer != last:
                device.free(layer)
        loss, g = loss_of(x)
        lab.shows("between forward and backward", on_the_device=list(device.here.values()))
        gradients: list[Tensor] = []
        for layer in reversed(range(lab.size.layers)):
            device.load(layer - 1)
            g, gradient = lab.backward(layer, g, device.here[layer])
            gradients.insert(0, device.to_host(gradient))
            device.free(layer)
        for w, gradient in zip(host, gradients, strict=True):
            lab.group.all_reduce(gradient, "average")
            update(w, gradient)
        return loss, gradients

    values = lab.train(train_step, host)
    return values | {"most": device.most, "copied": [device.copied_in, device.copied_out]}


def check(results: Results, size: Size) -> Claims:
    yield from trained(results, size)
    yield from every(results, "most", "the device had two layers", min(2, size.layers))
    layer = size.steps * 8 * size.width**2
    copied = [(2 * size.layers - 1) * layer, size.layers * layer]
    yield from every(results, "copied", "bytes in and out", copied)
