"""A rank at work: nothing is computed twice, a file's program runs, failures name operations."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm import RankFailed, World
from phalanx.comm.launch import launch
from phalanx.drawing import chrome, recorded_picture
from phalanx.layout import Layout
from phalanx.parallel import Precision, build_model, microbatches
from phalanx.parallel.local import build_local
from phalanx.parallel.low_precision import matmul_named
from phalanx.program import Program, ProgramError, Recorded, StepOptions, check
from phalanx.training.executor import Executor, StepClock, StepResult
from phalanx.training.optimizer import AdamW, Sgd
from phalanx.training.precision import LossScale, precision_of
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

GQA = SHAPES["gqa"]


class Late(StepClock):
    """Moments that are known, as those of events are, once the step's numbers have been read."""

    def __init__(self) -> None:
        self.counted, self.read = 0, False

    def begin(self, *, timed: bool, watched: bool) -> None:
        self.counted, self.read = 0, False

    def start(self) -> list[int]:
        assert not self.read, "the step is over"
        self.counted += 1
        return [self.counted]

    end = start

    def seconds(self, moment: list[int]) -> float:
        self.read = True
        return float(moment[0])


def test_spans_come_from_moments_that_are_read_after_the_step() -> None:
    def both(world: World) -> list[tuple[str, float, float]]:
        performer, own = performer_of(world, Layout.parse("dp2 zero3"))
        performer.clock = Late()
        performer.step(own, 1e-3)
        spans = performer.step(own, 1e-3).timeline.spans
        assert len(spans) == len(performer.row)
        return [(str(s.op), s.start, s.end) for s in spans]

    for spans in launch(both, 2, backend="threads"):
        ends = [end for _, _, end in spans]
        assert all(start < end for _, start, end in spans)
        assert ends == sorted(ends)
        assert len({*ends}) == len(ends)


F64 = Precision(torch.float64, torch.float64, torch.float64)


def performer_of(
    world: World,
    layout: Layout,
    program: Program | None = None,
    **options: object,
) -> tuple[Executor, list[dict[str, torch.Tensor]]]:
    model = build_model(GQA)
    program = program or program_of(model, layout)
    precision = options.pop("precision", F64)
    held = build_local(world, layout, model, program, precision=precision)  # type: ignore[arg-type]
    performer = Executor(
        held, program, world.rank, AdamW(), clip=1.0, **options  # type: ignore[arg-type]
    )  # fmt: skip
    batch = batch_of(GQA, 0, dtype=precision.compute)  # type: ignore[attr-defined]
    return performer, microbatches(
        batch, layout, held.coordinates["dp"], held.coordinates["cp"]
    )


def in_8_bits_with_another_program(world: World) -> str:
    layout = Layout.parse("dp2 zero3 fp8:tile")
    program = program_of(build_model(GQA), Layout.parse("dp2 zero3"))
    precision = Precision(matmul=matmul_named(layout.matmul))
    with pytest.raises(ProgramError) as caught:
        performer_of(world, layout, program, precision=precision)
    return str(caught.value)


def test_a_program_without_scales_is_refused_where_matrices_travel_in_8_bits() -> (
    None
):
    for text in launch(in_8_bits_with_another_program, 2, backend="threads"):
        assert "(M) of the units [] in the program" in text
        assert "the units [1, 2, 3, 4] travel in 8 bits" in text


