"""A model with experts, on one process and with experts on two ranks that exchange their tokens by hand."""

from typing import Any

import torch
import torch.distributed as dist
from audited_lm import SEED, VOCABULARY, WIDTH, train
from torch import Tensor, nn

EXPERTS = 4


class Dispatch(torch.autograd.Function):
    """The tokens of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Combine(torch.autograd.Function):
    """This rank's tokens in the sum of all ranks' outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [
            torch.empty_like(gradient) for _ in range(dist.get_world_size())
        ]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class Expert(nn.Module):
    scale = 1.0  # another value is a seeded bug

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.scale * self.down(torch.relu(self.up(rows)))


class Experts(nn.Module):
    """Each token goes to the expert that the router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})  # fmt: skip
        self.spread = False

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        weight, chosen = weights.max(-1, keepdim=True)
        rows = x.flatten(0, 1)
        at = chosen.flatten()
        if self.spread:
            rows = Dispatch.apply(rows)
            at = Dispatch.apply(at.double()).long()
        out = torch.zeros_like(rows)
        for number, expert in self.experts.items():
            (mine,) = (at == int(number)).nonzero(as_tuple=True)
            out = out.index_add(0, mine, expert(rows[mine]))
        if self.spread:
            out = Combine.apply(out)
        return x + weight * out.view_as(x)


class ExpertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.moe = Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        return self.head(self.moe(self.embed(tokens)))

    def norm_of_ranks(self) -> Tensor:
        """The gradient norm, in which whole parameters count once."""
        cut, whole = torch.zeros(()), torch.zeros(())
        for name, parameter in self.named_parameters():
            square = parameter.grad.square().sum()
            if "experts" in name:
                cut += square
            else:
                whole += square
        if self.moe.spread:
            dist.all_reduce(cut)
        return (cut + whole).sqrt()


def new_model() -> ExpertModel:
    torch.manual_seed(SEED)
    return ExpertModel()


def experts_one(bug: str = "") -> None:
    train(new_model())


def experts(bug: str = "") -> None:
    """Data parallelism in which each rank has half of the experts."""
    model = new_model()
    model.moe.spread = True
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number in range(EXPERTS):
        if number % ranks != rank:
            del model.moe.experts[str(number)]
    if bug == "scaled" and rank == 1:
        model.moe.experts["3"].scale = 2.0

    def sums() -> None:
        for name, parameter in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)

    train(model, ranks, rank, sums=sums)


SPREAD = {each.__name__: each for each in (experts_one, experts)}
