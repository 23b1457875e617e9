"""A block with experts as three pieces, whose all-to-alls are operations of a kind of its own.

Nothing of the package is changed for it: two rows of the table, a pass, a handler and a model. Each of
two data-parallel ranks holds half of the experts. Judged by the same model in plain torch on one
process in float64, which knows no slots and no messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.comm import Group, Work, World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Rules, plain_pieces, rules
from phalanx.parallel import Model, Precision, microbatches, start
from phalanx.parallel.local import build_local
from phalanx.parallel.works import WorkGroup
from phalanx.program import (
    Costs,
    Kind,
    Op,
    Program,
    ProgramError,
    build,
    check,
    ops,
    simulate,
)
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW

RANKS, EXPERTS, WIDTH, WORDS = 2, 4, 8, 16
F64 = Precision(torch.float64, torch.float64, torch.float64)

# ---- the model: what a rank has of it


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)  # type: ignore[no-any-return]


class Route(nn.Module):
    """Puts each token into the slot of the rank that has its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.router = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, EXPERTS),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.mix(x).tanh()  # (rows, time, width)
        scores = self.router(x).flatten(0, 1)  # (n, experts)
        gate, chosen = scores.softmax(-1).max(-1)
        rank, local = chosen // (EXPERTS // RANKS), chosen % (EXPERTS // RANKS)
        here = rank == torch.arange(RANKS)[:, None]  # (ranks, n)
        return {
            "x": x,
            "slots": here.unsqueeze(-1) * x.flatten(0, 1),  # (ranks, n, width)
            "which": torch.where(here, local, -1),
            "gate": gate,
            "balance": scores.logsumexp(-1).square().sum(),
        }


class Experts(nn.Module):
    """This rank's experts on the tokens that came to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, slots: Tensor, which: Tensor) -> dict[str, Tensor]:
        of = [which == e for e in range(len(self.weight))]
        parts = [
            F.gelu(slots @ w) * m.unsqueeze(-1)
            for w, m in zip(self.weight, of, strict=True)
        ]
        return {"slots": torch.stack(parts).sum(0)}


class Combine(nn.Module):
    def forward(self, x: Tensor, slots: Tensor, gate: Tensor) -> Tensor:
        return x + (slots.sum(0) * gate.unsqueeze(-1)).view(x.shape)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, balance: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(
            self.out(x).flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return loss + 0.01 * balance


def draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
    weight.normal_(0.0, 0.5, generator=generator)


def edges(piece: int, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What comes into the experts, the only piece that a stage of the tests begins with."""
    rows, time = batch["tokens"].shape
    like = torch.empty(
        RANKS, rows * time, WIDTH, dtype=torch.float64, device="meta"
    )
    return {
        "x": like[0].view(rows, time, WIDTH), "slots": like, "gate": like[0, :, 0],
        "which": like[..., 0].long(), "balance": like[0, 0, 0],
    }  # fmt: skip


def experts_model() -> Model:
    pieces = (Embed(), Route(), Experts(), Combine(), Head())
    dims = {
        "2.weight": ("experts", "-", "-"),
        "*.bias": ("-",),
        "*": ("-", "-"),
    }
    named = tuple((str(n), piece.double()) for n, piece in enumerate(pieces))
    return Model(named, Rules(tuple(dims.items())), draw=draw, edges=edges)


# ---- the operations

AXES = ("dp.shard",)
PAINT = ops.KINDS[ops.REDUCE].paint
TOKENS = Kind("c", "exchange tokens", "send each token to the rank that has its expert, or back",
              ops.MICROBATCH, "tokens", AXES, (ops.VALUE,), (ops.VALUE,), PAINT)  # fmt: skip
GRADIENTS = Kind("x", "exchange gradients", "send the tokens' gradients back the way they came",
                 ops.MICROBATCH, "tokens", AXES, (ops.GRADIENT,), (ops.GRADIENT,), PAINT)  # fmt: skip


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(rules.AXIS_OF, "experts", "dp.shard")
    removes = [ops.add(TOKENS), ops.add(GRADIENTS)]
    yield
    for remove in removes:
        remove()


def exchanges(program: Program, into: tuple[int, ...] = (2, 3)) -> Program:
    """The pass: an exchange right after what makes the slots, and one after their gradient."""

    def around(row: tuple[Op, ...], op: Op) -> Iterator[Op]:
        made = Op(ops.FORWARD, op.piece - 1, op.index) in row
        if op.kind == ops.FORWARD and op.piece in into and not made:
            yield Op(TOKENS.letter, op.piece, op.index)
        yield op
        if op.kind == ops.FORWARD and op.piece + 1 in into:
            later = Op(ops.FORWARD, op.piece + 1, op.index)
            if later in row:
                yield Op(TOKENS.letter, op.piece + 1, op.index)
        if op.kind in ops.PROPAGATES and op.piece in into:
            yield Op(GRADIENTS.letter, op.piece, op.index)

    return program.with_rows(
        [x for op in row for x in around(row, op)] for row in program.rows
    )


