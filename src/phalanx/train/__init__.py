"""Floor 6: a rank at work.

`launch(train, ranks, Run.load("run.toml"), "dp2 pp2 1f1b:4", wire="gloo")` is a whole run: `launch`
and `join` are of `phalanx.comm`, `Run` of `phalanx.layout`.
"""

from .checkpoint import Loaded, Saved, Saver, load, save, steps
from .checkpoint_exchange import export_weights, import_weights
from .checkpoint_file import CheckpointError
from .checkpoint_manifest import Manifest, Progress
from .checkpoint_read import hash_tensors, read_manifest, verify_checkpoint
from .data import Batches, Corpus, DataError, open_corpus, prepare
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
    "save",
    "steps",
    "train",
    "verify_checkpoint",
]
