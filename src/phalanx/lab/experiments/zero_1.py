"""ZeRO-1: every rank has all weights and all gradients; the optimizer's state is sharded over n ranks.

All weights lie in one flat vector, of which each rank updates an equal slice. Gradients are
reduce-scattered, so that a rank gets the sum for its slice only. It updates that slice with its own
part of Adam's state, and an all-gather makes the weights whole again. An all-reduce is those two
messages, so ZeRO-1 sends exactly what data parallel sends, 2(n-1)/n of the weights, and saves
(n-1)/n of Adam's two numbers per weight (Rajbhandari et al. 2020).
"""

import torch
from torch import Tensor

from phalanx.lab.lab import Lab, scattered
from phalanx.lab.mlp import AdamState, gradients_of, start


def run(lab: Lab) -> None:
    size, rank, n = lab.size, lab.rank, lab.n
    flat = padded(start(size), n)
    count = size.layers * size.width**2
    weights = list(flat[:count].view(size.layers, size.width, size.width))  # views
    mine = flat.view(n, -1)[rank]
    adam = AdamState(len(mine))

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        with lab.doing("F B"):
            loss, gradients = gradients_of(weights, lab.rows(step))
        summed = scattered(lab.group, padded(gradients, n), "average")
        del gradients
        part = mine.clone()
        with lab.doing("U"):
            adam.update(part, summed)
        lab.group.all_gather(flat, part)
        return loss, [summed]

    def slice_of(layers: list[Tensor]) -> list[Tensor]:
        return [padded(layers, n).view(n, -1)[rank]]

    state = [adam.m, adam.v]
    lab.train(train_step, weights, slice_of, of_weights=list, adam=True, state=state)
    kept, total = sum(x.numel() for x in state), count + -count % n
    lab.claim("it has 2/n numbers of state for each weight", kept, 2 * total / n)
    formula = size.steps * 2 * (n - 1) / n * flat.nbytes
    lab.claim("it sent 2(n-1)/n of the weights in each step", lab.sent(), formula)


def padded(parts: list[Tensor], n: int) -> Tensor:
    """All numbers in one vector whose length divides by n."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.nn.functional.pad(flat, (0, -len(flat) % n))
