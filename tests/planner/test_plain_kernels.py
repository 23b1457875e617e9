"""Bytes of software without fused kernels, against plain torch and transformers.

Every operation reads its tensors and writes its result; views move nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import piece_kinds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from phalanx.layout import Layout, Shape
from phalanx.planner import corrections
from phalanx.planner.corrections import (
    PieceWork,
    Software,
    Tokens,
    moves_norm_copies,
)
from phalanx.planner.profile import EAGER, STORED, profile, profile_named

BF16 = torch.bfloat16
VIEWS = ("view", "expand", "detach", "aten.t.", "transpose", "unsqueeze")


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(name in str(func) for name in VIEWS):
            for x in tree_leaves((args, kwargs, out)):
                if isinstance(x, Tensor):
                    # An expanded dim is read from the cache.
                    held = [
                        n
                        for n, stride in zip(x.shape, x.stride(), strict=True)
                        if stride
                    ]
                    self.total += x.element_size() * torch.Size(held).numel()
        return out


def moved(run: Any) -> tuple[float, float]:
    """Bytes of a forward and of its backward."""
    with Moved() as forward:
        out = run()
    gradient = torch.ones_like(out)
    with Moved() as backward:
        out.backward(gradient)
    return float(forward.total), float(backward.total)


def test_an_rms_norm_of_plain_operations_moves_what_transformers_does() -> (
    None
):
    rows, size = 256, 512
    norm = LlamaRMSNorm(size).to(BF16)
    x = torch.randn(rows, size, dtype=BF16, requires_grad=True)
    forward, backward = moved(lambda: norm(x))
    # What a kernel moves: x and the result; x, the gradient and the result, and x and
    # the gradient once more for the weight.
    values = rows * size
    assert (
        pytest.approx(forward / values - 4, rel=0.03)
        == corrections._NORM_FORWARD
    )
    assert (
        pytest.approx(backward / values - 10, rel=0.05)
        == corrections._NORM_BACKWARD
    )


def test_eager_attention_moves_and_keeps_what_torch_does() -> None:
    size = 256
    scores = torch.randn(2, 2, size, size, dtype=BF16, requires_grad=True)
    future = torch.ones(size, size, dtype=torch.bool).triu(1)
    kept: list[Tensor] = []

    def softmax() -> Tensor:
        masked = scores.float().masked_fill(future, -1e4)
        shares = torch.softmax(masked, -1).to(BF16)
        return torch.native_dropout(shares, 0.1, True)[0]

    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or x, lambda x: x
    ):
        forward, backward = moved(softmax)
    stored = STORED[EAGER]
    # The mask is one for all heads.
    assert stored.forward == pytest.approx(forward / scores.numel(), rel=0.03)
    assert stored.backward == pytest.approx(
        backward / scores.numel(), rel=0.03
    )
    own = {x.data_ptr(): x.nbytes for x in kept if x.shape == scores.shape}
    # The product with v keeps the values after dropout, in 2 bytes.
    assert stored.kept == sum(own.values()) / scores.numel() + 2


def test_software_without_a_norm_kernel_moves_two_norms_more_for_each_block() -> (
    None
):
    shape, cut = Shape.load("8b"), Layout.parse("tp2 bf16")
    of = Tokens(shape, 100.0, cut)
    cost = piece_kinds(Shape.load("tiny"), Layout(), 128).blocks[0](1.0)
    work = PieceWork(cost)

    def more(name: str) -> float:
        found = moves_norm_copies(work, Software(profile(name), cut), of)
        return found.cost.forward.moved - cost.forward.moved

    # Both ranks of tp hold every token's features, without seq.
    assert more("default") == 2 * 32 * shape.hidden * 100
    assert more("nemo") == more("phalanx") == 0


def test_an_attention_kernel_behind_a_slash_is_read() -> None:
    read = {
        "Own / torch": "eager", "Own / eager": "eager", "Own / fused": "scores",
        "Own / fused softmax": "scores", "Own / flash_attention2": "flash-2",
        # No kernel is named here.
        "FSDP2 + torch.compile": "flash-2", "PyTorch": "flash-2",
    }  # fmt: skip
    assert {each: profile_named(each).attention for each in read} == read
