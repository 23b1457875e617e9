"""Every copy of a weight stays equal to the others bit by bit, whoever holds it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Shape
from phalanx.layout.rules import Cut
from phalanx.parallel import Entry, Weight, build_model, microbatches
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW, Sgd
from phalanx.training.precision import LossScale, precision_of
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of, compare
from phalanx.verification.trial import Part, Seen, join
from sampled import one_in

# Odd sizes, so that runs of weights end between the vectors of a fused kernel; a tied weight, and
# under tp4 key and value heads that two ranks hold.
ODD = replace(SHAPES["odd"], batch=6, sequence=7, vocab=13, tied=True)
# A shape whose copies drifted apart within 8 steps when tp ranks updated runs of different length.
EVEN = replace(
    ODD,
    hidden=32,
    heads=2,
    kv_heads=2,
    head_dim=16,
    ffn=40,
    vocab=37,
    sequence=11,
)
# Norms of q and k: weights of one head that every rank uses for others.
HEAD_NORMS = replace(
    SHAPES["qwen"], layers=2, batch=6, sequence=7, vocab=13, ffn=20
)

BITS = {4: torch.int32, 8: torch.int64}


class Held(NamedTuple):
    """Numbers `start` to `stop` of what one rank holds of a weight, or of its optimizer state."""

    what: str
    name: str
    box: str
    start: int
    stop: int
    numbers: Tensor


def held_after(
    world: World,
    layout: Layout,
    shape: Shape,
    optimizer: AdamW | Sgd,
    steps: int,
) -> list[Held]:
    model = build_model(shape)
    program = program_of(model, layout)
    precision = precision_of(layout.precision)
    local = build_local(world, layout, model, program, precision=precision)
    executor = Executor(
        local, program, world.rank, optimizer, clip=0.25,
        scaling=LossScale(1024.0) if layout.precision == "fp16" else None,
    )  # fmt: skip
    for step in range(steps):
        batch = batch_of(shape, step, dtype=precision.compute)
        own = microbatches(
            batch, layout, local.coordinates["dp"], local.coordinates["cp"]
        )
        assert executor.step(own, 1e-2).finite
    told = []
    for number, unit in local.units.items():
        flats = {"weight": unit.home}
        update = executor.updates[number]
        for run, view in update.runs:
            for kind, kept in update.state.get(view, {}).items():
                if kind != "step":
                    flats.setdefault(kind, torch.zeros_like(unit.home))[
                        run
                    ] = kept
        for weight, start, stop, offset in unit.entries():
            run = slice(offset, offset + stop - start)
            told += [
                Held(
                    what,
                    weight.name,
                    str(weight.box),
                    start,
                    stop,
                    flat[run].clone(),
                )
                for what, flat in flats.items()
            ]
    world.clear()
    return told


def differing(
    layout: Layout, shape: Shape, optimizer: AdamW | Sgd, steps: int = 8
) -> set[str]:
    """Names of the weights whose copies, or their optimizer states, are not equal bit by bit."""
    ranks = launch(
        held_after,
        layout.ranks,
        layout,
        shape,
        optimizer,
        steps,
        backend="threads",
    )
    apart, compared = set(), 0
    by_box: dict[tuple[str, str, str], list[Held]] = {}
    for held in (h for rank in ranks for h in rank):
        by_box.setdefault(held[:3], []).append(held)
    for (what, name, _), parts in by_box.items():
        for a, b in combinations(parts, 2):
            start, stop = max(a.start, b.start), min(a.stop, b.stop)
            if start < stop:
                x, y = (
                    h.numbers[start - h.start : stop - h.start].view(
                        BITS[h.numbers.itemsize]
                    )
                    for h in (a, b)
                )
                compared += stop - start
                if not torch.equal(x, y):
                    apart.add(f"{what} of {name}")
    assert compared > 0, "no two ranks hold the same number"
    return apart


GRIDS = (
    "dp3 tp2",
    "dp2x2 tp2",
    "dp2 tp4",
    "tp4 seq",
    "dp2 cp2 tp2",
    "dp2 tp2 pp2 gpipe:2",
)
LAYOUTS = [
    f"{grid} {zero} {precision}"
    for grid, zero, precision in product(
        GRIDS, ("zero0", "zero1", "zero2", "zero3"), ("fp32", "fp64")
    )
    if not (grid == "dp2x2 tp2" and zero == "zero0")
    and not ("seq" in grid and zero != "zero0")
]
LAYOUTS += [
    "tp2 bf16",
    "dp3 tp2 zero1 bf16",
    "dp3 tp2 zero2 fp16",
    "dp2 tp2 zero1 seq fp16",
]


# 3 has no factor in common with the 4 ZeRO stages and 2 precisions, so all occur.
@pytest.mark.parametrize("layout", one_in(3, LAYOUTS))
def test_copies_are_equal_bit_by_bit_after_eight_steps(layout: str) -> None:
    assert differing(Layout.parse(layout), ODD, AdamW()) == set()


@pytest.mark.parametrize(
    "layout", ["tp2", "dp3 tp2 zero1", "dp3 tp2 zero3", "tp2 fp64"]
)
@pytest.mark.parametrize(
    "optimizer", [AdamW(), Sgd(momentum=0.9, decay=0.1)], ids=["adamw", "sgd"]
)
def test_copies_of_the_shape_that_drifted_first_stay_equal(
    layout: str, optimizer: AdamW | Sgd
) -> None:
    assert differing(Layout.parse(layout), EVEN, optimizer) == set()


@pytest.mark.parametrize(
    "layout", ["tp2", "tp4 seq", "dp3 tp2 zero1", "dp2 tp2 zero2 seq fp64"]
)
def test_copies_of_norms_of_heads_stay_equal(layout: str) -> None:
    assert differing(Layout.parse(layout), HEAD_NORMS, AdamW()) == set()


def runs(world: World, layout: Layout) -> dict[tuple[int, int], list[object]]:
    """By unit and shard: what each run of an update covers."""
    model = build_model(ODD)
    local = build_local(world, layout, model, program_of(model, layout))
    told = {
        (number, unit.groups.gather.rank): [
            [(s.start, s.stop, s.decay) for s in unit.own_segments()],
            [
                (e.weight.name, e.start, e.stop, e.offset)
                for e in unit.entries()
            ],
        ]
        for number, unit in local.units.items()
    }
    world.clear()
    return told


@pytest.mark.parametrize(
    "layout", one_in(3, [x for x in LAYOUTS if "fp64" not in x])
)
def test_all_ranks_that_hold_a_shard_update_it_in_the_same_runs(
    layout: str,
) -> None:
    where = Layout.parse(layout)
    first: dict[tuple[int, int], list[object]] = {}
    for told in launch(runs, where.ranks, where, backend="threads"):
        for key, run in told.items():
            assert first.setdefault(key, run) == run, key


# a run of numbers of a weight
Span = tuple[str, tuple[slice, ...], tuple[int, ...], int, int]


def covered(
    world: World, layout: Layout, shape: Shape
) -> tuple[list[Span], ...]:
    """What a rank's norm counts, what its updates change with the right decay, what it holds."""
    model = build_model(shape)
    program = program_of(model, layout)
    local = build_local(world, layout, model, program)
    counts, updates, held = list[Span](), list[Span](), list[Span]()
    for number, unit in local.units.items():
        home = program.host[number] == program.owner[world.rank]
        counted = (
            unit.counted_runs if home and unit.groups.replica.rank == 0 else []
        )
        segments = unit.own_segments()
        for weight, start, stop, offset in unit.entries():
            known, end = (
                (weight.name, weight.box, weight.local),
                offset + stop - start,
            )
            held.append((*known, start, stop))
            # Matrices decay; norms and biases do not.
            decays = len(weight.shape) > 1
            updated = [
                slice(s.start, s.stop) for s in segments if s.decay == decays
            ]
            for into, runs in ((counts, counted), (updates, updated)):
                for run in runs:
                    a, b = (
                        max(run.start, offset) - offset,
                        min(run.stop, end) - offset,
                    )
                    if a < b:
                        into.append((*known, start + a, start + b))
    world.clear()
    return counts, updates, held


