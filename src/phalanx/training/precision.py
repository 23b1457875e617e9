"""The precision of a step, and the loss scale that float16 needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cost.pieces import COMPUTE
from ..layout import Layout, LayoutError
from ..layout.choices import BF16, FP16, FP32, TF32
from ..models.kernels import kernel_names
from ..parallel import Precision
from ..parallel.low_precision import matmul_named, refuse_without_kernels


def precision_of(name: str) -> Precision:
    """Return the precision that a layout names.

    With a compute dtype below float32, weights are stored, and gradients accumulated
    and sent, in float32.
    """
    compute = COMPUTE[name]
    if torch.cuda.is_available():
        # Set explicitly in both cases: the setting is process-wide, and tf32 must never
        # be left on by accident.
        torch.set_float32_matmul_precision(
            "high" if name == TF32 else "highest"
        )
    # float32, or float64 where that is computed in.
    wide = torch.promote_types(compute, torch.float32)
    return Precision(compute, wide, wide)


def refuse_bfloat16(precision: Precision, device: torch.device) -> None:
    """Raise a LayoutError if a GPU can compute bfloat16 only by emulation, or not at
    all."""
    if (
        precision.compute != torch.bfloat16
        or device.type != "cuda"
        or torch.version.hip
    ):
        # ROCm's capability numbers mean other things.
        return
    has = torch.cuda.get_device_capability(device)
    if has < (8, 0):
        raise LayoutError(
            f"{BF16} needs a GPU of compute capability 8.0, and {torch.cuda.get_device_name(device)} has"
            f" {has[0]}.{has[1]}. Write {FP16} or {FP32} in place of {BF16}."
        )


def precision_on(device: torch.device, layout: Layout) -> Precision:
    """Return the precision of a layout; raise if the device cannot compute in it."""
    refuse_without_kernels(layout.matmul, device)
    matmul = matmul_named(layout.matmul)
    precision = replace(precision_of(layout.precision), matmul=matmul)
    refuse_bfloat16(precision, device)
    return precision


def device_notices(
    layout: Layout, device: torch.device, head_size: int = 128
) -> list[str]:
    """Return notices about the device: its attention kernels, and formats that are slow
    on it."""
    if device.type != "cuda":
        return []
    dtype = COMPUTE[layout.precision]
    names = kernel_names(device, dtype, head_size)
    each = ", ".join(f"{name} ({what})" for what, name in names.items())
    notices = [f"attention takes {each}"]
    if layout.matmul and not layout.compile:
        notices.append(
            f"{layout.matmul} without compile is slower than {BF16}: each rounding takes several kernels."
            " Add compile to the layout"
        )
    has = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and has < (8, 0):
        name = torch.cuda.get_device_name(device)
        notices.append(
            f"{name} has no flash attention (compute capability {has[0]}.{has[1]}): attention uses"
            " torch's memory-efficient kernels, which keep no scores either"
        )
    return notices


@dataclass
class LossScale:
    """The factor by which a float16 loss is multiplied, so that small gradients do not
    underflow.

    An overflow halves the factor and skips the step on all ranks, as they agree on the
    norm; `patience` steps without overflow double it.
    """

    scale: float = 2.0**16
    patience: int = 2000
    steady: int = 0

    def saw(self, *, finite: bool) -> None:
        self.steady = self.steady + 1 if finite else 0
        if not finite:
            # An overflow: half the scale, and the step was skipped.
            self.scale = max(1.0, self.scale / 2)
        elif self.steady >= self.patience:
            self.scale, self.steady = min(2.0**24, self.scale * 2), 0
