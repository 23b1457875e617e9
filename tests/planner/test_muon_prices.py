"""What Muon takes: the shape knows its matrices, and a plan prices their products, ways and bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.api.plan import request
from phalanx.api.request import request_for
from phalanx.cli.main import main
from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Shape, staged_pieces
from phalanx.layout.matrices import assign_owners
from phalanx.parallel import build_model
from phalanx.parallel.local import build_local
from phalanx.planner import cluster
from phalanx.planner.hardware import hardware_of
from phalanx.planner.local import profile_for
from phalanx.planner.matrices import (
    Matrices,
    MatrixTimes,
    matrix_bytes,
    matrix_times,
    owners_work,
    row_matrices,
)
from phalanx.planner.profile import profile
from phalanx.planner.step import Pricer
from phalanx.program import StepOptions
from phalanx.program.memory import Sizes, peaks
from phalanx.program.ops import TO_OWNERS
from phalanx.training.muon import MATRICES as _ROW
from phalanx.training.muon import Muon, MuonUpdate
from phalanx.training.program import program_of
from phalanx.verification import SHAPES


def _matrices(shape: Shape, layout: Layout) -> list[Matrices]:
    return [row_matrices(row) for row in staged_pieces(layout, shape).rows]


@pytest.mark.parametrize(
    "name", ["gqa", "gpt", "experts", "latent", "sinks", "mlp"]
)
def test_a_shape_knows_the_matrices_of_its_models_blocks(name: str) -> None:
    shape = SHAPES[name]
    model = build_model(shape)
    each = _matrices(shape, Layout())
    for piece in range(1, shape.layers + 1):
        found = [
            tuple(sorted((r.stop - r.start, c.stop - c.start)))
            for n, w in model.weights.items()
            if n.startswith(f"layers.{piece - 1}.")
            for r, c in model.rules.matrices(n, tuple(w.shape))
            for _ in range(w.shape[0] if w.dim() == 3 else 1)
        ]
        dense, routed = each[piece]
        assert sorted(
            tuple(sorted(sides)) for sides in dense + routed
        ) == sorted(found)


@pytest.mark.parametrize("trained", [{"lora_r": 2}, {"freeze": ("layers.1",)}])
def test_weights_that_are_not_trained_have_no_owners(
    trained: dict[str, Any],
) -> None:
    """With LoRA Muon updates no matrix at all, and of frozen blocks none."""
    shape = replace(SHAPES["gqa"], **trained)
    layout = Layout.parse("dp2 zero1 bf16")
    hardware = hardware_of(cluster("h100x8"))
    matrices = _matrices(shape, layout)
    model = build_model(shape)
    program = program_of(model, layout, StepOptions(whole_matrices=True))
    exchanged = {
        op.piece for row in program.rows for op in row if op.kind == TO_OWNERS
    }
    assert exchanged == {n for n, each in enumerate(matrices) if any(each)}
    assert 2 not in exchanged
    assert matrix_times(_ROW, matrices[2], layout, hardware) == MatrixTimes()
    assert matrix_bytes(matrices[2], layout, 2.0) == 0


def held(world: World, layout: Layout) -> list[tuple[int, int]]:
    """By unit with matrices: the numbers of the plan's kind that a rank moves, and those it has."""
    model = build_model(SHAPES["gqa"])
    program = program_of(model, layout, StepOptions(whole_matrices=True))
    local = build_local(world, layout, model, program)
    updates = [Muon().of(unit) for unit in local.units.values()]
    moved = [
        (sum(p.length for parts in u.of_theirs for p in parts), u.unit.moved)
        for u in updates
        if isinstance(u, MuonUpdate) and u.group is not None
    ]
    world.clear()
    return moved


def test_the_bytes_of_a_plan_are_those_that_ranks_take_of_the_owners() -> None:
    layout = Layout.parse("dp2 tp2 zero1")
    found = launch(held, 4, layout, backend="threads")
    matrices = _matrices(SHAPES["gqa"], layout)
    for piece in range(4):
        assert all(
            taken == moved for taken, moved in (each[piece] for each in found)
        )
        mean = sum(each[piece][0] for each in found) / 4
        assert 3 * mean * 4 == pytest.approx(
            matrix_bytes(matrices[piece + 1], layout, 4.0)
        )


def test_the_update_of_a_plan_is_the_work_of_the_owner_that_has_most() -> None:
    """At a rate of one, by hand: two ranks, one has the square, the other both halves."""
    assert assign_owners(
        [_ROW.work(4, 4), _ROW.work(4, 2), _ROW.work(4, 2)],
        2,
    ) == [
        0,
        1,
        1,
    ]
    assert assign_owners([1.0, 1.0], 3, first=2) == [2, 0]
    shape, hardware = Shape.load("8b"), hardware_of(cluster("h100x64"))
    matrices = _matrices(shape, Layout())[1]
    alone = matrix_times(_ROW, matrices, Layout.parse("bf16"), hardware)
    eight = matrix_times(
        _ROW, matrices, Layout.parse("dp8 zero1 bf16"), hardware
    )
    assert alone.to_owners == alone.from_owners == 0 < eight.to_owners
    # Seven matrices: the work of all over eight ranks, as the largest one alone.
    work = [_ROW.work(*sides) for sides in matrices[0]]
    share = max(work) / sum(work)
    assert eight.update / alone.update == pytest.approx(share, rel=0.15)


