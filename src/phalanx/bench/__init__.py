"""Measurements of this machine: collectives, matrix products, overlap and memory."""

from .clock import Clock, Timing
from .collectives import OPERATIONS, Sample, Sweep, measure_collectives
from .device import LocalDevice, local_device
from .fit import Growth, fit, fit_all, growths
from .machine import Thoroughness, WrongResult, measure_machine, topology_of
from .matmul import (
    MatrixProduct,
    decoder_products,
    measure_products,
    square_products,
)
from .mfu import Iteration, WideMlp, measure_block, measure_mlp
from .overlap import Overlap, measure_copies, measure_messages
from .stores import measure_stores

__all__ = [
    "OPERATIONS", "Clock", "Growth", "Iteration", "LocalDevice", "MatrixProduct", "Overlap", "Sample",
    "Sweep", "Thoroughness", "Timing", "WideMlp", "WrongResult", "decoder_products", "fit", "fit_all",
    "growths", "local_device", "measure_block", "measure_collectives", "measure_copies",
    "measure_machine", "measure_messages", "measure_mlp", "measure_products", "measure_stores",
    "square_products", "topology_of",
]  # fmt: skip
