"""An optimizer that needs whole matrices, over ZeRO's shards: Muon (Jordan et al. 2024), in short.

It declares `whole_matrices`; a pass puts the operations around each update. Each matrix of a unit has an
owner among its shards, which alone computes the update. Judged by a loop in plain torch in float64.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm import Work, World
from phalanx.comm.launch import launch
from phalanx.layout import Layout
from phalanx.models import Decoder
from phalanx.parallel import Precision, Unit, Weight, build_model, microbatches, start
from phalanx.parallel.data import Then
from phalanx.parallel.local import build_local
from phalanx.program import Costs, Op, Program, ops, simulate
from phalanx.train import Executor
from phalanx.train.optimizer import Scale
from phalanx.train.program import program_of
from phalanx.verify import SHAPES, batch_of

GQA, STEPS, CLIP = SHAPES["gqa"], 3, 0.5


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrix with all singular values near 1, by five steps of Newton and Schulz."""
    x = x / x.norm().clamp(min=1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


class Muon:
    """Momentum, made orthogonal, for matrices; gradient descent for the rest."""

    whole_matrices = True

    def of(self, unit: Unit) -> MuonUpdate:
        return MuonUpdate(unit)


class MuonUpdate:
    def __init__(self, unit: Unit) -> None:
        self.unit, self.group = unit, unit.groups.gather
        matrices = [w for w in unit.order if len(w.shape) == 2]
        self.owned = [matrices[r :: self.group.size] for r in range(self.group.size)]
        self.mine = self.owned[self.group.rank]
        self.momentum = {w.name: torch.zeros(w.local, dtype=torch.float64) for w in self.mine}

    def span(self, weight: Weight, rank: int) -> slice:
        """Where a rank's part has numbers of a weight, counted from the part's start."""
        at = self.unit.offsets[self.unit.order.index(weight)]
        stop = at + torch.Size(weight.local).numel()
        begin, end = rank * self.unit.part, (rank + 1) * self.unit.part
        first = min(max(at, begin), end)
        return slice(first - begin, max(min(stop, end), first) - begin)

    def splits(self) -> tuple[list[int], list[int]]:
        """How many numbers this rank has for each owner; how many each rank has for this one."""

        def length(weights: list[Weight], rank: int) -> int:
            return sum(s.stop - s.start for s in (self.span(w, rank) for w in weights))

        ranks = range(self.group.size)
        own = [length(self.owned[r], self.group.rank) for r in ranks]
        return own, [length(self.mine, r) for r in ranks]

    def to_owners(self) -> Work:
        assert self.unit.gradient is not None
        own, came = self.splits()
        spans = [self.span(w, self.group.rank) for weights in self.owned for w in weights]
        parts = torch.cat([self.unit.gradient[s] for s in spans] or [torch.empty(0)])
        self.came = torch.empty(sum(came), dtype=parts.dtype)
        return self.group.all_to_all(self.came, parts, came, own, wait=False)

    def __call__(self, lr: float, scale: Scale | None) -> None:
        gradient = self.unit.gradient
        assert gradient is not None
        assert scale is not None
        factor = float(scale.factor)
        # By rank as it came: of each matrix its part there.
        by_rank = [
            torch.split(x, [s.stop - s.start for s in (self.span(w, r) for w in self.mine)])
            for r, x in enumerate(torch.split(self.came, self.splits()[1]))
        ]
        for n, weight in enumerate(self.mine):
            whole = torch.cat([parts[n] for parts in by_rank]).view(weight.local)
            momentum = self.momentum[weight.name].mul_(0.9).add_(whole, alpha=factor)
            step = (-lr * orthogonal(momentum)).flatten()
            ends = torch.tensor([0, *(len(parts[n]) for parts in by_rank)]).cumsum(0).tolist()
            for parts, (a, b) in zip(by_rank, pairwise(ends), strict=True):
                parts[n].copy_(step[a:b])
        for entry in self.unit.entries():
            if len(entry.weight.shape) == 1:
                run = slice(entry.offset, entry.offset + entry.stop - entry.start)
                self.unit.home[run] -= lr * factor * gradient[run]
        self.unit.spend()

    def from_owners(self) -> Work:
        own, came = self.splits()
        steps = torch.empty(sum(own), dtype=self.came.dtype)

        def add() -> None:
            spans = [self.span(w, self.group.rank) for weights in self.owned for w in weights]
            for span, step in zip(
                spans, torch.split(steps, [s.stop - s.start for s in spans]), strict=True
            ):
                self.unit.home[span] += step
            self.unit.refresh()

        return Then(self.group.all_to_all(steps, self.came, own, came, wait=False), add)


def trained(world: World, layout: Layout) -> tuple[list[float | None], dict[str, Tensor]]:
    model = build_model(GQA)
    program = program_of(model, layout, agree=True, whole=Muon.whole_matrices)
    precision = Precision(*(torch.float64,) * 3)
    local = build_local(world, layout, model, program, precision=precision, poison=True)
    executor = Executor(local, program, world.rank, Muon(), clip=CLIP)
    executor.checked = True
    norms = []
    for step in range(STEPS):
        own = microbatches(batch_of(GQA, step), layout, local.coordinates["dp"])
        norms.append(executor.step(own, 0.05).norm)
    weights = {}
    for unit in local.units.values():
        unit.gather().wait()
        weights |= {name: p.detach().clone() for name, p in unit.parameters.items()}
    world.clear()
    return norms, weights


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    model = Decoder(
        vocab=GQA.vocab, hidden=GQA.hidden, layers=GQA.layers, heads=GQA.heads,
        kv_heads=GQA.kv_heads, ffn=GQA.ffn, sequence=GQA.sequence, eps=GQA.eps,
    ).double()  # fmt: skip
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in named.items():
            weight.copy_(start(build_model(GQA), name, 0, torch.float64))
    momentum = {name: torch.zeros_like(p) for name, p in named.items()}
    norms = []
    for step in range(STEPS):
        batch = batch_of(GQA, step)
        model.zero_grad()
        (model(**batch) / int((batch["targets"] != -100).sum())).backward()
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), CLIP)))
        with torch.no_grad():
            for name, weight in named.items():
                assert weight.grad is not None
                if weight.dim() == 2:
                    momentum[name].mul_(0.9).add_(weight.grad)
                    weight -= 0.05 * orthogonal(momentum[name])
                else:
                    weight -= 0.05 * weight.grad
    return norms, {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    "text", ["dp2 zero1", "dp3 zero2 accum:2", "dp2 zero3", "dp2x2 zero3", "dp2 pp2 zero1 1f1b:3"]
)
def test_matrices_cut_over_shards_are_updated_whole(text: str) -> None:
    layout = Layout.parse(text)
    norms, want = one_process()
    got: dict[str, Tensor] = {}
    for told, weights in launch(trained, layout.ranks, layout, backend="threads"):
        assert told == pytest.approx(norms, rel=1e-11)
        got |= weights
    assert got.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-8, atol=1e-10, msg=name)


def test_the_ways_to_and_from_owners_are_simulated_and_needed() -> None:
    layout = Layout.parse("dp2 zero1")
    program = program_of(build_model(GQA), layout, agree=True, whole=True)
    assert Program.parse(str(program)) == program
    (row,) = program.rows
    assert row.index(Op(ops.TO_OWNERS, 1)) < row.index(Op(ops.UPDATE, 0))  # beside it
    costs = {"F": 1.0, "B": 2.0, "U": 1.0}
    slow = Costs({**costs, ops.TO_OWNERS: 5.0})
    assert simulate(program, slow).makespan > simulate(program, Costs(costs)).makespan + 20
    plain = program_of(build_model(GQA), layout, agree=True)
    assert not {ops.TO_OWNERS, ops.FROM_OWNERS} & {op.kind for op in plain.rows[0]}