def test_newton_schulz_is_counted_in_flops_and_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a matrix of 2 x 3 by hand: five times x x^T (2x3x2), its square (2x2x2), that times x (2x2x3)
    are 5 (12 + 8 + 12) multiply-adds; each product reads two factors and writes its result."""
    flops = 2 * 5 * (2 * 3 * 2 + 2 * 2 * 2 + 2 * 2 * 3)
    moved = 5 * ((6 + 6 + 4) + (4 + 4 + 4) + (4 + 6 + 6))
    alone = Layout.parse("bf16")
    assert owners_work(_ROW, (((2, 3),), ()), alone) == (flops, 2 * moved)
    assert owners_work(_ROW, (((3, 2),), ()), Layout(), cpu=True) == (
        flops,
        4 * moved,
    )
    three = (((2, 3),) * 3, ())
    assert owners_work(_ROW, three, Layout.parse("dp2 zero1")) == (
        2 * flops,
        4 * moved,
    )
    assert owners_work(_ROW, ((), ((2, 3),) * 4), Layout.parse("ep2")) == (
        2 * flops,
        4 * moved,
    )

    # A block of this MLP is a square matrix, so that each of 15 products has 1,024^3 multiply-adds.
    mlp = Shape.load("mlp")
    assert _matrices(mlp, Layout())[1][0] == ((1024, 1024),)
    each = 2 * 15 * 1024**3
    words = ["--model", "mlp", "--optimizer", "muon", "--json"]
    assert main(["cost", *words]) == 0
    blocks = json.loads(capsys.readouterr().out)["matrix_updates"]
    assert {x["flops"] for x in blocks if x["flops"]} == {each}
    assert main(["check", "pp2", *words]) == 0
    half = json.loads(capsys.readouterr().out)["matrix_updates"]["flops"]
    assert half == mlp.layers // 2 * each
    assert main(["check", "pp2", *words[:-1]]) == 0
    assert "Newton-Schulz takes" in capsys.readouterr().out
    assert main(["check", "pp2", "--model", "mlp"]) == 0
    assert "Newton-Schulz" not in capsys.readouterr().out


def test_a_plan_with_muon_takes_longer_updates_and_keeps_one_moment() -> None:
    shape, layout = SHAPES["gqa"], Layout.parse("dp2 zero1 bf16")
    request = request_for(shape, hardware_of(cluster("h100x8"), 2))
    plain, muon = (
        Pricer(replace(request, profile=profile(name))).choose(layout)
        for name in ("phalanx", "phalanx-muon")
    )
    assert muon.parts["update"] > plain.parts["update"]
    # A matrix has a float32 copy and one moment, other weights have two moments.
    rows = staged_pieces(layout, shape).rows
    matrices = sum(
        a * b for each in map(row_matrices, rows) for a, b in each[0]
    )
    total = 12 * shape.total - 4 * matrices
    assert muon.memory["optimizer"] == pytest.approx(
        plain.memory["optimizer"] * total / (12 * shape.total)
    )


def test_a_plan_of_a_run_file_has_the_optimizer_of_the_run(
    tmp_path: Path,
) -> None:
    plain, file = "model = 'tiny'\n", tmp_path / "run.toml"
    file.write_text(plain)
    assert request(str(file), "h100x8").profile.name == "phalanx"
    file.write_text(f"{plain}[optimizer]\nname = 'muon'\n")
    assert request(str(file), "h100x8").profile == profile("phalanx-muon")
    assert request(str(file), "h100x8", profile="default").profile == profile(
        "default"
    )
    # On this machine: two averages of float32 are one.
    ours = (
        profile_for(
            replace(hardware_of(cluster("h100x8")), cores=2), optimizer=name
        )
        for name in ("adamw", "muon")
    )
    assert [each.optimizer_bytes for each in ours] == [8.0, 4.0]


def test_the_matrices_of_two_units_are_on_their_way_at_once() -> None:
    program = program_of(
        build_model(SHAPES["gqa"]),
        Layout.parse("dp2"),
        StepOptions(whole_matrices=True),
    )
    none = (0.0,) * 6
    (peak,) = peaks(
        program, Sizes(none, none, matrices=(0.0, 3.0, 3.0, 3.0, 3.0, 0.0))
    )
    assert peak.kinds["messages"] == peak.total == 6.0


def test_experts_of_other_ranks_are_owned_by_these() -> None:
    """With ep a block is three pieces: what is dense, its experts, and what has no matrices."""
    together, apart = (
        _matrices(SHAPES["experts"], Layout.parse(text))
        for text in ("dp2", "ep2")
    )
    assert apart[2:5] == [(together[2][0], ()), ((), together[2][1]), ((), ())]
