"""A measured step beside a plan: numbers by hand, and rows that add up to the planner's own step."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from phalanx.cost import cached_costs
from phalanx.layout import Layout, Shape, staged_pieces
from phalanx.planner import Curve, Machine, Rate, Store
from phalanx.planner.local import hardware_of_machine, local_profile
from phalanx.planner.search import judge
from phalanx.planner.step import Request
from phalanx.program import (
    Costs,
    Op,
    Recorded,
    Span,
    Timeline,
    build,
    simulate,
)
from phalanx.report.compared import HEAD, Compared, compare
from phalanx.report.step import Step, predicted

SHAPE = Shape(
    name="small",
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=256,
    sequence=16,
    batch=8,
)
# Without latency many small messages take as long as one of all their bytes: then the sums of units
# have to add up to what the planner counts for a step.
MACHINE = Machine(
    name="small",
    date="2026-01-31",
    method="by hand",
    device="CPU",
    kind="cpu",
    count=1,
    cores=4,
    memory=8e9,
    launch=1e-6,
    stores=(Store("copy", 1e10),),
    rates=(Rate("fp32", 64, 64, 64, 1e10), Rate("fp32", 256, 256, 256, 4e10)),
    curves=tuple(
        Curve(op, "gloo", 2, "ring", 0.0, 1e8, 0.0, 1, 1 << 20)
        for op in (
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "send",
            "broadcast",
        )
    ),
)


def step_of(text: str) -> Step:
    """A step whose operations all ran, whatever they took."""
    layout = Layout.parse(text)
    program = build(layout, staged_pieces(layout, SHAPE))
    recorded = Recorded(program, simulate(program))
    return Step(4, layout, SHAPE, "", SHAPE.sequence, "CPU", recorded, None)


def compared_of(text: str, place: Path) -> Compared:
    step = step_of(text)
    hardware = hardware_of_machine(MACHINE, step.layout.ranks)
    return predicted(
        step,
        hardware,
        local_profile(),
        partial(cached_costs, target="cpu", place=place),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached_costs")


def test_a_row_has_the_medians_of_its_kind_and_its_part_of_the_step() -> None:
    spans = [
        Span(0, "compute", Op("F", 0, 0), 0.0, 1.0),
        Span(0, "compute", Op("F", 1, 0), 1.0, 4.0),
        Span(0, "compute", Op("F", 2, 0), 4.0, 9.0),
        Span(0, "compute", Op("B", 2, 0), 9.0, 10.0),
        Span(1, "compute", Op("F", 0, 0), 0.0, 2.0),
        Span(1, "agree", Op("A"), 2.0, 3.0),
    ]
    prices = {
        ("F", 0): 1.0,
        ("F", 1): 4.0,
        ("F", 2): 8.0,
        ("I", 2): 0.25,
        ("W", 2): 0.25,
    }
    forward, backward, agree = compare(Timeline(tuple(spans)), prices)
    assert (forward.count, forward.predicted, forward.measured) == (
        2.0,
        2.5,
        2.5,
    )
    assert forward.share == pytest.approx((1 + 3 + 5 + 2) / 2 / 10)
    assert (backward.kind, backward.predicted, backward.ratio) == (
        "B",
        0.5,
        2.0,
    )
    assert (agree.words, agree.predicted, agree.ratio) == (
        "agree on norm",
        None,
        None,
    )


@pytest.mark.parametrize(
    "text", ["", "dp2", "accum:2", "dp4 zero1", "dp2x2 zero1", "tp2 seq"]
)
def test_what_the_rows_predict_adds_up_to_the_planners_step(
    text: str, place: Path
) -> None:
    step = step_of(text)
    hardware, profile = (
        hardware_of_machine(MACHINE, step.layout.ranks),
        local_profile(),
    )
    costs = partial(cached_costs, target="cpu", place=place)
    request = Request(
        SHAPE, hardware, profile, costs, SHAPE.sequence, SHAPE.batch, "fp32"
    )
    (choice,) = judge(request, [step.layout])
    found = compared_of(text, place)
    assert found.predicted == pytest.approx(choice.step)
    # The row of one operation alone has its own price.
    sums = dict.fromkeys("FBUGSHQNA", 0.0)
    for span in step.recorded.timeline.spans:
        if span.rank == 0 and span.op.kind in sums:
            alone = Timeline((span._replace(start=0.0, end=1.0),))
            (row,) = predicted(
                _with(step, alone), hardware, profile, costs
            ).rows
            sums[row.kind] += row.predicted or 0.0
    computing = sums["F"] + sums["B"] + sums["U"]
    # What is computed takes its time; messages take at most theirs, with or without it beside.
    assert (
        computing * (1 - 1e-9)
        <= choice.step
        <= sum(sums.values()) * (1 + 1e-9)
    )
    assert (sums["G"] > 0) == bool(step.layout.zero)
    assert (sums["H"] > 0) == (text == "dp2x2 zero1")
    assert sums["A"] > 0 or step.layout.ranks == 1


def _with(step: Step, timeline: Timeline) -> Step:
    return replace(step, recorded=Recorded(step.recorded.program, timeline))


def test_an_operation_that_took_what_was_predicted_has_ratio_one(
    place: Path,
) -> None:
    text = "pp2 zb-h1:4"
    step = step_of(text)
    layout = step.layout
    first = compared_of(text, place)
    kinds = {r.kind: r.predicted for r in first.rows if r.predicted}
    assert set(kinds) == {"F", "I", "W", "U", "<", "A"}
    # All operations of a kind made to last as long as the median of what is predicted for them.
    costs = Costs({k: v for k, v in kinds.items() if k not in "<A"})
    timeline = simulate(build(layout, staged_pieces(layout, SHAPE)), costs)
    hardware = hardware_of_machine(MACHINE, 2)
    again = predicted(
        _with(step, timeline),
        hardware,
        local_profile(),
        partial(cached_costs, target="cpu", place=place),
    )
    ratios = {r.kind: r.ratio for r in again.rows}
    for kind in "FIWU":
        assert ratios[kind] == pytest.approx(1.0), kind
    assert again.measured == pytest.approx(timeline.makespan)


def test_the_table_fits_a_terminal_of_80_columns_and_the_page_has_the_same_cells(
    place: Path,
) -> None:
    found = compared_of("dp2 pp2 zero1 1f1b:4", place)
    assert max(map(len, found.text().splitlines())) <= 80
    for row in found.rows:
        for cell in (*HEAD, *row.cells()):
            assert cell in found.text()
            assert (
                cell.replace(">", "&gt;").replace("<", "&lt;") in found.html()
            )
    assert found.figures()["rows"] == [
        asdict(r) | {"ratio": r.ratio} for r in found.rows
    ]


def test_on_a_gpu_it_is_said_that_operations_are_timed_until_they_are_launched() -> (
    None
):
    of = partial(Compared, "dp8", "h100x8", "phalanx", 3, (), 1.0, 2.0)
    assert "launched" in of(launched=True).text()
    assert "launched" not in of().text()
