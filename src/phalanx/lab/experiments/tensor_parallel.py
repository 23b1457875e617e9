"""Tensor parallel by columns: every rank computes some features of every layer, then all are gathered.

A rank has some columns of each weight, and so computes some features of the output for *all* rows.
The next layer needs all features: an all-gather. Backward mirrors it: each rank's columns give a
part of the input's whole gradient, the parts must be summed, and a rank continues with its own
features only: a reduce-scatter. No weight and no weight's gradient is ever sent. Two messages for
each layer, each of (n-1)/n of the activations.
"""

import torch
from torch import Tensor

from phalanx.lab.lab import Lab, gathered, scattered
from phalanx.lab.mlp import batch, loss_of, start, update


def run(lab: Lab) -> None:
    size, n, columns = lab.size, lab.n, lab.part("width")
    weights = [w[:, columns].clone() for w in start(size)]
    to_input: list[Tensor] = []

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x = batch(size, step)  # every rank has all rows
        for layer, w in enumerate(weights):
            # Collectives join along the first dim: features are made the first.
            x = gathered(lab.group, lab.forward(layer, x, w).T.contiguous()).T
        loss, g = loss_of(x)
        g = g[:, columns]
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            g, gradient = lab.backward(layer, g, weights[layer])
            gradients.insert(0, gradient)
            g = scattered(lab.group, g.T.contiguous()).T
        update(weights, gradients)
        to_input.append(g)
        return loss, gradients

    lab.train(train_step, weights, lambda layers: [w[:, columns] for w in layers])
    x = batch(size, 0).requires_grad_()
    y = x
    for w in start(size):
        y = torch.nn.functional.gelu(y @ w)
    (want,) = torch.autograd.grad(y.square().mean(), x)
    says = "the gradient of the input is right in its columns"
    lab.claim(says, to_input[0], want[:, columns])
    formula = size.steps * size.layers * 2 * (n - 1) / n * 8 * size.batch * size.width
    lab.claim("it sent 2(n-1)/n of every layer's output", lab.sent(), formula)
