"""Weight gradients of experts are sums in float32, as those of other weights are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout
from phalanx.parallel import Precision, build_model, data, microbatches
from phalanx.parallel.local import LocalModel, build_local
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

SHAPE = SHAPES["experts"]
WIDE = torch.float32
BF16 = Precision(torch.bfloat16, WIDE, WIDE)


class Kernels:
    """Matmuls of a GPU, which add products of 16 bits to sums in 32."""

    class mm:
        @staticmethod
        def dtype_out(a: Tensor, b: Tensor, _: Any, *, out: Tensor) -> None:
            torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)

    class addmm:
        @staticmethod
        def dtype_out(
            total: Tensor, a: Tensor, b: Tensor, _: Any, *, out: Tensor
        ) -> None:
            assert total.data_ptr() == out.data_ptr()
            out += a.to(out.dtype) @ b.to(out.dtype)


def one_backward(precision: Precision) -> LocalModel:
    """A model whose gradients are those of one microbatch, not reduced yet."""
    layout, model = Layout.parse("accum:2"), build_model(SHAPE)
    local = build_local(
        AloneWorld(),
        layout,
        model,
        program_of(model, layout),
        precision=precision,
        seed=0,
    )
    rows = batch_of(SHAPE, 0, dtype=precision.compute)
    batch = local.complete(microbatches(rows, layout, 0)[0])
    pieces, bundle = list(local.pieces.values()), dict[str, Tensor]()
    for piece in pieces:
        bundle = piece.forward(0, bundle, batch, keep=True)
    gradients = pieces[-1].seed(0, torch.ones(1))
    for piece in reversed(pieces):
        gradients = piece.backward(0, gradients)
    return local


def routed(local: LocalModel) -> dict[str, Tensor]:
    """The gradients of the experts' weights, by name."""
    return {
        name: parameter.grad
        for unit in local.units.values()
        for name, parameter in unit.parameters.items()
        if ".routed." in name and parameter.grad is not None
    }


def test_no_product_of_an_expert_is_rounded_before_it_is_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The CPU's own matmuls of these factors, each rounded to 16 bits.
    rounded = routed(one_backward(BF16))
    monkeypatch.setattr(data, "_aten", Kernels)
    monkeypatch.setattr(data, "_sums_wide", lambda a: a.dtype in data.HALVES)
    found = routed(one_backward(BF16))
    assert found.keys() == rounded.keys()
    for name, gradient in found.items():
        assert gradient.dtype == WIDE
        more = gradient != gradient.bfloat16()
        assert more.sum() > 0.9 * (gradient != 0).sum(), name
        torch.testing.assert_close(
            gradient, rounded[name], rtol=0.01, atol=1e-6
        )


class Stacks(TorchDispatchMode):
    """Notes the shapes of the tensors that are made of several others."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = set[torch.Size]()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if operation in (aten.stack.default, aten.cat.default):
            self.shapes.add(out.shape)
        return out


def test_gradients_of_all_experts_are_never_stacked() -> None:
    with Stacks() as stacks:
        local = one_backward(Precision())
    assert stacks.shapes
    assert not {x.shape for x in routed(local).values()} & stacks.shapes
