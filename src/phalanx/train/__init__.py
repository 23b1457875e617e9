"""Floor 6: a rank at work.

`train(join(), Run.load("run.toml"))` is a whole run on one rank: `from phalanx import Run, join, train`.
`launch(train, 4, Run.load("run.toml"), "dp2 pp2 1f1b:4")` starts ranks too; `phalanx.comm` has it.

What needs torch is imported when it is asked for: a corpus is opened without it. So no file here may
have the name of something below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .data import Batches, Corpus, DataError, open_corpus, prepare

if TYPE_CHECKING:
    from .checkpoint import Saved, Saver
    from .checkpoint_exchange import export_weights, import_weights
    from .checkpoint_format import (
        CheckpointError,
        Manifest,
        Progress,
        read_manifest,
        verify_checkpoint,
    )
    from .checkpoint_load import Loaded, hash_tensors, load
    from .executor import Executor, StepResult
    from .loop import Outcome, TrainError, train
    from .optimizer import AdamW, Optimizer, Sgd

__all__ = [
    "AdamW",
    "Batches",
    "CheckpointError",
    "Corpus",
    "DataError",
    "Loaded",
    "Manifest",
    "Optimizer",
    "Outcome",
    "Executor",
    "Progress",
    "Saved",
    "Saver",
    "Sgd",
    "StepResult",
    "TrainError",
    "export_weights",
    "hash_tensors",
    "import_weights",
    "load",
    "open_corpus",
    "prepare",
    "read_manifest",
    "train",
    "verify_checkpoint",
]

_WITH_TORCH = {
    "checkpoint": "Saved Saver",
    "checkpoint_exchange": "export_weights import_weights",
    "checkpoint_format": "CheckpointError Manifest Progress read_manifest verify_checkpoint",
    "checkpoint_load": "Loaded hash_tensors load",
    "executor": "Executor StepResult",
    "loop": "Outcome TrainError train",
    "optimizer": "AdamW Optimizer Sgd",
}
_FILES = {name: file for file, names in _WITH_TORCH.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
