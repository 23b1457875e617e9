"""Train one transformer over many devices: plan, check, verify, measure and draw it.

    import phalanx

    phalanx.check("dp2 pp4 tp2 1f1b:8", "8b", device="h100")
    phalanx.plan("8b", "h100x64", sequence=8192, batch_tokens="4Mi")
    phalanx.draw("dp2 pp2 zero3 1f1b:4", "124m")
    phalanx.train(phalanx.join(), phalanx.Run.load("run.toml"))
    phalanx.prepare(model, optimizer, "dp2 zero3", loss=my_loss)

`join()` is this process's rank: of a process group that is there already (Ray, Accelerate, a notebook),
of what torchrun or Slurm has started, or alone. Importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .api.check import check as check
    from .api.load import load as load
    from .api.own_loop import prepare as prepare
    from .api.plan import plan as plan
    from .api.step import draw as draw
    from .api.step import simulate as simulate
    from .api.train import train as train
    from .api.trainers import check_file as check_file
    from .api.verify import verify as verify
    from .comm import join as join
    from .comm import launch as launch
    from .layout import Layout as Layout
    from .layout import Run as Run
    from .layout import Shape as Shape

__version__ = VERSION

_NAMES = {
    "api.check": "check",
    "api.load": "load",
    "api.own_loop": "prepare",
    "api.plan": "plan",
    "api.step": "draw simulate",
    "api.train": "train",
    "api.trainers": "check_file",
    "api.verify": "verify",
    "comm": "join launch",
    "layout": "Layout Run Shape",
}
_HOMES = {
    name: home for home, names in _NAMES.items() for name in names.split()
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
