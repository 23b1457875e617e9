"""Seeded faults in layouts of `exact`: those that `verify --exact` finds in bfloat16.

A fault is in the engine, so it also changes the one process with which bits are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.layout import Layout
from phalanx.layout.choices import BF16
from phalanx.layout.exact import NOT_MATRICES, exact_batch
from phalanx.layout.legal import legal
from phalanx.verify import SHAPES
from phalanx.verify.exact import verify_exact

from .fault import Fault


@dataclass(frozen=True)
class ExactCatch:
    """A fault, its layout of `exact`, and what `verify --exact` says of it.

    `refused` is the reason if the layout cannot be exact.
    """

    fault: str
    layout: str
    refused: str
    first_difference: str

    @property
    def result(self) -> str:
        if self.refused:
            return f"not covered: {self.refused}"
        return self.first_difference or "NOT FOUND"


def exact_layout(fault: Fault) -> Layout:
    """The layout of a fault with the word `exact`.

    Three microbatches of a rank that shares the batch with others are no subtree; it
    gets four.
    """
    layout = fault.layout
    count = layout.microbatches
    if layout.data > 1 and count == 3:
        count = 4
    return replace(
        layout, precision=BF16, microbatches=count, reduce="", exact=True
    )


def refusal(fault: Fault, layout: Layout) -> str:
    """The reason why a fault's layout cannot be exact, or ""."""
    if fault.optimizer == "muon":
        return NOT_MATRICES
    if set(fault.dtypes) == {"float16"}:
        return "float16"
    if fault.z_loss:
        return "z-loss, which verify --exact does not take"
    reasons = legal(layout, SHAPES[fault.shape], batch=exact_batch(layout))
    return reasons[0] if reasons else ""


def catch_exactly(fault: Fault) -> ExactCatch:
    """Compare the bits of a fault's layout with the fault in place."""
    layout = exact_layout(fault)
    if reason := refusal(fault, layout):
        return ExactCatch(fault.name, str(layout), reason, "")
    with fault.patch():
        (verdict,) = verify_exact(
            SHAPES[fault.shape],
            [layout],
            precisions=[BF16],
            packed=fault.packed,
            dropout=fault.dropout,
            optimizer=fault.optimizer,
        )
    return ExactCatch(fault.name, verdict.layout, "", verdict.first_difference)


def table(caught: Sequence[ExactCatch]) -> str:
    """A row for each fault whose layout can be exact, and the number of the others."""
    rows = [
        f"| {c.fault} | {c.layout} | {c.result} |"
        for c in caught
        if not c.refused
    ]
    found = sum(bool(c.first_difference) for c in caught)
    refused = sum(bool(c.refused) for c in caught)
    return "\n".join(
        (
            "| fault | layout | verify --exact says |",
            "|---|---|---|",
            *rows,
            "",
            f"verify --exact finds {found} of {len(rows)} in bfloat16; the layouts of"
            f" {refused} others cannot be exact.",
        )
    )
