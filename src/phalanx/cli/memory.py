"""Whether a layout fits in the memory of its devices: what the program that a plan builds holds at
its peak. Costing pieces loads torch where their costs are not cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ..cost import cached_costs
from ..layout import Layout, Shape
from ..layout.choices import BF16, FP32
from ..layout.numbers import bytes_text
from ..plan.hardware import Hardware
from ..plan.local import profile_for
from ..plan.step import Pricer, Request


def request_for(
    shape: Shape,
    hardware: Hardware,
    *,
    batch: int = 0,
    sequence: int = 0,
    precision: str = "",
    model: str = "",
) -> Request:
    """What is planned with our own software; in bf16 on a GPU unless it is said otherwise."""
    precision = precision or (FP32 if hardware.cores else BF16)
    sequence = sequence or shape.sequence
    if shape.positions != "learned":
        shape = replace(shape, sequence=sequence)
    return Request(
        shape, hardware, profile_for(hardware, None, precision),
        partial(cached_costs, target=hardware.target), sequence, batch or shape.batch, precision,
        model=model,
    )  # fmt: skip


def held(request: Request, layout: Layout) -> Mapping[str, float]:
    """Bytes by kind of the rank of a layout that holds most, as `plan --explain` says them."""
    return Pricer(replace(request, precision=layout.precision)).choose(layout).memory


def held_text(kinds: Mapping[str, float]) -> str:
    """`50.7 GB on the fullest rank: weights 2.27 GB, gradients 4.54 GB, ...`."""
    parts = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds.items() if size)
    return f"{bytes_text(sum(kinds.values()))} on the fullest rank: {parts}"
