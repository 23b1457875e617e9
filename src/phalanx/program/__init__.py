"""Floor 1: the training step as a value, with everything that reads it. No torch."""

from .build import build
from .check import Proof, check, faults
from .memory import Peak, Sizes
from .op import KINDS, Op, Program, ProgramError
from .recorded import Recorded
from .schedules import SCHEDULES, schedule
from .search import bound, search
from .simulate import Costs, repeat, simulate
from .timeline import Span, Timeline

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Costs",
    "Op",
    "Peak",
    "Program",
    "ProgramError",
    "Proof",
    "Recorded",
    "Sizes",
    "Span",
    "Timeline",
    "bound",
    "build",
    "check",
    "faults",
    "repeat",
    "schedule",
    "search",
    "simulate",
]
