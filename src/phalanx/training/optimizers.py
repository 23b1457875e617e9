"""The table of optimizers: the class that implements each row."""

from __future__ import annotations

from collections.abc import Callable

from ..layout.muon import MUON
from ..layout.optimizers import ADAMW, SGD, OptimizerChoice
from ..layout.run import Run
from ..layout.soap import SOAP
from .muon import Muon
from .optimizer import AdamW, Optimizer, Sgd
from .soap import Soap

# By its name in a run file.
_OF_RUN: dict[str, Callable[[OptimizerChoice], Optimizer]] = {
    ADAMW: AdamW.of_run,
    SGD: Sgd.of_run,
    MUON.name: Muon.of_run,
    SOAP.name: Soap.of_run,
}


def optimizer_of(run: Run) -> Optimizer:
    """Return the optimizer that a run names."""
    return _OF_RUN[run.optimizer.name](run.optimizer)
