"""Each rank has all rows and a part of every layer: by columns, or alternately by
columns and rows."""

import torch
from torch import Tensor

from phalanx_lab.lab import Lab, gathered, scattered
from phalanx_lab.mlp import batch, loss_of, start


def tensor_parallel(lab: Lab) -> None:
    """Tensor parallel by columns: every rank computes some features of every layer, then all are
    gathered.

    A rank has some columns of each weight, and so computes some features of the output for *all* rows.
    No weight and no weight's gradient is ever sent: what travels are activations, two messages for each
    layer, each of (n-1)/n of them.
    """
    size, n, columns = lab.size, lab.n, lab.part("width")
    weights = [w[:, columns].clone() for w in start(size)]
    to_x: list[Tensor] = []

    # The next layer needs all features: an all-gather. Collectives join along the first dim, so
    # features are made the first.
    def gather(layer: int, y: Tensor) -> Tensor:
        return gathered(lab.group, y.T.contiguous()).T

    # Backward mirrors it: each rank's columns give a part of the input's whole gradient, the parts
    # must be summed, and a rank continues with its own features only: a reduce-scatter.
    def scatter(layer: int, g: Tensor) -> Tensor:
        g = scattered(lab.group, g.T.contiguous()).T
        to_x.extend([g] * (layer == 0))
        return g

    def loss(y: Tensor) -> tuple[Tensor, Tensor]:
        mean, g = loss_of(y)
        return mean, g[:, columns]

    # A rank's weights and gradients below are its columns.
    hooks = {"output": gather, "loss": loss, "to_input": scatter}
    lab.train(
        lambda step: lab.gradients(weights, batch(size, step), **hooks),
        weights,
        lambda layers: [w[:, columns] for w in layers],
    )
    x = batch(size, 0).requires_grad_()
    y = x
    for w in start(size):
        y = torch.nn.functional.gelu(y @ w)
    (want,) = torch.autograd.grad(y.square().mean(), x)
    lab.claim(
        "the gradient of the input is right in its columns",
        to_x[0],
        want[:, columns],
    )
    activations = 8 * size.batch * size.width  # bytes
    formula = size.steps * size.layers * 2 * (n - 1) / n * activations
    lab.claim("it sent 2(n-1)/n of every layer's output", lab.sent(), formula)


def tensor_parallel_pair(lab: Lab) -> None:
    """Tensor parallel in pairs: one layer split by columns, the next by rows, one all-reduce for both.

    The output of a column layer is exactly the input of a row layer: the rank's own features, so
    nothing is sent between the two. Two layers cost the messages of one (Shoeybi et al. 2019). If the
    number of layers is odd, every rank computes the whole last layer. With `seq` the two all-reduces
    become a reduce-scatter and an all-gather each, and between pairs a rank has a part of the rows:
    the same bytes and less memory (Korthikanti et al. 2022).
    """
    size, group, n, part = lab.size, lab.group, lab.n, lab.part("width")

    def shards(layers: list[Tensor]) -> list[Tensor]:
        """Return columns of even layers and rows of odd ones; a last even layer is
        whole."""
        cut = [w[part] if i % 2 else w[:, part] for i, w in enumerate(layers)]
        return cut if size.layers % 2 == 0 else [*cut[:-1], layers[-1]]

    # The row layer's outputs are parts of a sum over all features: an all-reduce, and then the
    # gelu, which needs the whole sum. In backward the row layer sends nothing and the column layer
    # sums the gradient of its input.
    def summed(layer: int, z: Tensor) -> Tensor:
        if layer % 2:
            group.all_reduce(z)  # before the gelu: it is not linear
        return z

    def to_input(layer: int, g: Tensor) -> Tensor:
        if layer % 2 == 0 and layer + 1 < size.layers:
            group.all_reduce(g)  # every rank's columns give a part of it
        return g

    # Even layers below are columns, odd ones are rows.
    weights = [w.clone() for w in shards(start(size))]
    lab.train(
        lambda step: lab.gradients(
            weights, batch(size, step), product=summed, to_input=to_input
        ),
        weights,
        shards,
    )
    pairs, output = size.layers // 2, 8 * size.batch * size.width
    formula = size.steps * pairs * 2 * 2 * (n - 1) / n * output
    lab.claim("it sent two all-reduces for each pair", lab.sent(), formula)
