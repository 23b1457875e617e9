"""ZeRO-1: every rank has all weights and all gradients; the optimizer's state is sharded over n ranks.

All weights lie in one flat vector, of which each rank updates an equal slice. Gradients are
reduce-scattered, so that a rank gets the sum for its slice only. It updates that slice with its own
part of Adam's state, and an all-gather makes the weights whole again. An all-reduce is those two
messages, so ZeRO-1 sends exactly what data parallel sends, 2(n-1)/n of the weights, and saves
(n-1)/n of Adam's two numbers per weight (Rajbhandari et al. 2020).
"""

import torch
from torch import Tensor

from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab, gathered, scattered
from phalanx.lab.mlp import Adam, gradients_of, start, trained


def run(lab: Lab) -> Values:
    rank, n = lab.rank, lab.n
    flat = padded(start(lab.size), n)
    weights = layers_of(flat, lab.size)  # views
    mine = flat.view(n, -1)[rank]
    adam = Adam(len(mine))

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

    values = lab.train(train_step, weights, state=[adam.m, adam.v])
    values |= {"state": adam.m.numel() + adam.v.numel(), "sent": lab.sent()}
    lab.note(
        f"Rank {rank} sent {lab.sent() / lab.size.steps:,.0f} bytes a step; 2(n-1)/n of the weights "
        f"are {2 * (n - 1) / n * flat.nbytes:,.0f}. Its state takes "
        f"{adam.m.nbytes + adam.v.nbytes:,} bytes of {2 * flat.nbytes:,}."
    )
    return values | {"gradients": layers_of(gathered(lab.group, *values["gradients"]), lab.size)}


def padded(parts: list[Tensor], n: int) -> Tensor:
    """All numbers in one vector whose length divides by n."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.nn.functional.pad(flat, (0, -len(flat) % n))


def layers_of(flat: Tensor, size: Size) -> list[Tensor]:
    """Views of the flat vector as weights."""
    return list(flat[: size.layers * size.width**2].view(size.layers, size.width, size.width))


def check(results: Results, size: Size) -> Claims:
    yield from trained(results, size, adam=True)
    n, count = len(results), size.layers * size.width**2
    count += -count % n
    yield from every(results, "state", "it has 2/n numbers of state for each weight", 2 * count / n)
    formula = size.steps * 2 * (n - 1) / n * 8 * count
    yield from every(results, "sent", "it sent 2(n-1)/n of the weights in each step", formula)
