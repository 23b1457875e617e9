"""A case: one way to train one model, whose step is priced."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout, Shape


@dataclass(frozen=True)
class Case:
    """One way to train: shape, layout, rows of a microbatch, tokens of a sequence."""

    shape: Shape
    layout: Layout
    rows: float
    sequence: int
    dtype: str = ""  # dtype of matmuls; "": the layout's

    @property
    def tokens(self) -> float:
        """The tokens of a step over all ranks."""
        layout = self.layout
        return self.rows * layout.microbatches * layout.data * self.sequence
