"""Weight gradients written in place are those of plain autograd, however a weight is used."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm import World
from phalanx.comm.alone import AloneWorld
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Rules, plain_pieces
from phalanx.parallel import Model
from phalanx.parallel.local import build_local
from phalanx.program import StepOptions, build
from phalanx.training.executor import Executor
from phalanx.training.optimizer import Sgd


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 6, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.into(inputs)


class Odd(nn.Module):
    """Uses its weights in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.also_read = nn.Linear(6, 6, bias=False)
        self.of_no_gradient = nn.Linear(6, 6, bias=False)
        self.idle = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, **shared: Tensor | None) -> Tensor:
        y = self.twice(self.twice(x).tanh())
        y = y + self.also_read(x) + 0.5 * (self.also_read.weight**2).sum()
        return y + self.of_no_gradient(torch.ones_like(x.detach()))


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def model_of(pieces: list[nn.Module]) -> Model:
    named = tuple((f"p{i}", piece) for i, piece in enumerate(pieces))
    return Model(named, Rules.parse("*.weight : - -\n*.bias : -"), draw=draw)


def draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
    weight.normal_(0.0, 0.3, generator=generator)


def gradients(world: World, text: str, count: int) -> dict[str, Tensor]:
    """Of one step over some microbatches, by name; the buffers are full of NaN before."""
    pieces: list[nn.Module] = [First(), Odd(), Last()]
    layout, model = Layout.parse(text), model_of(pieces)
    stages = (range(3),)
    program = build(
        layout, plain_pieces(stages, tied=model.tied), StepOptions(agree=False)
    )
    held = build_local(world, layout, model, program, poison=True)
    for unit in held.units.values():
        for numel in (unit.numel, unit.part):
            held.pool.give(held.pool.take(numel, torch.float32))
    found: dict[str, Tensor] = {}

    class Keeping(Sgd):
        def of(self, unit):  # type: ignore[no-untyped-def]
            def keep(lr: float, scale: float) -> None:
                for weight, start in zip(
                    unit.order, unit.offsets, strict=True
                ):
                    run = slice(
                        start, start + torch.Size(weight.local).numel()
                    )
                    (own,) = unit.gradients([run])
                    found[weight.name] = own.view(weight.local).clone()
                unit.spend()

            return keep

    rows = [
        {
            "inputs": torch.randn(
                4, 5, generator=torch.Generator().manual_seed(i)
            )
        }
        for i in range(count)
    ]
    Executor(held, program, world.rank, Keeping()).step(rows, 0.1)
    return found


def wanted(count: int) -> dict[str, Tensor]:
    pieces: list[nn.Module] = [First(), Odd(), Last()]
    model = model_of(copy.deepcopy(pieces))
    held = build_local(
        AloneWorld(),
        Layout(),
        model,
        build(
            Layout(),
            plain_pieces((range(3),), tied=()),
            StepOptions(agree=False),
        ),
    )
    plain = nn.Sequential(*pieces)
    weights = dict(held.units[0].parameters) | dict(held.units[1].parameters)
    for name, parameter in plain.named_parameters():
        parameter.data = weights[f"p{name}"].detach().clone()
    for i in range(count):
        plain(
            torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
        ).backward()
    return {
        f"p{name}": torch.zeros_like(p)
        if p.grad is None
        else p.grad / (4 * count)
        for name, p in plain.named_parameters()
    }


@pytest.mark.parametrize("text, count", [("", 1), ("accum:3", 3)])
def test_weights_that_are_used_twice_read_or_idle_get_the_gradients_of_autograd(
    text: str, count: int
) -> None:
    expected = wanted(count)
    (found,) = launch(gradients, 1, text, count, backend="threads")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
