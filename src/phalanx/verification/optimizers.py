"""The table of optimizers that `verify` compares: their settings, and what one process does."""

from __future__ import annotations

from typing import Any

from ..layout.muon import MUON
from ..layout.optimizers import ADAMW, SGD
from ..layout.soap import SOAP
from ..parallel import Model
from ..training.muon import Muon
from ..training.optimizer import AdamW, Optimizer, Sgd
from ..training.soap import Soap
from .muon import PlainMuon
from .plain_optimizers import Weights, plain_adamw, plain_sgd
from .soap import PlainSoap

# Different from the defaults, so that an ignored option is noticed.
_ADAMW = AdamW(beta1=0.8, beta2=0.9, eps=1e-3, decay=0.2)
_MUON = Muon(0.8, rate=0.5, decay=0.2, others=_ADAMW)
_ORIGINAL = Muon(
    0.8, nesterov=False, scale="original", rate=0.5, decay=0.2, others=_ADAMW
)
OPTIMIZERS: dict[str, Optimizer] = {
    ADAMW: _ADAMW,
    SGD: Sgd(momentum=0.9, decay=0.1),
    MUON.name: _MUON,
    MUON.variants[0]: _ORIGINAL,
    # Bases are refreshed in most of the few steps that are compared.
    SOAP.name: Soap(refresh_every=1, others=_ADAMW),
}
_PLAIN: dict[type, Any] = {
    AdamW: plain_adamw,
    Sgd: plain_sgd,
    Muon: PlainMuon,
    Soap: PlainSoap,
}


def plain_optimizer(
    optimizer: Optimizer, weights: Weights, lr: float, model: Model
) -> Any:
    """Return the optimizer of one process that does what ours should do."""
    return _PLAIN[type(optimizer)](optimizer, weights, lr, model)