def times(spans: list[Span], shape: Shape) -> Tensor:
    """How many of these runs each number of the model is in."""
    weights = build_model(shape).weights
    seen = {
        name: torch.zeros(w.shape, dtype=torch.int64)
        for name, w in weights.items()
    }
    for name, box, local, start, stop in spans:
        part = torch.zeros(local, dtype=torch.int64)
        part.view(-1)[start:stop] = 1
        seen[name][box] += part[
            tuple(slice(0, n) for n in seen[name][box].shape)
        ]
    return torch.cat([x.flatten() for x in seen.values()])


FLAT = [x for x in LAYOUTS if "fp32" in x]
# The last shard of its head is a run of one number.
ONE_NUMBER = replace(ODD, name="one number", hidden=5)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        *((x, ODD) for x in FLAT[::2]),
        *((x, HEAD_NORMS) for x in FLAT[1::2]),
        *(pytest.param(x, ODD, marks=pytest.mark.slow) for x in FLAT[1::2]),
        *(
            pytest.param(x, HEAD_NORMS, marks=pytest.mark.slow)
            for x in FLAT[::2]
        ),
        ("dp4 zero1", ONE_NUMBER),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_the_norm_counts_every_number_once_and_each_rank_updates_what_it_holds_once(
    text: str, shape: Shape
) -> None:
    layout = Layout.parse(text)
    ranks = launch(covered, layout.ranks, layout, shape, backend="threads")
    counted = times([span for counts, _, _ in ranks for span in counts], shape)
    assert (counted == 1).all()
    for _, updates, held in ranks:
        assert torch.equal(times(updates, shape), times(held, shape))


