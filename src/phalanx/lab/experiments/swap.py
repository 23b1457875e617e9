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

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import loss_of, start, update


class SwapDevice:
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

    def to_host(self, gradient: Tensor) -> Tensor:
        self.copied_out += gradient.nbytes
        return gradient.to("cpu", copy=True)


def run(lab: Lab) -> None:
    size, host, last = lab.size, start(lab.size), lab.size.layers - 1
    device = SwapDevice(host)

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x = lab.rows(step).to(device.device)
        device.load(0)
        for layer in range(size.layers):
            device.load(layer + 1)
            x = lab.forward(layer, x, device.here[layer])
            if layer != last:
                del device.here[layer]
        loss, g = loss_of(x)
        lab.shows("between forward and backward", on_the_device=list(device.here.values()))
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            device.load(layer - 1)
            g, gradient = lab.backward(layer, g, device.here.pop(layer))
            gradients.insert(0, device.to_host(gradient))
        for gradient in gradients:
            lab.group.all_reduce(gradient, "average")
        update(host, gradients)
        return loss, gradients

    lab.train(train_step, host)
    lab.claim("the device had two layers", device.most, min(2, size.layers))
    layer = size.steps * 8 * size.width**2
    formula = [(2 * size.layers - 1) * layer, size.layers * layer]
    lab.claim("bytes in and out", [device.copied_in, device.copied_out], formula)
