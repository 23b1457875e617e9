"""Every reader of a step has the list of operations that the run carries out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from phalanx.api.check import check, proved_program
from phalanx.api.request import RunStep, step_of_layout, step_of_run
from phalanx.api.step import step_of
from phalanx.cli import main
from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout, Run, Shape, legal
from phalanx.layout.optimizers import OPTIMIZERS
from phalanx.parallel import Model, build_model
from phalanx.planner.hardware import hardware_of
from phalanx.planner.link import cluster
from phalanx.planner.local import profile_for
from phalanx.planner.price import Priced
from phalanx.planner.step import case_of, planned_program
from phalanx.program import Op, Program, build, options_of
from phalanx.training.optimizers import optimizer_of
from phalanx.training.program import program_of
from phalanx.training.rank import Rank
from phalanx.verification import SHAPES, covering, every_layout, placement
from phalanx.verification.optimizers import OPTIMIZERS as COMPARED_OPTIMIZERS

Capture = pytest.CaptureFixture[str]
Rows = tuple[tuple[Op, ...], ...]

_DENSE, _EXPERTS = SHAPES["gqa"], SHAPES["experts"]
_WINDOWS = replace(_DENSE, name="windows", windows=(4, 0))
_TRAINED = ({}, {"lora_r": 2}, {"freeze": ("embed", "layers.1")})


@cache
def _model(shape: Shape) -> Model:
    return build_model(shape)


def _ran(step: RunStep, optimizer: str, clip: float) -> Rows:
    """The operations that ranks carry out: of the model's own modules, with the run's options."""
    run = Run.parse(
        "", "run", (f"optimizer.name={optimizer}", f"optimizer.clip={clip}")
    )
    return program_of(_model(step.shape), step.layout, options_of(run)).rows


def _planned(step: RunStep) -> Rows:
    hardware = hardware_of(cluster("h100x8"))
    profile = profile_for(hardware, None, "bf16", optimizer=step.optimizer)
    priced = Priced(case_of(step.shape, step.layout), (), hardware, profile)  # type: ignore[arg-type]
    return planned_program(priced, step.layout.microbatches).rows


def _settings(times: int) -> Iterator[tuple[Shape, Layout, str, float]]:
    """The covering list of layouts of each shape, each with the next optimizer, clipping and training."""
    turns = cycle(product(_TRAINED, OPTIMIZERS, (0.0, 1.0)))
    for shape in (_DENSE, _EXPERTS, _WINDOWS, SHAPES["gpt"]):
        # Where every layout meets three settings, all pairs occur over the list.
        layouts = covering(every_layout(shape, 8, besides=True), 1)
        # The default suite has every second layout.
        some = layouts[::2] if times == 1 else layouts * times
        for layout in some:
            trained, optimizer, clip = next(turns)
            changed = replace(shape, **trained)  # type: ignore[arg-type]
            if not legal(layout, changed):
                yield changed, layout, optimizer, clip


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_check_draw_and_plan_have_the_operations_of_the_run(
    times: int,
) -> None:
    compared = 0
    for shape, layout, optimizer, clip in _settings(times):
        step = step_of_layout(layout, shape, optimizer=optimizer)
        ran = _ran(step, optimizer, clip)
        where = f"{layout} on {shape.name}, {optimizer}"
        assert proved_program(step).rows == ran, where
        assert (
            step_of(layout, shape, {"optimizer": optimizer}).program.rows
            == ran
        ), where
        assert _planned(step) == ran, where
        compared += 1
    assert compared > (80 if times == 1 else 100 * times)


@pytest.mark.parametrize(
    "words",
    [
        ("layout=dp2 tp2 seq zero1", "optimizer.clip=0"),
        ("layout=dp2 tp2 seq zero1", "lora.r=4"),
        ("layout=dp2 zero1 accum:2", "optimizer.name=muon"),
        ("layout=dp2 pp2 zero3 1f1b:4", "freeze=embed", "optimizer.name=sgd"),
        ("layout=pp2 searched:4",),
    ],
)
def test_the_commands_show_the_step_of_a_run_file(
    words: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "tiny"\nlayout = "dp2"\n')
    run = Run.load(str(file), words)
    layout = run.layout_of(run.shape)
    assert layout
    program = program_of(build_model(run.shape), layout, options_of(run))
    assert main(["check", str(file), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operations"] == sum(
        map(len, program.rows)
    )
    assert main(["draw", str(file), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["program"] == str(program)
    assert check(run).figures["operations"] == sum(map(len, program.rows))


def test_a_run_s_rank_has_the_program_that_check_proves(
    tmp_path: Path,
) -> None:
    for optimizer in OPTIMIZERS:
        words = (
            f"out={tmp_path}",
            "layout=accum:2",
            f"optimizer.name={optimizer}",
            "batch=2",
        )
        run = Run.parse("", "run", words)
        step = step_of_run(run)
        rank = Rank(AloneWorld("cpu"), run, step.layout, drawn=False)
        assert rank.part.program.rows == proved_program(step).rows


def test_the_sequence_that_stages_are_balanced_for_is_that_of_the_step() -> (
    None
):
    """A head costs as much as its vocabulary, attention grows with the sequence: stages differ."""
    shape = replace(_DENSE, vocab=1 << 14, layers=6)
    stages = {
        length: step_of_layout(
            "pp2 1f1b:2", shape, sequence=length
        ).pieces.stages
        for length in (8, 1 << 14)
    }
    assert stages[8] != stages[1 << 14]
    for length, found in stages.items():
        run = replace(shape, sequence=length)
        assert program_of(
            build_model(run), Layout.parse("pp2 1f1b:2")
        ).host == {
            piece: stage
            for stage, pieces in enumerate(found)
            for piece in pieces
        }


def test_an_optimizer_s_row_says_what_its_class_does() -> None:
    for name, traits in OPTIMIZERS.items():
        run = Run.parse("", "run", (f"optimizer.name={name}",))
        assert optimizer_of(run).whole_matrices == traits.whole_matrices
        assert (
            COMPARED_OPTIMIZERS[name].whole_matrices == traits.whole_matrices
        )


def test_a_model_of_the_user_s_own_is_proved_as_its_modules_say(
    tmp_path: Path,
) -> None:
    """Its head has a norm that no shape of it mentions, and its first block is frozen."""
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from phalanx.parallel import build_model\n"
        "from phalanx.verification import SHAPES\n"
        "class Mine:\n    pass\n"
        "def describe(made):\n"
        "    model = build_model(replace(SHAPES['gqa'], freeze=('layers.0',)))\n"
        "    return replace(model, shape=SHAPES['gqa'])\n"
    )
    step = step_of_layout("dp2 tp2 seq zero1", f"{file}:Mine")
    make: partial[Model] = partial(
        build_model, replace(_DENSE, freeze=("layers.0",))
    )
    assert proved_program(step).rows == program_of(make(), step.layout).rows
    assert 1 in proved_program(step).frozen


def test_a_layout_beside_a_run_file_and_an_automatic_layout_are_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "tiny"\n')
    assert main(["check", str(file)]) == 2
    assert 'layout = "auto"' in capsys.readouterr().err
    assert main(["check", str(file), "--layout", "dp2"]) == 0
    for words in (
        ["--model", "tiny"],
        ["--batch", "4"],
        ["--optimizer", "muon"],
    ):
        assert main(["check", str(file), "--layout", "dp2", *words]) == 2
        assert "run file" in capsys.readouterr().err
    assert main(["draw", "dp2", "--model", "tiny", "--layout", "dp4"]) == 2
    assert "--layout needs a run file" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "text",
    ["dp2 tp2 seq zero1", "dp2 pp2 zero3 1f1b:4", "ep2 tp2 seq accum:2"],
)
def test_sums_are_proved_of_the_operations_of_the_run(
    text: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof looks at fewer pieces and ranks, so kinds of operations are compared."""
    step = step_of_layout(
        text, _EXPERTS if "ep2" in text else _DENSE, optimizer=optimizer
    )
    built: list[Program] = []

    def recorded(*arguments: Any) -> Program:
        built.append(build(*arguments))
        return built[-1]

    monkeypatch.setattr(placement, "build", recorded)
    make = partial(build_model, step.shape)
    assert placement.placement_faults(make, step.layout, step.options) == ()
    ran = {op.kind for row in _ran(step, optimizer, 1.0) for op in row}
    assert built
    for program in built:
        assert {op.kind for row in program.rows for op in row} == ran
