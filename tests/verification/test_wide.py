"""The table of what has 16 bits: it names functions that exist, and layouts of all kinds keep to it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.layout import Layout
from phalanx.parallel import build_model
from phalanx.parallel.data import Precision
from phalanx.training.soap import Soap
from phalanx.verification import SHAPES, verify
from phalanx.verification.wide import MOVES, NARROW, looked_at
from sampled import one_in
from seeded import setting_of, trained

CPU = torch.device("cpu")


def test_every_function_of_the_table_exists_and_every_operation_is_torchs() -> (
    None
):
    for place, operations in NARROW.items():
        file, _, function = place.partition(":")
        owner: Any = importlib.import_module(
            "phalanx." + file.removesuffix(".py").replace("/", ".")
        )
        for name in function.split("."):
            owner = getattr(owner, name)
        assert callable(owner), place
        for operation in operations.split():
            assert hasattr(torch.ops.aten, operation), (place, operation)
            assert operation not in MOVES
    assert all(hasattr(torch.ops.aten, operation) for operation in MOVES)


LAYOUTS = "dp2 zero3; tp2 seq accum:2; cp2; cp2:ulysses tp2; tp2 recompute:selective; pp2 zb-h1:3"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt", "gemma", "olmo", "sinks", "latent"])
def test_layouts_of_every_kind_of_block_compute_in_16_bits_what_the_table_says(
    name: str, dtype: str
) -> None:
    shape = SHAPES[name]
    setting = setting_of(shape, dtype, steps=1, packed=name == "sinks")
    layouts = Layout.parse_many(LAYOUTS)
    # A shape meets some layouts, so that over the shapes all occur.
    turn = ["gpt", "gemma", "olmo", "sinks", "latent"].index(name) + (
        dtype == "float16"
    )
    for layout in (layouts * 2)[turn : turn + 2]:
        assert (
            trained(replace(layout, precision="fp32"), shape, setting).breaches
            == ()
        )


@pytest.mark.parametrize("dtype", one_in(2, ["bfloat16", "float16"]))
def test_layouts_of_delta_layers_compute_in_16_bits_what_the_table_says(
    dtype: str,
) -> None:
    layouts = Layout.parse_many("tp2 cp2 seq; dp2 zero3; pp2 ep2 1f1b:3")
    verdicts = verify(SHAPES["delta"], layouts, dtype=dtype, steps=1)
    assert [v.first_difference for v in verdicts] == ["", "", ""]


def test_updates_after_the_first_step_of_soap_are_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Soap.update

    def rounded(self: Soap, state: dict[str, Tensor], g: Tensor) -> Tensor:
        update = plain(self, state, g)
        # The first step only makes the bases.
        if state["step"] == 1:
            return update
        return (update.bfloat16() + 0).to(update.dtype)

    monkeypatch.setattr(Soap, "update", rounded)
    shape, layouts = replace(SHAPES["gqa"], layers=1), [Layout.parse("dp2")]
    (verdict,) = verify(
        shape, layouts, dtype="bfloat16", optimizer="soap", steps=2
    )
    assert "replace_by_updates computes" in verdict.first_difference


def test_operations_are_looked_at_in_16_bits_and_of_built_in_models_alone() -> (
    None
):
    model = build_model(SHAPES["gqa"])
    half = Precision(compute=torch.bfloat16)
    own = replace(model, draw=lambda name, weight, generator: None)
    assert looked_at(model, half, CPU) is not None
    assert looked_at(model, Precision(), CPU) is None
    assert looked_at(own, half, CPU) is None
    assert looked_at(model, half, torch.device("cuda")) is None


def test_one_operation_in_16_bits_is_named_with_its_function() -> None:
    from phalanx.models.rope import rotate

    model = build_model(SHAPES["gqa"])
    watch = looked_at(model, Precision(compute=torch.bfloat16), CPU)
    assert watch is not None
    x, cos = torch.ones(1, 1, 1, 2).bfloat16(), torch.ones(1, 1, 1, 1)
    with watch:
        rotate(x, cos, cos)  # in float32, rounded once
        assert watch.found == ""
        rotate(x, cos.bfloat16(), cos.bfloat16())
    assert watch.found.startswith(
        "models/rope.py: rotate computes mul in 16 bits"
    )
