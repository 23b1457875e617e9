"""A case: one way to train one model, whose step is priced; and the stages of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Layout, Shape
from ..layout.choices import traits


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


def ranks_of(
    stages: int, pp: int, schedule: str
) -> tuple[tuple[int, ...], ...]:
    """The virtual stages of each rank of a pipeline."""
    # A V-shaped rank holds a stage and its mirror image; others every pp-th
    # stage.
    if traits(schedule).v_shape:
        return tuple((r, stages - 1 - r) for r in range(pp))
    return tuple(tuple(range(r, stages, pp)) for r in range(pp))
