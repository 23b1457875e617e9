"""The norm that keeps little, against its formula and against torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.models import RMSNorm
from phalanx.models.norm import LayerNorm


def _kept(norm: torch.nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages that autograd keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = (
            tensor.untyped_storage().nbytes()
        )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    return sum(kept.values())


def test_gradients_of_the_norm_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(5, 1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(
        call, (x, norm.weight.detach().requires_grad_())
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16]
)
def test_the_norm_is_torchs_own_to_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 32, dtype=dtype, requires_grad=True)
    norm = RMSNorm(32, 1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    ours, torchs = norm(x), F.rms_norm(x, (32,), norm.weight, 1e-6)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, torchs)
    gradient = torch.randn_like(x)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, norm.weight), gradient),
        torch.autograd.grad(torchs, (x, norm.weight), gradient),
        strict=True,
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs)


def test_bf16_is_normalised_in_float32() -> None:
    """The mean square of 4,096 equal numbers: a bf16 sum would stop growing long before the end."""
    x = torch.full((1, 1, 4096), 3.0, dtype=torch.bfloat16)
    assert torch.equal(RMSNorm(4096, 0.0).bfloat16()(x), torch.ones_like(x))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_norm_keeps_x_its_weight_and_one_number_a_row(device: str) -> None:
    rows, width = 64, 256
    with torch.device(device):
        x = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
        norm = RMSNorm(width, 1e-5).bfloat16()
    if (
        device == "meta"
    ):  # all meta storages share one address: count tensors instead
        assert len(norm(x).grad_fn.saved_tensors) == 3
    else:
        assert _kept(norm, x) == 2 * rows * width + 2 * width + 4 * rows


def test_gradients_of_a_layer_norm_are_rounded_once_and_not_for_each_token() -> (
    None
):
    """torch's own on a CPU is off by 5 % for as many tokens in bfloat16."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x, gradient = (torch.randn(2048, 33).to(dtype) for _ in range(2))
    norm, exact = LayerNorm(33).to(dtype), torch.nn.LayerNorm(33).double()
    given = x.clone().requires_grad_(), x.double().requires_grad_()
    for module, each in zip((norm, exact), given, strict=True):
        module(each).backward(gradient.to(each.dtype))
    pairs = [
        (each.grad, other.grad)
        for each, other in zip(
            norm.parameters(), exact.parameters(), strict=True
        )
    ]
    for got, want in [*pairs, (given[0].grad, given[1].grad)]:
        assert got.dtype == dtype
        assert (
            float((got - want).norm() / want.norm())
            < torch.finfo(dtype).eps / 2
        )
