"""SOAP in every layout makes the updates of one process, written line by line from the paper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.api.check import check
from phalanx.api.request import request_for
from phalanx.cost.sizes import sizes_of
from phalanx.layout import Layout, Run, Shape, staged_pieces
from phalanx.layout.optimizers import OptimizerChoice
from phalanx.layout.run import RunError
from phalanx.parallel import Precision, build_model
from phalanx.planner import cluster
from phalanx.planner.hardware import hardware_of
from phalanx.planner.local import profile_for
from phalanx.planner.matrices import (
    matrix_times,
    owned_elements,
    owners_work,
    row_matrices,
)
from phalanx.planner.step import Pricer
from phalanx.program import StepOptions
from phalanx.training.optimizer import AdamW, State
from phalanx.training.optimizers import optimizer_of
from phalanx.training.program import program_of
from phalanx.training.soap import (
    MATRICES,
    Soap,
    first_basis,
    refreshed_basis,
)
from phalanx.verification import (
    SHAPES,
    batch_of,
    covering,
    every_layout,
    verify,
)
from phalanx.verification import optimizers as compared
from phalanx.verification import soap as plain

GQA, EXPERTS = SHAPES["gqa"], SHAPES["experts"]
LAYOUTS = {
    "gqa": "dp2 tp2 zero3 seq accum:3; dp2 pp2 zero1 1f1b:3",
    "experts": "pp2 ep2 zero2 1f1b:3",
}
# By shape, over which axes, and how many layouts at the least.
COVERED = {
    "gqa": ("dp pp cp tp", 60),
    "experts": ("dp pp cp tp ep", 60),
    "gpt": ("dp pp tp", 30),
    "mlp": ("dp pp tp", 20),
}


def failures(name: str, layouts: Any, **more: Any) -> list[str]:
    verdicts = verify(SHAPES[name], layouts, optimizer="soap", **more)
    return [
        f"{v.layout}: {v.first_difference}" for v in verdicts if not v.passed
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_steps_of_a_layout_are_those_of_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-10, verify's bound in float64. Every third update refreshes the bases."""
    layouts = Layout.parse_many(LAYOUTS[name])
    wide = [replace(x, precision="fp64") for x in layouts]
    settings = Soap(3, AdamW(0.8, 0.9, 1e-3, decay=0.2))
    monkeypatch.setitem(compared.OPTIMIZERS, "soap", settings)
    assert failures(name, wide, steps=10) == []