class ExpertExecutor(Executor):
    """With the handlers of both kinds."""

    def __init__(self, *args: Any, experts: Group, **options: Any) -> None:
        super().__init__(*args, **options)
        self.experts = experts
        self.handlers |= {
            TOKENS.letter: self._tokens,
            GRADIENTS.letter: self._token_gradients,
        }

    def _tokens(self, op: Op) -> Work:
        names = ("slots", "which") if op.piece == 2 else ("slots",)
        return self._exchange(self.inputs, (op.piece, op.index), names)

    def _token_gradients(self, op: Op) -> Work:
        key = op.piece - 1, op.index
        if key[0] in self.local.pieces:
            return self._exchange(self.gradients, key, ("slots",))
        return self._exchange(
            self.outgoing, (ops.BACKWARD, op.piece, op.index), ("slots",)
        )

    def _exchange(
        self, bundles: Any, key: Any, names: tuple[str, ...]
    ) -> Work:
        old = {name: bundles[key][name].contiguous() for name in names}
        new = {name: torch.empty_like(x) for name, x in old.items()}
        bundles[key] = {**bundles[key], **new}
        works = [
            self.experts.all_to_all(new[n], old[n], wait=False) for n in names
        ]
        return WorkGroup(works)


# ---- the claims


def program_in(layout: Layout) -> Program:
    stages = (range(5),) if layout.pp == 1 else (range(2), range(2, 5))
    program = exchanges(build(layout, plain_pieces(stages)))
    check(program)
    return program


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (8, 5), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def trained(
    world: World, layout: Layout
) -> tuple[list[tuple[float, float | None]], dict[str, Any]]:
    """Losses and norms of three steps; the weights after them, with where they stand."""
    model, program = experts_model(), program_in(layout)
    local = build_local(
        world, layout, model, program, precision=F64, poison=True
    )
    experts = world.split("experts", layout.mesh.groups(AXES))
    executor = ExpertExecutor(
        local, program, world.rank, AdamW(eps=1e-3), clip=1.0, experts=experts
    )
    executor.checked = True
    told = []
    for step in range(3):
        own = microbatches(batch_of(step), layout, local.coordinates["dp"])
        result = executor.step(own, 1e-2)
        told.append((result.loss / result.count, result.norm))
    weights = {}
    for unit in local.units.values():
        unit.gather().wait()
        for weight in unit.order:
            weights[weight.name] = (
                weight.box,
                unit.parameters[weight.name].detach().clone(),
            )
    world.clear()
    return told, weights


def one_process() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same in plain torch: each token through its expert, one after the other."""
    pieces = nn.ModuleList(piece for _, piece in experts_model().pieces)
    model = experts_model()
    named = dict(pieces.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start(model, name, 0, torch.float64))
    embed, route, experts, _, head = pieces
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-3,
    )  # fmt: skip
    told = []
    for step in range(3):
        batch = batch_of(step)
        x: Any = embed.words(batch["tokens"])
        x = x + route.mix(x).tanh()
        scores = route.router(x)
        gate, chosen = scores.softmax(-1).max(-1)
        rows = [
            gate[r, t] * F.gelu(x[r, t] @ experts.weight[chosen[r, t]])
            for r in range(x.shape[0])
            for t in range(x.shape[1])
        ]
        assert len(chosen.unique()) > EXPERTS // RANKS  # some on either rank
        y = head.out(x + torch.stack(rows).view(x.shape))
        loss = F.cross_entropy(
            y.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        loss = (loss + 0.01 * scores.logsumexp(-1).square().sum()) / batch[
            "targets"
        ].numel()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        told.append((float(loss.detach()), float(norm)))
    return told, {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    "text",
    [
        "dp2", "dp2 accum:2", "dp2 zero1", "dp2 zero3 accum:2", "dp2 recompute:all accum:2",
        "dp2 pp2 1f1b:2", "dp2 pp2 zb-h1:2", "dp2 offload:activations accum:3",
        "dp2 pp2 zero2 gpipe:2 recompute:every=2",
    ],
)  # fmt: skip
def test_experts_over_ranks_train_as_on_one_process(text: str) -> None:
    layout = Layout.parse(text)
    ranks = launch(trained, layout.ranks, layout, backend="threads")
    steps, want = one_process()
    for step, (loss, norm) in enumerate(steps):
        assert sum(told[step][0] for told, _ in ranks) == pytest.approx(
            loss, rel=1e-12
        )
        assert ranks[0][0][step][1] == pytest.approx(norm, rel=1e-12)
    seen: dict[str, Tensor] = {}
    for _, weights in ranks:
        for name, (box, part) in weights.items():
            whole = seen.setdefault(
                name, torch.full_like(want[name], torch.nan)
            )
            whole[box] = part
    assert seen.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(
            seen[name], weight, rtol=1e-10, atol=1e-12, msg=name
        )


def test_exchanges_are_operations_like_any_other() -> None:
    program = program_in(Layout.parse("dp2 pp2 zero3 1f1b:3"))
    assert Program.parse(str(program)) == program
    costs = {"F": 1.0, "B": 2.0}
    plain = simulate(program, Costs(costs)).makespan
    assert (
        simulate(program, Costs({**costs, "c": 0.5, "x": 0.5})).makespan
        > plain
    )
    moved = Op("c", 3, 1)
    late = program.with_rows(
        [*(op for op in row if op != moved), *[moved] * (moved in row)]
        for row in program.rows
    )
    with pytest.raises(
        ProgramError, match="3F1 stands before 3c1, which it needs"
    ):
        check(late)
