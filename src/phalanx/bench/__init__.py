"""Floor 5: what this machine can do, measured: collectives, products, overlap, memory, topology."""

from .clock import Clock, Timing
from .collectives import OPERATIONS, Ask, Sample, WrongResult, measure_collectives
from .doctor import Examination, examine, topology_of
from .fit import Growth, fit, fit_all, growths
from .found import DTYPES, Found, find
from .matmul import Product, decoder_products, judged, measure_products, square_products
from .mfu import Iteration, Mlp, measure_block, measure_mlp
from .overlap import Overlap, measure_copies, measure_messages
from .stores import measure_stores

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "Ask",
    "Clock",
    "Examination",
    "Found",
    "Growth",
    "Iteration",
    "Mlp",
    "Overlap",
    "Product",
    "Sample",
    "Timing",
    "WrongResult",
    "decoder_products",
    "examine",
    "find",
    "fit",
    "fit_all",
    "growths",
    "judged",
    "measure_block",
    "measure_collectives",
    "measure_copies",
    "measure_messages",
    "measure_mlp",
    "measure_products",
    "measure_stores",
    "square_products",
    "topology_of",
]
