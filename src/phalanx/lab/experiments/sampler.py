"""Which rank gets which samples: a new order every epoch, each sample once, the loss averaged over samples.

All ranks shuffle alike, from the seed and the epoch, and take every n-th sample: no message is
needed, and no sample occurs twice in an epoch. Without the epoch in the seed every epoch has the
same order. The last batch is smaller, and some ranks get fewer rows of it: the mean of the ranks'
means is then not the mean over samples. So sums and counts are all-reduced, and divided afterwards.
"""

import torch
from torch import Tensor

from phalanx.lab.catalogue import Size
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import draw, gradients_of, start, update

EPOCHS = 2


def batches(size: Size, epoch: int) -> tuple[Tensor, ...]:
    """The samples of two batches and a smaller one, shuffled for this epoch."""
    generator = torch.Generator().manual_seed(7 + epoch)
    order = torch.randperm(2 * size.batch + size.batch // 2 + 1, generator=generator)
    return torch.split(order, size.batch)


def run(lab: Lab) -> None:
    size, n = lab.size, lab.n
    data = draw(20_000, 2 * size.batch + size.batch // 2 + 1, size.width)  # (samples, width)
    weights, alone = start(size), start(size)
    used = torch.zeros(EPOCHS, len(data))
    for epoch in range(EPOCHS):
        for number, chosen in enumerate(batches(size, epoch)):
            rows = chosen[lab.rank :: n]
            used[epoch, rows] += 1
            title = f"epoch {epoch}, batch {number} of {len(chosen)} samples"
            lab.step(title, samples=rows, weights=weights)
            loss, gradients = torch.zeros(()).double(), [torch.zeros_like(w) for w in weights]
            if len(rows):
                loss, gradients = gradients_of(weights, data[rows])
            total = torch.stack([loss * len(rows), torch.tensor(float(len(rows)))])
            lab.group.all_reduce(total)
            mean = loss.clone()
            lab.group.all_reduce(mean, "average")
            for g in gradients:
                # From a mean over own rows to this rank's part of the mean over all.
                g *= len(rows) / total[1]
                lab.group.all_reduce(g)
            update(weights, gradients)
            lab.after(own_loss=loss.item(), loss=total[0] / total[1], mean_of_means=mean)

            want, wanted = gradients_of(alone, data[chosen])
            update(alone, wanted)
            lab.claim("the loss is that over all samples", total[0] / total[1], want)
            lab.claim("gradients are those over all samples", gradients, wanted)
            if len(chosen) % n:
                says = "where rows are uneven, the mean of means is wrong"
                lab.claim(says, abs(float(mean - want)) > 1e-9)
            else:
                lab.claim("where rows are even, the mean of means is right", mean, want)
    lab.claim("weights at the end are those of one process", weights, alone)
    together = lab.everyone(used).sum(0)
    lab.claim("every sample was used once in an epoch", together, torch.ones_like(used))
    orders = [torch.cat(batches(size, epoch)) for epoch in range(EPOCHS)]
    lab.claim("the epochs differ in order", not torch.equal(*orders))
