"""Floor 0: the grid, the choices, the model's sizes, the run file, and why a layout is illegal. No
torch."""

from .journal import read_journal
from .layout import Layout
from .legal import Violation, legal, nearest
from .mesh import Axis, LayoutError, Mesh
from .recipe import recipe
from .rules import Rules
from .run import (
    Checkpoints,
    Metrics,
    OptimizerChoice,
    Profiling,
    Run,
    RunError,
    Validation,
    run_schema,
)
from .shape import Shape
from .stages import piece_layout, program_pieces, stage_pieces

__all__ = [
    "Axis",
    "Checkpoints",
    "Layout",
    "LayoutError",
    "Mesh",
    "Metrics",
    "OptimizerChoice",
    "Profiling",
    "Rules",
    "Run",
    "RunError",
    "Shape",
    "Validation",
    "Violation",
    "legal",
    "nearest",
    "piece_layout",
    "read_journal",
    "recipe",
    "run_schema",
    "program_pieces",
    "stage_pieces",
]
