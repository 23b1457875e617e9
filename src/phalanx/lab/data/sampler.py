"""Who gets which samples: a new order every epoch, each sample once, a loss averaged over samples.

All ranks shuffle alike, from the seed and the epoch, and take every n-th: no message is needed, and
no sample is seen twice in an epoch. Forget the epoch in the seed and every epoch has the same
order. The last batch is smaller, and some ranks get fewer rows of it: the mean of the ranks' means
is then not the mean over samples. So sums and counts are all-reduced, and divided afterwards.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import draw, gradients_of, start, update
from phalanx.lab.note import Note, everyone

EPOCHS = 2


def samples(size: Size) -> int:
    """Two batches and a rest, so that the rest falls unevenly on the ranks."""
    return 2 * size.batch + size.batch // 2 + 1


def order(size: Size, epoch: int) -> Tensor:
    """Every sample once, shuffled for this epoch."""
    generator = torch.Generator().manual_seed(7 + epoch)
    return torch.randperm(samples(size), generator=generator)


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    data = draw(20_000, samples(size), size.width)
    weights = start(size)
    losses, means, counts = [], [], []
    first: list[Tensor] = []
    seen: list[Tensor] = []
    for epoch in range(EPOCHS):
        shuffled = order(size, epoch)
        mine: list[Tensor] = []
        for at in range(0, len(shuffled), size.batch):
            chosen = shuffled[at : at + size.batch]
            rows = chosen[rank::n]
            mine.append(rows)
            note.step(f"epoch {epoch}, samples {at} to {at + len(chosen) - 1}")
            note.holds("before", samples=rows, weights=weights)
            loss, gradients = gradients_of(weights, data[rows]) if len(rows) else _nothing(weights)
            total = torch.stack([loss * len(rows), torch.tensor(float(len(rows)))])
            wire.all_reduce(total)
            mean = loss.clone()
            wire.all_reduce(mean, "average")
            for w, g in zip(weights, gradients, strict=True):
                # From a mean over own rows to this rank's part of the mean over all.
                g *= len(rows) / total[1]
                wire.all_reduce(g)
                update(w, g)
            losses.append((total[0] / total[1]).item())
            means.append(mean.item())
            counts.append(len(rows))
            first = first or [g.clone() for g in gradients]
            note.holds("after", own_loss=loss.item(), loss=losses[-1], mean_of_means=means[-1])
        seen.append(torch.cat(mine))
    last = len(range(0, samples(size), size.batch)) - 1
    if rank == 0:
        note.says(
            f"In the uneven batch the loss is {losses[last]:.6f}; the mean of the ranks' means "
            f"would be {means[last]:.6f}."
        )
    return {"seen": seen, "losses": losses, "means": means, "counts": counts} | {
        "gradients": first,
        "weights": weights,
    }


def _nothing(weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return torch.zeros((), dtype=torch.float64), [torch.zeros_like(w) for w in weights]


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    for epoch in range(EPOCHS):
        everything = torch.cat([held["seen"][epoch] for held in results]).sort().values
        says = f"epoch {epoch}: every sample was seen once"
        yield equal(says, everything, torch.arange(samples(size)))
        for rank, held in enumerate(results):
            batches = torch.split(order(size, epoch), size.batch)
            want = torch.cat([chosen[rank::n] for chosen in batches])
            yield equal(f"rank {rank}, epoch {epoch}: every n-th", held["seen"][epoch], want)
    yield holds("the epochs differ in order", not torch.equal(order(size, 0), order(size, 1)))

    data, weights = draw(20_000, samples(size), size.width), start(size)
    losses, rows = [], []
    first: list[Tensor] = []
    for epoch in range(EPOCHS):
        for chosen in torch.split(order(size, epoch), size.batch):
            loss, gradients = gradients_of(weights, data[chosen])
            losses.append(loss.item())
            first = first or gradients
            rows.append(chosen)
            for w, g in zip(weights, gradients, strict=True):
                update(w, g)
    for rank, held in enumerate(results):
        yield equal(f"rank {rank}: losses are those over all samples", held["losses"], losses)
        yield equal(f"rank {rank}: gradients of the first batch", held["gradients"], first)
        yield equal(f"rank {rank}: weights at the end", held["weights"], weights)
        yield equal(f"rank {rank}: rows it had", held["counts"], [len(c[rank::n]) for c in rows])
        yield equal(f"rank {rank}: all saw the same means", held["means"], results[0]["means"])
    uneven = [i for i, chosen in enumerate(rows) if len(chosen) % n]
    apart = all(abs(results[0]["means"][i] - losses[i]) > 1e-9 for i in uneven)
    yield holds("where rows are uneven, the mean of means is wrong", apart, f"batches {uneven}")
    fine = [i for i, chosen in enumerate(rows) if not len(chosen) % n]
    even = [results[0]["means"][i] for i in fine]
    yield equal("where rows are even, it is right", even, [losses[i] for i in fine])
