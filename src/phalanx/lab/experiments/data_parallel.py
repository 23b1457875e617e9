"""Data parallel: each rank has its own rows and loss; gradient and weights are the same everywhere.

Every rank works on its rows with a copy of all weights. The losses differ; the average of the
gradients over ranks is the gradient of the whole batch, so the copies stay equal. The gradient of
the last layer is ready first. The second form starts its all-reduce at once and continues with the
layer below: each message travels while the rest of backward computes. Each rank sends 2(n-1)/n of
the gradients, whatever the batch.
"""

from functools import partial

from torch import Tensor

from phalanx.comm import Work
from phalanx.lab.claims import Claim, Claims, Results, Size, Values, equal, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import batch, gradients_of, loss_of, start, trained, update

FORMS = ("", " overlapped")


def run(lab: Lab) -> Values:
    values: Values = {}
    for how in FORMS:
        weights, own = start(lab.size), list[Tensor]()
        values |= lab.train(partial(train_step, lab, weights, own, bool(how)), weights, how)
        values[f"own gradient{how}"] = own[0]
    return values | {"sent": lab.sent()}


def train_step(
    lab: Lab, weights: list[Tensor], own: list[Tensor], overlapped: bool, step: int
) -> tuple[Tensor, list[Tensor]]:
    x = lab.rows(step)
    for layer, w in enumerate(weights):
        x = lab.forward(layer, x, w)
    loss, g = loss_of(x)
    gradients: list[Tensor] = []
    works: list[Work] = []
    for layer in reversed(range(len(weights))):
        g, gradient = lab.backward(layer, g, weights[layer])
        gradients.insert(0, gradient)
        if layer == 0:
            own.append(gradient.clone())
        if overlapped:
            works.append(lab.group.all_reduce(gradient, "average", wait=False))
    lab.shows("own", loss=loss.item(), gradient_of_the_first_layer=own[-1])
    if not overlapped:
        works = [lab.group.all_reduce(gradient, "average") for gradient in reversed(gradients)]
    for work in works:
        work.wait()
    with lab.doing("U"):
        for w, gradient in zip(weights, gradients, strict=True):
            update(w, gradient)
    return loss, gradients


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    rows = [batch(size, 0)[size.part("batch", rank, n)] for rank in range(n)]
    own = [gradients_of(start(size), x) for x in rows]
    for how in FORMS:
        yield from trained(results, size, how=how)
        says = f"the first loss{how} is that of its own rows"
        for rank, values in enumerate(results):
            yield equal(f"rank {rank}: {says}", values[f"losses{how}"][0], own[rank][0])
        says = f"its own gradient{how} is that of its rows"
        yield from every(results, f"own gradient{how}", says, lambda rank: own[rank][1][0])
        losses = zip(*(values[f"losses{how}"] for values in results), strict=True)
        yield Claim(
            f"every rank has another loss{how}", all(len(set(each)) == n for each in losses)
        )
    formula = len(FORMS) * size.steps * 2 * (n - 1) / n * size.bytes
    yield from every(results, "sent", "it sent 2(n-1)/n of the gradients in each step", formula)
