"""The table of optimizers, and their keys in a run file."""

from __future__ import annotations

from dataclasses import dataclass

from .codec import key
from .muon import MUON, MuonKeys
from .optimizer_row import OptimizerRow
from .soap import SOAP, SoapKeys

_ADAMW = OptimizerRow("adamw", "AdamW", ("exp_avg", "exp_avg_sq"))
_SGD = OptimizerRow(
    "sgd", "SGD", ("momentum_buffer",), keys=("momentum",), counts=False
)
OPTIMIZERS = {row.name: row for row in (_ADAMW, _SGD, MUON, SOAP)}
ADAMW, SGD = _ADAMW.name, _SGD.name
# Those that `verify` compares.
COMPARED_OPTIMIZERS = (
    *OPTIMIZERS,
    *(name for row in OPTIMIZERS.values() for name in row.variants),
)
_NAMES = ", ".join(OPTIMIZERS)


@dataclass(frozen=True)
class SharedKeys:
    """Keys of a run file that several optimizers read."""

    name: str = key(
        ADAMW, f"the optimizer: {_NAMES}", choices=tuple(OPTIMIZERS)
    )
    lr: float = key(3e-4, "peak learning rate", above=0)
    schedule: str = key(
        "cosine",
        "learning-rate schedule: cosine, linear, wsd, constant",
        choices=("cosine", "linear", "wsd", "constant"),
    )
    warmup_steps: int = key(0, "linear warmup from 0 to lr")
    decay_steps: int = key(
        0, "decay phase of wsd, at the end; 0: a tenth of steps"
    )
    min_lr: float | None = key(
        None, "learning rate after the decay; unset: lr / 10"
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "decay rates of the two moments; all but sgd have them",
        maximum=0.999999,
    )
    eps: float = key(
        1e-8, "term added to the denominator; all but sgd have it", above=0
    )
    momentum: float | None = key(
        None, "SGD and Muon: momentum; unset: 0 and 0.95", maximum=0.999999
    )
    weight_decay: float = key(
        0.1, "weight decay, decoupled unless sgd; none on norms and biases"
    )
    clip: float = key(1.0, "max gradient norm; 0 disables")


# The fields of the last class come first.
@dataclass(frozen=True)
class OptimizerChoice(SoapKeys, MuonKeys, SharedKeys):
    """The optimizer and the learning-rate schedule."""

    @property
    def row(self) -> OptimizerRow:
        """The row of the optimizer that is named."""
        return OPTIMIZERS[self.name]

    def moments(self, *, matrix: bool = False) -> tuple[str, ...]:
        """The tensors kept for each weight, or for a matrix that is updated whole."""
        if self.name == SGD and not self.momentum:
            return ()
        return self.row.kept(matrix=matrix)

    @property
    def fewest_moments(self) -> int:
        """The smallest number of tensors kept for a weight."""
        return min(len(self.moments()), len(self.moments(matrix=True)))


USUAL_OPTIMIZER = OptimizerChoice()
