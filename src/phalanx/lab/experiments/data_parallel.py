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
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import gradients_of, loss_of, start, update

FORMS = ("", " overlapped")


def run(lab: Lab) -> None:
    n = lab.n
    loss, own = gradients_of(start(lab.size), lab.rows(0))
    for how in FORMS:
        weights, gradients = start(lab.size), list[Tensor]()
        losses = lab.train(partial(train_step, lab, weights, gradients, how), weights, how=how)
        lab.claim(f"the first loss{how} is that of its own rows", losses[0], loss)
        lab.claim(f"its own gradient{how} is that of its rows", gradients[0], own[0])
        others = lab.everyone(loss.new_tensor(losses)).T.tolist()  # (steps, ranks)
        lab.claim(f"every rank has another loss{how}", all(len(set(row)) == n for row in others))
    formula = len(FORMS) * lab.size.steps * 2 * (n - 1) / n * lab.size.bytes
    lab.claim("it sent 2(n-1)/n of the gradients in each step", lab.sent(), formula)


def train_step(
    lab: Lab, weights: list[Tensor], own: list[Tensor], how: str, step: int
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
        if how:
            works.append(lab.group.all_reduce(gradient, "average", wait=False))
    if not how:
        works = [lab.group.all_reduce(gradient, "average") for gradient in reversed(gradients)]
    for work in works:
        work.wait()
    with lab.doing("U"):
        update(weights, gradients)
    return loss, gradients
