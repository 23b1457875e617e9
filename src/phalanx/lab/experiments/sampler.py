"""Which rank gets which samples: a new order every epoch, each sample once, the loss averaged over samples.

All ranks shuffle alike, from the seed and the epoch, and take every n-th sample: no message is
needed, and no sample occurs twice in an epoch. Without the epoch in the seed every epoch has the
same order. The last batch is smaller, and some ranks get fewer rows of it: the mean of the ranks'
means is then not the mean over samples. So sums and counts are all-reduced, and divided afterwards.
"""

import torch
from torch import Tensor

from phalanx.lab.claims import Claim, Claims, Results, Size, Values, equal, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import draw, gradients_of, start, update

EPOCHS = 2


def batches(size: Size, epoch: int) -> tuple[Tensor, ...]:
    """The samples of two batches and a smaller one, shuffled for this epoch."""
    generator = torch.Generator().manual_seed(7 + epoch)
    order = torch.randperm(2 * size.batch + size.batch // 2 + 1, generator=generator)
    return torch.split(order, size.batch)


def samples(size: Size) -> Tensor:
    return draw(20_000, 2 * size.batch + size.batch // 2 + 1, size.width)


def run(lab: Lab) -> Values:
    data, weights = samples(lab.size), start(lab.size)
    losses, means = [], []
    first: list[Tensor] = []
    seen: list[Tensor] = []
    for epoch in range(EPOCHS):
        for number, chosen in enumerate(batches(lab.size, epoch)):
            rows = chosen[lab.rank :: lab.n]
            seen.append(rows)
            lab.step(f"epoch {epoch}, batch {number} of {len(chosen)} samples")
            lab.shows("before", samples=rows, weights=weights)
            if len(rows):
                loss, gradients = gradients_of(weights, data[rows])
            else:
                loss, gradients = torch.zeros(()).double(), [torch.zeros_like(w) for w in weights]
            total = torch.stack([loss * len(rows), torch.tensor(float(len(rows)))])
            lab.group.all_reduce(total)
            mean = loss.clone()
            lab.group.all_reduce(mean, "average")
            for w, g in zip(weights, gradients, strict=True):
                # From a mean over own rows to this rank's part of the mean over all.
                g *= len(rows) / total[1]
                lab.group.all_reduce(g)
                update(w, g)
            losses.append((total[0] / total[1]).item())
            means.append(mean.item())
            first = first or gradients
            lab.shows("after", own_loss=loss.item(), loss=losses[-1], mean_of_means=means[-1])
    if lab.rank == 0:
        lab.note(
            f"In the uneven batch the loss is {losses[2]:.6f}, the mean of means {means[2]:.6f}."
        )
    return {"seen": seen, "losses": losses, "means": means, "gradients": first, "weights": weights}


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    data, weights = samples(size), start(size)
    chosen = [each for epoch in range(EPOCHS) for each in batches(size, epoch)]
    losses = []
    first: list[Tensor] = []
    for each in chosen:
        loss, gradients = gradients_of(weights, data[each])
        losses.append(loss.item())
        first = first or gradients
        for w, g in zip(weights, gradients, strict=True):
            update(w, g)
    half = len(chosen) // EPOCHS
    for epoch in range(EPOCHS):
        mine = [
            part for values in results for part in values["seen"][epoch * half : (epoch + 1) * half]
        ]
        says = f"epoch {epoch}: every sample was used once"
        yield equal(says, torch.cat(mine).sort().values, torch.arange(len(data)))
    other = not torch.equal(torch.cat(chosen[:half]), torch.cat(chosen[half:]))
    yield Claim("the epochs differ in order", other)
    says = "it had every n-th sample"
    yield from every(results, "seen", says, lambda rank: [each[rank::n] for each in chosen])
    yield from every(results, "losses", "losses are those over all samples", losses)
    yield from every(results, "gradients", "gradients of the first batch", first)
    yield from every(results, "weights", "weights at the end", weights)
    means = results[0]["means"]
    yield from every(results, "means", "all computed the same means of means", means)
    uneven = [i for i, each in enumerate(chosen) if len(each) % n]
    wrong = all(abs(means[i] - losses[i]) > 1e-9 for i in uneven)
    yield Claim("where rows are uneven, the mean of means is wrong", wrong, f"batches {uneven}")
    even = [i for i in range(len(chosen)) if i not in uneven]
    says = "where rows are even, it is right"
    yield equal(says, [means[i] for i in even], [losses[i] for i in even])
