"""A case: one way to train one model, of which a step is priced."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout, Shape


@dataclass(frozen=True)
class Case:
    """One way to train: a shape, a layout, rows of a microbatch, tokens of a sequence."""

    shape: Shape
    layout: Layout
    rows: float
    sequence: int
    dtype: str = ""  # of products; "": the layout's

    @property
    def tokens(self) -> float:
        """Tokens of a step over all ranks."""
        layout = self.layout
        return self.rows * layout.microbatches * layout.data * self.sequence
