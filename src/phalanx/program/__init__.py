"""A training step as a list of operations: built, proved, simulated, recorded."""

from .build import build
from .check import Proof, check, faults
from .load import (
    AttentionLoad,
    CostedPiece,
    Load,
    MessageLoad,
    PieceCost,
    PieceKinds,
    Product,
    at_rows,
    joined,
)
from .memory import Sizes
from .ops import KINDS, Kind
from .options import StepOptions, options_for, options_of
from .program import DoesNotFit, Op, Program, ProgramError
from .recorded import Recorded
from .schedules import SCHEDULES, refuse_own, schedule
from .search import search
from .simulate import Costs, repeat, simulate
from .timeline import Span, Timeline

__all__ = [
    "KINDS",
    "SCHEDULES",
    "AttentionLoad",
    "CostedPiece",
    "Costs",
    "DoesNotFit",
    "Kind",
    "Load",
    "MessageLoad",
    "Op",
    "Product",
    "Program",
    "ProgramError",
    "Proof",
    "Recorded",
    "Sizes",
    "Span",
    "StepOptions",
    "Timeline",
    "PieceCost",
    "PieceKinds",
    "at_rows",
    "joined",
    "options_for",
    "options_of",
    "build",
    "check",
    "faults",
    "refuse_own",
    "repeat",
    "schedule",
    "search",
    "simulate",
]