# ---- what `verify` says of copies that differ

WEIGHT = Weight("layers.0.bias", (4,), (Cut(0, 4, 4),), decay=False)


def seen(
    *copies: list[float], gradients: list[list[float]] | None = None
) -> list[Seen]:
    """Ranks that hold the same weight after one step."""
    entry = Entry(WEIGHT, 0, 4, 0)
    others = gradients or [[0.0] * 4] * len(copies)
    return [
        one_step(Part(0, entry, torch.tensor(gradient), torch.tensor(numbers)))
        for numbers, gradient in zip(copies, others, strict=True)
    ]


def one_step(part: Part) -> Seen:
    ones = [1.0]
    return Seen(
        [part], losses=ones, counts=ones, norms=[1.0], logged=ones, scales=ones,
        outputs=[{}], routes=[{}],
    )  # fmt: skip


def rate(step: int) -> float:
    return 0.01


ONE = [1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("odd_one", [0, 1, 2])
@pytest.mark.parametrize(
    "number", [3.0000002, -3.0, float("nan"), float("inf")]
)
def test_one_of_three_copies_that_differs_is_named_with_its_rank(
    odd_one: int, number: float
) -> None:
    ranks = [ONE, ONE, ONE]
    ranks[odd_one] = [1.0, 2.0, number, 0.0]
    true = join(seen(ONE), 1)
    worst = max(
        compare(join(seen(*ranks), 1), true, rate), key=lambda d: d.error
    )
    assert worst.error == float("inf")
    said = [
        str(d) for d in compare(join(seen(*ranks), 1), true, rate) if d.ranks
    ]
    other = 1 if odd_one == 0 else odd_one
    assert len(said) == 1
    assert "the weight of layers.0.bias[2] is" in said[0]
    assert "on rank 0" in said[0]
    assert f"on rank {other};" in said[0]


def test_copies_of_a_gradient_are_compared_too_and_zeros_have_a_sign() -> None:
    trace = join(
        seen(ONE, ONE, gradients=[[0.0] * 4, [0.0, -0.0, 0.0, 0.0]]), 1
    )
    [found] = trace.steps[0].mismatches
    assert found[:4] == ("gradient", "layers.0.bias", (1,), (0, 1))


def test_copies_that_are_not_a_number_are_equal_copies_but_no_right_result() -> (
    None
):
    broken = [1.0, float("nan"), 3.0, 0.0]
    trace = join(seen(broken, broken), 1)
    true = join(seen(ONE), 1)
    assert trace.steps[0].mismatches == ()
    assert max(d.error for d in compare(trace, true, rate)) == float("inf")


def test_copies_are_compared_where_shards_of_ranks_overlap_in_part() -> None:
    def part(start: int, numbers: list[float]) -> Seen:
        entry = Entry(WEIGHT, start, start + len(numbers), 0)
        made = Part(0, entry, torch.zeros(len(numbers)), torch.tensor(numbers))
        return one_step(made)

    trace = join([part(0, [1.0, 2.0]), part(1, [2.0, 3.0, 0.0])], 1)
    assert trace.steps[0].mismatches == ()
    assert trace.steps[0].weights["layers.0.bias"].tolist() == ONE
    trace = join([part(0, [1.0, 2.0]), part(1, [2.5, 3.0, 0.0])], 1)
    [found] = trace.steps[0].mismatches
    assert found == ("weight", "layers.0.bias", (1,), (0, 1), (2.0, 2.5))
