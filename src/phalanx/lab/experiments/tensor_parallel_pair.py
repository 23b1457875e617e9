"""Tensor parallel in pairs: one layer split by columns, the next by rows, one all-reduce for both.

The output of a column layer is exactly the input of a row layer: the rank's own features, so nothing
is sent between the two. The row layer's outputs are parts of a sum over all features: an
all-reduce, and then the gelu, which needs the whole sum. In backward the row layer sends nothing
and the column layer sums the gradient of its input. Two layers cost the messages of one (Shoeybi et
al. 2019). If the number of layers is odd, every rank computes the whole last layer.
"""

from torch import Tensor
from torch.nn import functional as F

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import Kept, backward, batch, forward, loss_of, start, update


def run(lab: Lab) -> None:
    size, group, n, part = lab.size, lab.group, lab.n, lab.part("width")

    def shards(layers: list[Tensor]) -> list[Tensor]:
        """Columns of even layers, rows of odd ones, all of a last even one."""
        cut = [w[part] if i % 2 else w[:, part] for i, w in enumerate(layers)]
        return cut if size.layers % 2 == 0 else [*cut[:-1], layers[-1]]

    weights = [w.clone() for w in shards(start(size))]

    def forward_part(layer: int, x: Tensor) -> tuple[Tensor, Kept]:
        if layer % 2 == 0:
            return forward(x, weights[layer])
        z = x @ weights[layer]
        group.all_reduce(z)  # before the gelu: it is not linear
        return F.gelu(z), (x, z)

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        x, kept = batch(size, step), []
        for layer in range(size.layers):
            with lab.doing(f"F{layer}"):
                x, saved = forward_part(layer, x)
            kept.append(saved)
        loss, g = loss_of(x)
        gradients: list[Tensor] = []
        for layer in reversed(range(size.layers)):
            with lab.doing(f"B{layer}"):
                g, gradient = backward(g, kept.pop(), weights[layer])
            if layer % 2 == 0 and layer + 1 < size.layers:
                group.all_reduce(g)  # every rank's columns give a part of it
            gradients.insert(0, gradient)
        update(weights, gradients)
        return loss, gradients

    lab.train(train_step, weights, shards)
    pairs, output = size.layers // 2, 8 * size.batch * size.width
    formula = size.steps * pairs * 2 * 2 * (n - 1) / n * output
    lab.claim("it sent two all-reduces for each pair", lab.sent(), formula)
