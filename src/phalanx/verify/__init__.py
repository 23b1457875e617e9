"""Floor 7: comparisons of layouts with one process, gradient by gradient."""

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
