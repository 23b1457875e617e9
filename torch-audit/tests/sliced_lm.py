"""The model of audited_lm with tensor parallelism by hand: shards in plain parameters.

A rank holds one matrix for queries, keys and values, in which the rows of its heads follow each other head
by head. Nothing but the values tells which rows of the model these are.
"""

from typing import Any

import torch
import torch.distributed as dist
from audited_lm import HEADS, WIDTH, Model, new_model, train, zero_biases
from torch import Tensor, nn
from torch.nn.functional import linear

HEAD = WIDTH // HEADS


class Enter(torch.autograd.Function):
    """The input of a cut layer: the same on all ranks, and its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """The output of a cut layer: a sum over ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rows_of_rank() -> Tensor:
    """Indices of a rank's heads in the queries, keys or values."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return torch.arange(WIDTH).chunk(ranks)[rank]


class SlicedAttention(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        rows = rows_of_rank()
        layers = whole.q, whole.k, whole.v
        weights = [layer.weight.detach()[rows] for layer in layers]
        biases = [layer.bias.detach()[rows] for layer in layers]
        self.qkv = nn.Module()
        # Of each head its queries, keys and values, as Megatron orders them.
        self.qkv.weight = nn.Parameter(by_head(weights))
        self.qkv.bias = nn.Parameter(by_head(biases))
        self.o = nn.Module()
        self.o.weight = nn.Parameter(whole.o.weight.detach()[:, rows].clone())

    def forward(self, x: Tensor) -> Tensor:
        both = linear(Enter.apply(x), self.qkv.weight, self.qkv.bias)
        # (batch, time, heads, 3, head)
        parts = both.unflatten(-1, (-1, 3, HEAD))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(3))
        scores = (q @ k.mT) / HEAD**0.5
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out = (weights @ v).transpose(1, 2).flatten(2)
        return Leave.apply(linear(out, self.o.weight))


def by_head(parts: list[Tensor]) -> Tensor:
    heads = [part.unflatten(0, (-1, HEAD)) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2).clone()


def slice_mlp(up: nn.Linear, down: nn.Linear) -> None:
    """Leaves a rank's rows of `up` and columns of `down`: every other one, so no rank has a range."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.arange(rank, up.out_features, ranks)
    up.weight = nn.Parameter(up.weight.detach()[rows])
    up.bias = nn.Parameter(up.bias.detach()[rows])
    down.weight = nn.Parameter(down.weight.detach()[:, rows].clone())


CUT = ("qkv.weight", "qkv.bias", "o.weight", "up.weight", "up.bias", "down.weight")  # fmt: skip


class SlicedModel(Model):
    def norm_of_ranks(self) -> Tensor:
        """The gradient norm, in which whole parameters count once."""
        cut = torch.zeros(())
        whole = torch.zeros(())
        for name, parameter in self.named_parameters():
            square = parameter.grad.square().sum()
            if name.endswith(CUT):
                cut += square
            else:
                whole += square
        dist.all_reduce(cut)
        return (cut + whole).sqrt()


def sliced(bug: str = "") -> None:
    """Tensor parallelism by hand, with a bug or without."""
    model = new_model()
    if bug == "zeros":
        zero_biases(model)
    model.__class__ = SlicedModel
    for block in model.blocks.values():
        block.attention = SlicedAttention(block.attention)
        slice_mlp(block.up, block.down)
        block.up.register_forward_pre_hook(lambda _, x: Enter.apply(x[0]))
        block.down.register_forward_hook(lambda *call: Leave.apply(call[2]))
    if bug == "rows exchanged":
        model.blocks["1"].attention.qkv.weight.register_hook(exchanged)
    train(model, bug=bug)


def exchanged(gradient: Tensor) -> Tensor:
    """The gradient of the queries as that of the keys, and the reverse."""
    q, k, v = gradient.unflatten(0, (-1, 3, HEAD)).unbind(1)
    return torch.stack([k, q, v], 1).flatten(0, 2)


SLICED = {"sliced": sliced}
