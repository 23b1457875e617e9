"""An optimizer that updates whole matrices, each sharded over all ranks."""

import torch
from torch import Tensor

from phalanx_lab.lab import Lab, gathered, scattered
from phalanx_lab.mlp import batch, gradients_of, start

RATE, MOMENTUM = 0.01, 0.9


def muon(lab: Lab) -> None:
    """Muon: each matrix has an owner, to whom its parts travel and from whom the update comes back.

    Muon (Jordan et al. 2024) makes the momentum of a matrix orthogonal, which brings all its singular
    values near one, and moves the weight by that. So a part of a matrix cannot be updated by itself:
    orthogonal parts are not parts of the orthogonal matrix, though every gradient was right.
    """
    size, n = lab.size, lab.n
    rows, mine = lab.part("width"), lab.part("layers")
    weights, one = start(size), start(size)
    high, layers = rows.stop - rows.start, mine.stop - mine.start
    momentum = torch.zeros(size.layers, high, size.width, dtype=torch.float64)
    whole = [torch.zeros_like(w) for w in one]

    # Rank r has its rows of each layer's momentum, as under ZeRO. An all-to-all brings each layer's
    # rows to its owner, who makes the matrix orthogonal while the others do theirs; a second one
    # brings every rank its rows of all updates. Each sends (n-1)/n of a rank's rows. If every rank
    # gathered all matrices, each would do the work of all.
    for step in range(size.steps):
        lab.step(f"step {step}", weights=weights, momentum=momentum)
        _, gradients = lab.gradients(weights, lab.rows(step))
        # my rows of all
        summed = scattered(lab.group, torch.stack(gradients, 1), "average")
        momentum.lerp_(summed.transpose(0, 1), 1 - MOMENTUM)
        came = torch.empty_like(momentum)
        # Of each rank its rows of my layers.
        lab.group.all_to_all(came, momentum)
        owned = (
            came.view(n, layers, high, -1)
            .transpose(0, 1)
            .reshape(layers, size.width, -1)
        )
        with lab.doing("U"):
            owned = torch.stack([orthogonal(x) for x in owned])
        back = owned.view(layers, n, high, -1).transpose(0, 1).contiguous()
        # My rows of all layers.
        lab.group.all_to_all(came, back.view_as(momentum))
        shards = gathered(lab.group, came.transpose(0, 1).contiguous())
        for w, change in zip(weights, shards.unbind(1), strict=True):
            w -= RATE * change
        lab.after(weights=weights, momentum=momentum)
        plain = gradients_of(one, batch(size, step), size.layers)[1]
        for w, kept, gradient in zip(one, whole, plain, strict=True):
            kept.lerp_(gradient, 1 - MOMENTUM)
            w -= RATE * orthogonal(kept)
    # How wrong it would be if each rank made its own rows orthogonal.
    lab.claim("weights are those of one process", weights, one)
    parts = torch.cat([orthogonal(x) for x in torch.split(whole[0], high)])
    exact = orthogonal(whole[0])
    far = float((parts - exact).norm() / exact.norm())
    lab.note(f"Had each rank updated its rows by themselves: {far:.0%} off.")
    lab.claim(
        "rows by themselves would be another update", far > 0.05 or n == 1
    )
    sent = lab.sent() / size.steps  # and the sum of gradients, and the weights
    lab.claim(
        "it sent 2(n-1)/n of all weights, and of its rows", sent, moved(lab)
    )


def moved(lab: Lab) -> float:
    """Bytes of a reduce-scatter and an all-gather of everything, and of two exchanges
    of 1/n of it."""
    return (2 + 2 / lab.n) * (lab.n - 1) / lab.n * lab.size.bytes


def orthogonal(x: Tensor) -> Tensor:
    """Run five steps of Newton-Schulz, which bring the singular values of x near
    one."""
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x
