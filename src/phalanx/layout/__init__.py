"""A layout, a model's sizes, the run file, and every reason why a layout is illegal."""

from .kinds import ByKind, one_block_of_each
from .layout import Layout
from .legal import legal, nearest
from .mesh import Axis, LayoutError, Mesh
from .pieces import (
    PieceRow,
    StagedPieces,
    plain_pieces,
    stage_pieces,
    staged_pieces,
)
from .recipe import recipe
from .rules import Rules
from .run import Run, RunError
from .shape import Shape
from .stages import piece_layout
from .violation import Violation

__all__ = [
    "Axis",
    "ByKind",
    "Layout",
    "LayoutError",
    "Mesh",
    "PieceRow",
    "Rules",
    "Run",
    "RunError",
    "Shape",
    "StagedPieces",
    "Violation",
    "legal",
    "nearest",
    "one_block_of_each",
    "piece_layout",
    "recipe",
    "plain_pieces",
    "stage_pieces",
    "staged_pieces",
]
