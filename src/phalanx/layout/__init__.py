"""Floor 0: the grid, the choices, the model's sizes, and why a layout is illegal. No torch."""

from .layout import Layout
from .legal import Violation, legal, nearest
from .mesh import Axis, LayoutError, Mesh
from .rules import Rules
from .shape import Shape
from .stages import stage_pieces

__all__ = [
    "Axis",
    "Layout",
    "LayoutError",
    "Mesh",
    "Rules",
    "Shape",
    "Violation",
    "legal",
    "nearest",
    "stage_pieces",
]
