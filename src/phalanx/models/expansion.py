"""Matmuls from a narrow input to a wide output: they cost little for each byte they make.

`recompute:selective` keeps the input of such a matmul, and computes the output again.
The up-projections of latent attention are marked so, as DeepSeek-V3 (2024, section
3.2.3) recomputes them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

_local = threading.local()  # a rank may be a thread


def expand(linear: Any, x: Tensor) -> Tensor:
    """Apply a linear layer whose output is not worth its memory."""
    # torch's compiler decides by itself what it computes again.
    if torch.compiler.is_compiling():
        wide: Tensor = linear(x)
        return wide
    _local.active = True
    try:
        wide = linear(x)
    finally:
        _local.active = False
    return wide


def is_expanding() -> bool:
    """True inside of `expand`."""
    return getattr(_local, "active", False)