def test_experts_without_tokens_agree_with_one_process() -> None:
    """Their gradient is zero, so a basis of theirs has nothing to be made of."""
    shape = replace(EXPERTS, experts=16, top_k=1, layers=2)
    layouts = [Layout.parse("dp2 fp64")]
    assert all(v.passed for v in verify(shape, layouts, optimizer="soap"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_layouts_in_narrow_precisions_agree_up_to_rounding(
    precision: str,
) -> None:
    layout = Layout.parse(f"dp2 tp2 zero1 {precision}")
    assert failures("gqa", [layout]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", COVERED)
def test_many_layouts_agree_with_one_process(name: str, part: int) -> None:
    axes, least = COVERED[name]
    layouts = covering(
        every_layout(SHAPES[name], 8, axes=axes, besides=True), least
    )
    assert len(layouts) >= least
    assert failures(name, layouts[part::4]) == []


# ---- the update of one matrix


def _state(rows: int, columns: int) -> State:
    state = {
        each.kind: torch.zeros(each.shape(rows, columns), dtype=torch.float64)
        for each in MATRICES.owned
    }
    return state | {"step": torch.zeros(())}


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_where_bases_are_the_axes_it_is_torchs_adamw() -> None:
    """Diagonal gradients have diagonal preconditioners, whose eigenvectors are unit vectors."""
    soap = Soap(2, AdamW(0.8, 0.9, 1e-3))
    state, weight = _state(4, 4), nn.Parameter(_random(4, 4))
    adam = torch.optim.AdamW([weight], 0.1, (0.8, 0.9), 1e-3, weight_decay=0.0)
    ours = weight.detach().clone()
    for step in range(8):
        gradient = torch.diag(_random(4, seed=step) + torch.arange(1.0, 5.0))
        update = soap.update(state, gradient)
        if step == 0:
            assert not update.any()
            continue
        ours -= 0.1 * update
        weight.grad = gradient
        adam.step()
        torch.testing.assert_close(ours, weight.detach(), rtol=1e-12, atol=0)


def test_bases_are_the_eigenvectors_of_their_preconditioners() -> None:
    factor = _random(6, 9)
    moment = factor @ factor.mT
    values, vectors = torch.linalg.eigh(moment)
    found = first_basis(moment)
    shares = (vectors.flip(-1) * found).sum(0).abs()
    torch.testing.assert_close(shares, torch.ones_like(shares))
    # Power iteration converges to them from another basis.
    basis = torch.linalg.qr(_random(6, 6, seed=1)).Q
    for _ in range(400):
        basis = refreshed_basis(moment, basis)
    rotated = basis.mT @ moment @ basis
    torch.testing.assert_close(
        rotated, torch.diag(values.flip(-1)), rtol=1e-6, atol=1e-6
    )


def test_rounding_chooses_no_basis_of_directions_without_a_gradient() -> None:
    """Of a gradient of rank 2, six eigenvalues of eight are zero."""
    gradient = _random(8, 2)
    moment = gradient @ gradient.mT
    noise = 1e-14 * _random(8, 8, seed=1)
    moved = moment + noise + noise.mT
    first, second = first_basis(moment), first_basis(moved)
    # Signs of basis vectors do not matter.
    shares = (first * second).sum(0).abs()
    assert float((1 - shares).abs().max()) < 1e-10
    then = refreshed_basis(moment, first), refreshed_basis(moved, second)
    shares = (then[0] * then[1]).sum(0).abs()
    assert float((1 - shares).abs().max()) < 1e-9
    # A matrix without any gradient, such as that of an expert without tokens.
    zero = torch.zeros(8, 8, dtype=torch.float64)
    assert torch.equal(first_basis(zero).abs(), torch.eye(8))
    for refreshed in refreshed_basis, plain._refreshed:
        assert torch.equal(refreshed(zero, first), first)


def test_rows_without_a_gradient_have_the_basis_of_one_process() -> None:
    gradient = _random(24, 4)
    gradient[[3, 22, 23]] = 0
    moment = gradient @ gradient.mT
    ours, theirs = first_basis(moment), plain._eigenvectors(moment)
    eye = torch.eye(24, dtype=torch.float64)
    for basis in ours, theirs:
        torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-12)
    # Column for column, up to signs.
    shares = (ours * theirs).sum(0).abs()
    torch.testing.assert_close(shares, torch.ones_like(shares))
    # Unit vectors of the rows, after the four eigenvectors.
    assert torch.equal(ours[[3, 22, 23], 4:7].abs().round(), eye[:3, :3])
    # Dependent vectors that are no rows of zeros: the next unit vector.
    alike = torch.ones(3, 1, dtype=torch.float64)
    alike[0] = 0.5
    found = plain._gram_schmidt([alike[:, 0], alike[:, 0], *eye[:3, :3]], 3)
    torch.testing.assert_close(found.mT @ found, eye[:3, :3])


# ---- keys


def test_a_run_file_names_it_and_its_keys() -> None:
    words = "optimizer.name=soap", "optimizer.refresh_every=3"
    run = Run.parse("", "run", (*words, "optimizer.betas=[0.8, 0.9]"))
    assert optimizer_of(run) == Soap(3, AdamW(0.8, 0.9))
    for word, way_out in (
        ("optimizer.refresh_every=3", 'write name = "soap"'),
        ("optimizer.nesterov=false", 'write name = "muon"'),
        ("optimizer.momentum=0.5", 'write name = "sgd"'),
    ):
        with pytest.raises(RunError, match=way_out):
            Run.parse("", "run", (word,))
    # 0 of a key that is unset by default says nothing else.
    Run.parse("", "run", ("optimizer.momentum=0.0",))
    with pytest.raises(RunError, match="has no effect on soap"):
        Run.parse("", "run", (words[0], "optimizer.matrix_lr=0.1"))


# ---- memory and time


def _rows(shape: Shape, layout: Layout) -> Any:
    return [row_matrices(row) for row in staged_pieces(layout, shape).rows]


def test_memory_is_what_owners_hold_by_hand() -> None:
    """A 2 x 3 matrix: two moments of 6, two tensors of 4 and two of 9."""
    assert MATRICES.owned_elements(2, 3) == 2 * (6 + 4 + 9)
    layout = Layout.parse("dp2")
    one = [(((2, 3), (2, 3)), ())]
    assert owned_elements(MATRICES, one, layout, [[0]]) == (38.0,)
    assert owned_elements(MATRICES, one, Layout(), [[0]]) == (76.0,)
    # Three alike and two owners: one of them has two.
    three = [(((2, 3),) * 3, ())]
    assert owned_elements(MATRICES, three, layout, [[0]]) == (76.0,)


def test_the_engine_holds_the_bytes_that_are_planned() -> None:
    layout = Layout.parse("")
    program = program_of(
        build_model(GQA), layout, StepOptions(whole_matrices=True)
    )
    sizes = sizes_of(
        partial(build_model, GQA), layout, program, batch_of(GQA, 0), Precision(),
        optimizer=OptimizerChoice(name="soap"),
    )  # fmt: skip
    matrices = [sides for dense, _ in _rows(GQA, layout) for sides in dense]
    owned = sum(MATRICES.owned_elements(*sides) for sides in matrices)
    others = GQA.total - sum(a * b for a, b in matrices)
    assert sum(sizes.optimizer) == 4 * (owned + 2 * others)
    # The planner's, on a CPU.
    hardware = replace(hardware_of(cluster("h100x8"), 1), cores=2)
    request = request_for(GQA, hardware, optimizer="soap")
    choice = Pricer(request).choose(layout)
    assert choice.memory["optimizer"] == pytest.approx(sum(sizes.optimizer))


def test_work_is_counted_by_hand() -> None:
    """Of 2 x 3: into both bases twice and out of them once, two Gram matrices, a tenth of a refresh."""
    rotations = 3 * (2 * 2 * 3 + 2 * 3 * 3)
    grams = 2 * 3 * 2 + 3 * 2 * 3
    refresh = (1 + 4 / 3) * (2**3 + 3**3) / 10
    one = (((2, 3),), ())
    flops, moved = owners_work(MATRICES, one, Layout())
    assert flops == pytest.approx(2 * (rotations + grams + refresh))
    assert moved > 0
    hardware = hardware_of(cluster("h100x8"))
    shape = Shape.load("8b")
    matrices = _rows(shape, Layout())[1]
    alone = matrix_times(MATRICES, matrices, Layout.parse("bf16"), hardware)
    eight = matrix_times(
        MATRICES, matrices, Layout.parse("dp8 zero1 bf16"), hardware
    )
    assert alone.to_owners == 0 < eight.to_owners
    assert eight.update < alone.update


def test_check_and_profiles_know_it() -> None:
    figures = check("dp2", model="mlp", optimizer="soap").figures
    assert figures["matrix_updates"]["flops"] > 0
    hardware = hardware_of(cluster("h100x8"))
    profile = profile_for(hardware, None, "bf16", optimizer="soap")
    assert profile.name == "phalanx-soap"
    # A float32 copy; moments come beside it.
    assert profile.optimizer_bytes == 4.0
