"""Ways to split a model and its step, one file each; models of others, cut into pieces."""

from .batch import count_valid, microbatches, on_device, share, time_multiple
from .context import install_context
from .data import Entry, Precision, Unit
from .described import UntriedPieces, described_whole
from .fitness import fitting, refuse_unfit
from .groups import Groups, open_groups
from .load import load_model
from .mixing import refuse_mixing
from .model import Model, Original, build_model, start
from .pieces import Piece
from .pool import BufferPool
from .tensor import (
    VocabularyCrossEntropy,
    Weight,
    cut_weights,
    install_regions,
)

__all__ = [
    "Entry",
    "Model",
    "Original",
    "Piece",
    "BufferPool",
    "Precision",
    "Unit",
    "UntriedPieces",
    "VocabularyCrossEntropy",
    "Weight",
    "Groups",
    "build_model",
    "count_valid",
    "cut_weights",
    "described_whole",
    "fitting",
    "install_context",
    "install_regions",
    "load_model",
    "microbatches",
    "on_device",
    "open_groups",
    "refuse_mixing",
    "refuse_unfit",
    "share",
    "start",
    "time_multiple",
]
