"""Comparison of a layout with one process, tensor by tensor."""

from ..layout.cases import SHAPES, covering, every_layout
from .cases import batch_of
from .compare import Difference, compare
from .placement import placement_faults
from .reference import Trace, TracedStep, reference
from .verify import Verdict, verify

__all__ = [
    "SHAPES",
    "Difference",
    "TracedStep",
    "Trace",
    "Verdict",
    "batch_of",
    "compare",
    "covering",
    "every_layout",
    "placement_faults",
    "reference",
    "verify",
]