class Products(TorchDispatchMode):
    """Counts multiply-adds of matrix products, also of those that add into what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_"):
            a, b = args[-2:] if "addmm" in name else args[:2]
            self.count += a.numel() * b.shape[-1]
        elif "flash_attention" in name:
            # each call counts, and is told apart
            self.count += args[0].numel() * 1_000_003
        return func(*args, **(kwargs or {}))


def products(world: World, layout: Layout) -> int:
    performer, own = performer_of(world, layout)
    with Products() as counter:
        performer.step(own, 1e-3)
    return counter.count


def test_input_and_weight_gradients_apart_multiply_no_more_than_together() -> (
    None
):
    whole = launch(products, 2, Layout.parse("pp2 1f1b:3"), backend="threads")
    apart = launch(products, 2, Layout.parse("pp2 zb-h1:3"), backend="threads")
    assert apart == whole
    assert min(whole) > 0


def step_of(
    world: World, layout: Layout, program: Program | None
) -> StepResult:
    performer, own = performer_of(world, layout, program)
    result = performer.step(own, 1e-3)
    world.clear()
    return result


def test_a_program_from_an_edited_file_trains_as_the_one_it_came_from() -> (
    None
):
    layout = Layout.parse("pp2 1f1b:3")
    text = str(program_of(build_model(GQA), layout))
    # Somebody lets the first stage run one forward further ahead.
    head, row = text.split("ranks 1:")[0], text.split("ranks 1:")[1]
    edited = Program.parse(head + "ranks 1:" + row)
    assert edited == Program.parse(text)
    check(edited)
    gpipe = program_of(build_model(GQA), Layout.parse("pp2 gpipe:3"))
    loaded = Program.parse(str(gpipe))
    a = launch(step_of, 2, layout, loaded, backend="threads")
    b = launch(step_of, 2, layout, None, backend="threads")
    assert a[0].norm == pytest.approx(b[0].norm, rel=1e-12)
    assert [str(s.op) for s in a[0].timeline.spans] != [
        str(s.op) for s in b[0].timeline.spans
    ]


def test_a_timeline_holds_every_operation_of_the_row_once() -> None:
    layout = Layout.parse("dp2 pp2 zero3 1f1b:3")
    program = program_of(build_model(GQA), layout)
    results = launch(step_of, 4, layout, None, backend="threads")
    for rank, result in enumerate(results):
        ran = sorted(str(span.op) for span in result.timeline.spans)
        assert ran == sorted(map(str, program.rows[program.owner[rank]]))
        assert all(span.end >= span.start for span in result.timeline.spans)
    spans = tuple(span for result in results for span in result.timeline.spans)
    recorded = Recorded(program, type(results[0].timeline)(spans))
    again = Recorded.parse(str(recorded))
    assert again == recorded
    assert again.predicted().makespan <= again.measured().makespan * 1.5
    # Perfetto may drop slices of one track that overlap without one being inside the other.
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in json.loads(chrome(recorded_picture(recorded)))["traceEvents"]:
        if each["ph"] == "X":
            times = each["ts"], each["ts"] + each["dur"]
            tracks.setdefault((each["pid"], each["tid"]), []).append(times)
    assert sum(map(len, tracks.values())) > 100
    for times in tracks.values():
        for (start, end), (start2, end2) in combinations(sorted(times), 2):
            assert start2 >= end - 1e-6 or (
                start <= start2 and end2 <= end + 1e-6
            )


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "no", '{"phalanx run": 1, "program": "x", "spans": []}'],
)
def test_a_file_that_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        Recorded.parse(text)


def overflowing(
    world: World, layout: Layout
) -> tuple[list[float | None], bool, float]:
    scaling = LossScale(2.0**24)
    performer, own = performer_of(
        world, layout, precision=precision_of("fp16"), scaling=scaling
    )
    homes = [u.home.clone() for u in performer.local.units.values()]
    norms = [performer.step(own, 1e-3).norm]
    same = all(
        torch.equal(a, u.home)
        for a, u in zip(homes, performer.local.units.values(), strict=True)
    )
    while norms[-1] != norms[-1] or norms[-1] == float("inf"):
        norms.append(performer.step(own, 1e-3).norm)
    world.clear()
    return norms, same, scaling.scale


def test_float16_overflow_skips_the_step_alike_on_all_ranks_and_halves_the_scale() -> (
    None
):
    told = launch(
        overflowing, 4, Layout.parse("dp2 tp2 zero1"), backend="threads"
    )
    norms, same, scale = told[0]
    assert len(norms) > 1
    assert same
    assert scale == 2.0 ** (24 - (len(norms) - 1))
    assert [len(n) for n, _, _ in told] == [len(norms)] * 4
    assert [n[-1] for n, _, _ in told] == [norms[-1]] * 4


def dying(world: World, layout: Layout, how: str) -> None:
    performer, own = performer_of(world, layout)
    plain = performer._backward

    def backward(op: object) -> None:
        if world.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("a cosmic ray")
        plain(op)  # type: ignore[arg-type]

    performer.handlers["B"] = backward  # type: ignore[assignment]
    performer.step(own, 1e-3)


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_rank_that_fails_mid_step_ends_all_with_the_operation_each_was_at(
    how: str,
) -> None:
    backend = "threads" if how == "raises" else "gloo"
    with pytest.raises(RankFailed) as failed:
        launch(
            dying,
            2,
            Layout.parse("pp2 1f1b:3"),
            how,
            backend=backend,
            timeout=20,
        )
    said = str(failed.value)
    if how == "raises":
        assert "a cosmic ray" in said
        assert "rank 1 was at 5B0" in said
    # How far it came is chance.
    assert re.search(r"Rank 0 was at \d[A-Z]\d", said)


def deaf(world: World, layout: Layout) -> None:
    performer, own = performer_of(world, layout)
    if world.rank == 1:
        # A message that is never sent.
        performer.handlers[">"] = lambda op: None
    performer.step(own, 1e-3)


def test_a_message_that_never_comes_ends_in_the_names_of_those_who_wait() -> (
    None
):
    with pytest.raises(RankFailed, match="Rank 0 was at 2B0"):
        launch(
            deaf, 2, Layout.parse("pp2 1f1b:3"), backend="threads", timeout=2
        )


def losses(world: World, optimizer: Sgd | AdamW) -> list[float]:
    layout = Layout.parse("dp2 zero2")
    model = build_model(GQA)
    program = program_of(model, layout, StepOptions(agree=False))
    held = build_local(world, layout, model, program, precision=F64)
    performer = Executor(held, program, world.rank, optimizer)
    seen = []
    for _ in range(5):
        own = microbatches(batch_of(GQA, 0), layout, held.coordinates["dp"])
        result = performer.step(own, 1e-2)
        assert result.norm is None  # nobody clips, so nobody agrees
        seen.append(result.loss / result.count)
    world.clear()
    return seen


@pytest.mark.parametrize(
    "optimizer", [Sgd(momentum=0.9), AdamW()], ids=["sgd", "adamw"]
)
def test_without_clipping_each_unit_is_updated_as_soon_as_it_is_summed(
    optimizer: Sgd | AdamW,
) -> None:
    told = launch(partial(losses), 2, optimizer, backend="threads")
    total = [a + b for a, b in zip(*told, strict=True)]
    assert total == sorted(total, reverse=True)
