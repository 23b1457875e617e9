"""What pieces keep, found on meta tensors; `test_peak_memory.py` holds it against real steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.cost.live import Live
from phalanx.cost.sizes import sizes_of
from phalanx.layout import Layout, Shape
from phalanx.layout.optimizers import OptimizerChoice
from phalanx.layout.state_bytes import held_bytes
from phalanx.parallel import Precision, build_model
from phalanx.planner.local import local_profile
from phalanx.program import StepOptions
from phalanx.program.memory import peaks
from phalanx.training.precision import precision_of
from phalanx.training.program import program_of
from phalanx.verification import batch_of

SHAPE = Shape(
    "deep",
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=64,
    sequence=64,
    batch=8,
)
BATCH = batch_of(SHAPE, 0, dtype=torch.float32)


def test_recomputing_keeps_less_and_selective_lies_between() -> None:
    def peak(text: str) -> float:
        layout = Layout.parse(text)
        program = program_of(build_model(SHAPE), layout)
        sizes = sizes_of(
            partial(build_model, SHAPE), layout, program, BATCH, Precision()
        )
        return peaks(program, sizes)[0].kinds["activations"]

    assert (
        peak("recompute:all")
        < peak("recompute:selective")
        < peak("recompute:none")
    )
    assert peak("recompute:sqrt") < peak("recompute:selective")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_of_zero_are_those_of_the_engines_buffers(
    zero: int, precision: str, optimizer: str
) -> None:
    layout = Layout.parse(f"dp4 zero{zero} {precision}")
    chosen = {
        "adamw": OptimizerChoice(),
        "sgd": OptimizerChoice(name="sgd"),
        "momentum": OptimizerChoice(name="sgd", momentum=0.9),
    }[optimizer]
    moments = {"adamw": 2, "sgd": 0, "momentum": 1}[optimizer]
    program = program_of(build_model(SHAPE), layout)
    sizes = sizes_of(
        partial(build_model, SHAPE),
        layout,
        program,
        BATCH,
        precision_of(precision),
        optimizer=chosen,
    )
    held = held_bytes(
        layout, local_profile(precision).with_moments(moments).state
    )
    # Every unit of this shape divides by four.
    found = {
        name: sum(getattr(sizes, name)) / SHAPE.total
        for name in (
            "home",
            "optimizer",
            "gathered",
            "gradient",
            "gradient_shard",
        )
    }
    assert found["home"] + found["optimizer"] == held.weight + held.optimizer
    assert found["gathered"] == held.gathered
    assert found["gradient"] == held.gradient
    assert found["gradient_shard"] == held.gradient_shard


def test_moments_of_matrices_are_those_of_muon() -> None:
    """AdamW's two of a weight that is no matrix, and one momentum of each that is."""
    layout = Layout.parse("dp2")
    muon = OptimizerChoice(name="muon")
    options = StepOptions(whole_matrices=True)
    program = program_of(build_model(SHAPE), layout, options)
    make = partial(build_model, SHAPE)
    sizes = sizes_of(make, layout, program, BATCH, Precision(), optimizer=muon)
    block = SHAPE.rows[1]
    matrices = sum(
        a * b for weight in block.weights for a, b in weight.matrices
    )
    others = block.numel - matrices
    assert sizes.optimizer[1] == 4 * (matrices + 2 * others)


def test_live_counts_a_storage_once_and_forgets_what_is_gone() -> None:
    before = torch.ones(100)
    with Live() as live:
        a = torch.zeros(10)
        b = a.view(2, 5)
        before.add_(1)
        nothing = torch.zeros(1000, device="meta") + 1
        assert live.now == 40
        c = b + 1
        assert live.now == 80
        del a, b
        assert live.now == 40
        assert c.sum() == 10
        assert nothing.shape == (1000,)
