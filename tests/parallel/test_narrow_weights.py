"""Weights kept in float32 and computed with in less, against the same written out in plain torch.

One process: the decoder in bfloat16 or float16, a float32 copy of its weights, a backward for each
microbatch whose gradients are added in float32, one update of the copy by torch's own AdamW, and the
copy rounded for the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout
from phalanx.models import Decoder
from phalanx.parallel import Unit, build_model, microbatches, start
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.precision import LossScale, precision_of
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

SHAPE = replace(SHAPES["gqa"], layers=2, batch=24)
SCALE, CLIP = 1024.0, 0.25
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


Held = tuple[str, int, int, Tensor]  # of this weight these numbers
Named = dict[str, Tensor]


@dataclass
class Account:
    """What some steps were on one rank: its part of the loss per target, the norm, gradients before
    the update and float32 weights after it."""

    losses: list[float]
    norms: list[float]
    gradients: list[list[Held]]
    weights: list[list[Held]]


def engine(world: World, layout: Layout, steps: int, lr: float) -> Account:
    model = build_model(SHAPE)
    program = program_of(model, layout)
    precision = precision_of(layout.precision)
    local = build_local(
        world, layout, model, program, precision=precision, poison=True
    )
    fp16 = layout.precision == "fp16"
    executor = Executor(
        local, program, world.rank, AdamW(), clip=CLIP,
        scaling=LossScale(SCALE) if fp16 else None,
    )  # fmt: skip
    account, seen = Account([], [], [], []), list[Held]()
    for number, update in executor.updates.items():
        executor.updates[number] = _watched(update, local.units[number], seen)
    for step in range(steps):
        own = microbatches(
            batch_of(SHAPE, step), layout, local.coordinates["dp"]
        )
        result = executor.step(own, lr)
        assert result.norm is not None
        account.losses.append(result.loss / result.count)
        account.norms.append(result.norm)
        account.gradients.append(
            [(n, a, b, x / (SCALE if fp16 else 1)) for n, a, b, x in seen]
        )
        account.weights.append(
            [h for u in local.units.values() for h in _held(u, u.home)]
        )
        seen.clear()
    world.clear()
    return account


def _held(unit: Unit, flat: Tensor) -> list[Held]:
    assert flat.dtype == torch.float32
    return [
        (
            e.weight.name,
            e.start,
            e.stop,
            flat[e.offset : e.offset + e.stop - e.start].clone(),
        )
        for e in unit.entries()
    ]


def _watched(
    update: Callable[[float, float], None], unit: Unit, seen: list[Held]
) -> Callable[[float, float], None]:
    """The update, which writes the gradient down first."""

    def watched(lr: float, scale: float) -> None:
        assert unit.gradient is not None
        seen.extend(_held(unit, unit.gradient))
        update(lr, scale)
        if unit.buffer is not None and unit.groups.gather.size == 1:
            # No gather comes before the next forward, so the new weights must be there.
            assert torch.equal(unit.buffer, unit.home.to(unit.buffer.dtype))

    return watched


def whole(ranks: list[list[Held]]) -> Named:
    """Tensors put together; every number is held by somebody."""
    sizes = {name: w.shape for name, w in build_model(SHAPE).weights.items()}
    made = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for name, a, b, numbers in (h for rank in ranks for h in rank):
        made[name].view(-1)[a:b] = numbers
    assert not any(x.isnan().any() for x in made.values())
    return made


def off(got: Named, want: Named) -> float:
    """The largest relative error of a tensor, by its norm."""
    return max(float((got[n] - x).norm() / x.norm()) for n, x in want.items())


class Plain:
    """One process."""

    def __init__(self, dtype: torch.dtype, lr: float) -> None:
        self.model = Decoder(
            vocab=SHAPE.vocab, hidden=SHAPE.hidden, layers=SHAPE.layers, heads=SHAPE.heads,
            kv_heads=SHAPE.kv_heads, ffn=SHAPE.ffn,
        ).to(dtype)  # fmt: skip
        self.narrow = dict(self.model.named_parameters())
        self.scale = SCALE if dtype == torch.float16 else 1.0
        ours = build_model(SHAPE)
        self.masters = {
            n: torch.nn.Parameter(start(ours, n, 0)) for n in self.narrow
        }
        decayed = [w for w in self.masters.values() if w.dim() > 1]
        others = [w for w in self.masters.values() if w.dim() == 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=(0.9, 0.95), eps=1e-8
        )

    def step(
        self, number: int, shares: tuple[int, int]
    ) -> tuple[float, float, Named]:
        """The loss per target, the norm and the gradients of a step. `shares` are how many ranks
        the batch is cut over, and into how many microbatches on each."""
        batch = batch_of(SHAPE, number)
        count = float((batch["targets"] != -100).sum())
        for name, parameter in self.narrow.items():
            parameter.data = self.masters[name].detach().to(parameter.dtype)
        sums = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        total = 0.0
        for rows in np.array_split(np.arange(SHAPE.batch), shares[0]):
            for part in np.array_split(rows, shares[1]):
                loss = self.model(
                    **{name: x[part] for name, x in batch.items()}
                )
                assert loss.dtype == torch.float32
                loss.backward(torch.tensor(self.scale / count))
                total += float(loss.detach())
                for name, parameter in self.narrow.items():
                    assert parameter.grad is not None
                    sums[name] += parameter.grad.float()
                    parameter.grad = None
        gradients = {name: g / self.scale for name, g in sums.items()}
        norm = math.sqrt(
            sum(float(g.double().square().sum()) for g in gradients.values())
        )
        for name, master in self.masters.items():
            master.grad = gradients[name] * min(1.0, CLIP / (norm + 1e-6))
        self.optimizer.step()
        return total / count, norm, gradients


# A layout, and how it cuts the batch: over ranks, into microbatches.
CUTS = {
    "": (1, 1),
    "accum:24": (1, 24),
    "accum:5": (1, 5),
    "dp2 accum:6": (2, 6),
    "dp3 zero1 accum:8": (3, 8),
    "dp2 zero2 accum:6": (2, 6),
    "dp3 zero3 accum:4": (3, 4),
    "dp2x2 zero3 accum:3": (4, 3),
    "pp2 1f1b:12": (1, 12),
    "pp2 zb-h1:12": (1, 12),
    "dp2 pp2 zero1 gpipe:6": (2, 6),
    "accum:12 offload:weights,optimizer": (1, 12),
    "accum:12 recompute:all": (1, 12),
}


# 1e-5 is less than half of what tells neighbouring bfloat16 apart: float32 weights move all the same.
CASES = [
    *((text, 1e-2) for text in CUTS),
    ("", 1e-5),
    ("dp3 zero1 accum:8", 1e-5),
    ("dp2 zero2 accum:6", 1e-5),
]


def _in_one_dtype() -> Iterator[Any]:
    """Cases in both dtypes, of which each has one in the default suite."""
    for number, (text, lr) in enumerate(CASES):
        for place, word in enumerate(DTYPES):
            slow = [pytest.mark.slow] * (number % len(DTYPES) != place)
            yield pytest.param(text, lr, word, marks=slow)


@pytest.mark.parametrize(("text", "lr", "word"), [*_in_one_dtype()])
def test_narrow_steps_are_those_of_plain_torch_with_float32_weights_and_sums(
    text: str, word: str, lr: float
) -> None:
    """Plain torch begins each step from the ranks' weights: a weight on the edge between two
    narrow numbers would otherwise go one way here and the other way there."""
    layout, steps = Layout.parse(f"{text} {word}"), 3
    ranks = launch(engine, layout.ranks, layout, steps, lr, backend="threads")
    plain = Plain(DTYPES[word], lr)
    for step in range(steps):
        before = {
            name: w.detach().clone() for name, w in plain.masters.items()
        }
        loss, norm, gradients = plain.step(step, CUTS[text])
        assert sum(rank.losses[step] for rank in ranks) == pytest.approx(
            loss, rel=1e-6
        )
        assert [rank.norms[step] for rank in ranks] == pytest.approx(
            [norm] * len(ranks), rel=1e-6
        )
        assert (
            off(whole([rank.gradients[step] for rank in ranks]), gradients)
            < 1e-6
        )
        after = whole([rank.weights[step] for rank in ranks])
        moved = {name: after[name] - w for name, w in before.items()}
        wanted = {
            name: w.detach() - before[name]
            for name, w in plain.masters.items()
        }
        # A float32 of about 1 is known to 6e-8, and moves by about lr.
        assert off(moved, wanted) < 1e-6 + 2e-7 / lr
        for name, master in plain.masters.items():
            master.data = after[name]


@pytest.mark.parametrize(
    ("word", "dtypes"),
    [
        ("bf16", (torch.bfloat16, torch.float32, torch.float32)),
        ("fp16", (torch.float16, torch.float32, torch.float32)),
        ("tf32", (torch.float32, torch.float32, torch.float32)),
        ("fp32", (torch.float32, torch.float32, torch.float32)),
        ("fp64", (torch.float64, torch.float64, torch.float64)),
    ],
)
def test_what_a_word_computes_in_keeps_weights_in_and_adds_gradients_in(
    word: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    found = precision_of(word)
    assert (found.compute, found.master, found.reduce) == dtypes
