"""Floor 4: one file for every way to split a model and its step."""

from .batch import count_valid, microbatches, share, time_multiple
from .context import install_context, leaks
from .model import Model, build_model, load_model, start
from .shard import Entry, Pool, Precision, Unit
from .stage import Piece
from .tensor import VocabularyCrossEntropy, Weight, cut_weights, install_regions
from .wires import Wires, open_wires

__all__ = [
    "Entry",
    "Model",
    "Piece",
    "Pool",
    "Precision",
    "Unit",
    "VocabularyCrossEntropy",
    "Weight",
    "Wires",
    "build_model",
    "count_valid",
    "cut_weights",
    "install_context",
    "install_regions",
    "leaks",
    "load_model",
    "microbatches",
    "open_wires",
    "share",
    "start",
    "time_multiple",
]
