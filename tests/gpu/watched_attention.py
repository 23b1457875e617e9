"""Attention on a GPU beside the same on the CPU, as JSON: by case the kernels that are asked for, and how far
results and gradients are apart."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.models import kernels
from phalanx.models.kernels import all_gradients, attend_own

ROWS, LENGTH, SIZE = 2, 24, 16
# Flex attention takes no fewer rows, where it is switched on.
LONG = torch.arange(1100).expand(ROWS, 1100) // 400
WHOLE = torch.tensor([3, 7]).unsqueeze(1).expand(ROWS, LENGTH)
CUT = torch.arange(LENGTH).expand(ROWS, LENGTH) // 9


class Asked(TorchDispatchMode):
    """The kernels that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if "attention" in name:
            self.names.add(name.removeprefix("_scaled_dot_product"))
        return func(*args, **(kwargs or {}))


def outputs(
    qkv: list[Tensor],
    documents: Tensor,
    sinks: Tensor,
    window: int,
    softcap: float,
) -> list[Tensor]:
    out, lse = attend_own(*qkv, documents, sinks, window, softcap)
    gradient = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    given = documents, sinks, out, lse, window, softcap
    found = [out, lse, *all_gradients(gradient, *qkv, *given)]
    # Compiled graphs are made for these strides.
    assert all(x.is_contiguous() for x in found)
    return found


def compared(
    dtype: torch.dtype, documents: Tensor, window: int, softcap: float
) -> tuple[list[str], float]:
    torch.manual_seed(0)
    qkv = [
        torch.randn(*documents.shape, heads, SIZE).to(dtype)
        for heads in (4, 2, 2)
    ]
    sinks = torch.randn(4)
    terms = window, softcap
    with Asked() as asked:
        there = outputs(
            [x.cuda() for x in qkv], documents, sinks.cuda(), *terms
        )
    here = outputs(
        [x.double() for x in qkv], documents, sinks.double(), *terms
    )
    apart = [
        float((a.cpu().double() - b).abs().max() / b.abs().max())
        for a, b in zip(there, here, strict=True)
    ]
    return sorted(asked.names), max(apart)


if __name__ == "__main__":
    bf16, fp32 = torch.bfloat16, torch.float32
    found = {
        "whole": compared(bf16, WHOLE, 0, 0.0),
        "cut": compared(bf16, CUT, 0, 0.0),
        "window": compared(bf16, WHOLE, 5, 0.0),
        "capped": compared(bf16, WHOLE, 0, 2.0),
        "long, capped": compared(bf16, LONG, 300, 2.0),
        "32 bits": compared(fp32, WHOLE, 0, 0.0),
    }
    names = kernels.kernel_names(torch.device("cuda", 0), bf16, 64)
    print(json.dumps({"cases": found, "names": names}))
