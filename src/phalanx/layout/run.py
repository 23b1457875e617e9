"""The run file: what is trained, on what, how and for how long, as one frozen value.

It reads from TOML and `key=value` arguments, prints back, and is refused with all its mistakes at
once before any process starts. No torch: a wrong file is told in a fraction of a second.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .codec import Document, FileError, Mistake, Reader, dump, key, schema, table
from .files import read_text
from .layout import Layout
from .legal import legal, nearest
from .mesh import LayoutError
from .shape import Shape, ShapeError
from .source import names_source, split_name, syntax_error

__all__ = [
    "CHECKPOINTS",
    "Checkpoints",
    "Metrics",
    "OptimizerChoice",
    "Profile",
    "Run",
    "RunError",
    "Validation",
    "run_schema",
]

BYTES = 256  # the vocabulary of the built-in data
CHECKPOINTS = "checkpoints"  # where they lie in a run's folder, if nothing else is said


class RunError(FileError):
    """A run file that cannot be run: every mistake in it."""


@dataclass(frozen=True)
class OptimizerChoice:
    """How weights are updated, and how fast at which step."""

    kind: str = key("adamw", "adamw or sgd", choices=("adamw", "sgd"))
    lr: float = key(3e-4, "the highest learning rate", above=0)
    schedule: str = key(
        "cosine", "how it falls: cosine, linear, wsd, constant",
        choices=("cosine", "linear", "wsd", "constant"),
    )  # fmt: skip
    warmup: int = key(0, "steps in which it rises to the highest", minimum=0)
    fall: int = key(0, "steps of the fall at the end, of wsd; 0: a tenth of all", minimum=0)
    least: float = key(0.1, "where it ends, as a part of the highest", minimum=0, maximum=1)
    betas: tuple[float, float] = key(
        (0.9, 0.95), "memory of adamw's averages", minimum=0, maximum=0.999999
    )
    eps: float = key(1e-8, "what adamw adds below the fraction", above=0)
    momentum: float = key(0.0, "memory of sgd", minimum=0, maximum=0.999999)
    decay: float = key(0.1, "weight decay; norms and biases have none", minimum=0)
    clip: float = key(1.0, "the longest gradient; 0 clips nothing", minimum=0)


@dataclass(frozen=True)
class Checkpoints:
    """When the run is saved, and where."""

    dir: str = key("", "folder of the checkpoints; empty: checkpoints in `out`")
    every: int = key(0, "steps between saves; 0: only at the end", minimum=0)
    keep: int = key(2, "how many are kept", minimum=2)
    asynchronous: bool = key(False, "write while training goes on", name="async")
    on_disk_full: str = key("stop", "stop, or go on without saving", choices=("stop", "go-on"))


@dataclass(frozen=True)
class Metrics:
    """What is told while the run goes on. metrics.jsonl in `out` is always written."""

    every: int = key(1, "steps between lines", minimum=1)
    tensorboard: bool = key(False, "also to TensorBoard, if installed")
    wandb: bool = key(False, "also to Weights & Biases, if installed")
    trackio: bool = key(False, "also to trackio, if installed")


@dataclass(frozen=True)
class Validation:
    """The loss on the held-out part."""

    every: int = key(0, "steps between validations; 0: only at the end", minimum=0)
    batches: int = key(8, "how many batches of the held-out part; 0: none at all", minimum=0)


@dataclass(frozen=True)
class Profile:
    """A closer look at some steps."""

    start: int = key(3, "the first step looked at", minimum=0)
    steps: int = key(0, "how many are traced by torch.profiler", minimum=0)
    nvtx: bool = key(False, "NVTX ranges named by operation")


@dataclass(frozen=True)
class Run:
    """One training run. `shape` and `layout_of` resolve the names in it."""

    model: str | dict[str, Any] = key(
        "tiny", "a shape's name, a .toml file, a table of sizes, or your own as FILE.py:Class"
    )
    layout: str = key("auto", "a layout's text, or auto: the recipe of docs/training.md")
    data: str = key(
        "python", "python (its own library's text), or a path that `phalanx data` knows"
    )
    masks: bool = key(True, "documents are kept apart in attention")
    batch: int = key(
        0, "sequences of a step over all ranks; 0: the shape's", minimum=0, maximum=1 << 24
    )
    sequence: int = key(0, "tokens of a sequence; 0: the shape's", minimum=0, maximum=1 << 28)
    steps: int = key(100, "how long", minimum=1, maximum=10**12)
    seed: int = key(0, "start of the weights and order of the data", minimum=0, maximum=2**62 - 1)
    out: str = key("", "the run's folder; empty: runs/ and the file's name")
    machine: str = key(
        "",
        "what `phalanx doctor --out FILE.toml` wrote: the peak rate; empty: measured at the start",
    )
    memory: float = key(
        0.0, "GiB that a rank may hold, for recompute:fit; 0: four fifths of its GPU's", minimum=0
    )
    optimizer: OptimizerChoice = table(OptimizerChoice, "how weights are updated")
    checkpoint: Checkpoints = table(Checkpoints, "when the run is saved")
    metrics: Metrics = table(Metrics, "what is told")
    validation: Validation = table(Validation, "the loss on the held-out part")
    profile: Profile = table(Profile, "a closer look at some steps")

    @classmethod
    def parse(
        cls,
        text: str,
        name: str = "run",
        overrides: tuple[str, ...] = (),
        adopt: Adopt | None = None,
    ) -> Run:
        """The run that a file's text and the arguments after it tell.

        Where they name no model, `adopt` may give the run another than the default.
        """
        document = Document(text, name, overrides)
        reader = Reader(cls, document.place, _IN_THE_LAYOUT)
        run = reader.table(cls, document.table)
        run = replace(run, out=run.out or f"runs/{Path(name).stem}")
        if adopt is not None and "model" not in document.table:
            run = adopt(run)
        misfits = [m._replace(place=document.place(m.place) or name) for m in _misfits(run)]
        if mistakes := [*document.mistakes, *reader.mistakes, *misfits]:
            raise RunError(name, list(dict.fromkeys(mistakes)))
        return run  # type: ignore[no-any-return]

    @classmethod
    def load(cls, path: str, overrides: tuple[str, ...] = (), adopt: Adopt | None = None) -> Run:
        """The run of a file; without one (an empty path) that of the arguments alone."""
        if not path:
            return cls.parse("", "run", overrides, adopt)

        def refuse(why: str) -> RunError:
            return RunError(path, [Mistake("", why.rstrip("."), _WRITE_ONE)])

        return cls.parse(read_text(path, "run file", refuse), path, overrides, adopt)

    def __str__(self) -> str:
        return dump(self)

    @property
    def own(self) -> str:
        """FILE.py:Class when the model is the user's own, else empty."""
        return self.model if isinstance(self.model, str) and names_source(self.model) else ""

    @cached_property
    def shape(self) -> Shape:
        """The sizes of a built-in model, with the batch and the sequence of this run. Only its file
        knows those of the user's own: see `sized`."""
        if isinstance(self.model, dict):
            return self.sized(Shape.of(self.model))
        return self.sized(Shape.load(self.model))

    def sized(self, plain: Shape) -> Shape:
        """A model's sizes with the batch and the sequence of this run."""
        # Learned positions are weights: their number is the model's and not the run's.
        learned = plain.positions == "learned"
        sequence = plain.sequence if learned else self.sequence or plain.sequence
        return replace(plain, batch=self.batch or plain.batch, sequence=sequence)

    def tokens(self, shape: Shape) -> int:
        """Tokens of a sequence; a model of this shape may know more positions."""
        return self.sequence or shape.sequence

    @property
    def checkpoints(self) -> Path:
        return Path(self.checkpoint.dir) if self.checkpoint.dir else Path(self.out, CHECKPOINTS)


Adopt = Callable[[Run], Run]
# What others keep in a key of its own, and where a layout has it.
_IN_THE_LAYOUT = {
    **dict.fromkeys(("precision", "dtype", "amp", "mixed_precision", "bf16", "fp16", "fp32", "tf32"),
                    'Write layout="bf16", or fp16, tf32, fp32, fp64, as in layout="dp2 bf16"'),
    **dict.fromkeys(("microbatch", "microbatches", "micro_batch", "micro_batch_size", "accum",
                     "gradient_accumulation", "gradient_accumulation_steps", "accumulation"),
                    'Write layout="accum:4" to cut the batch into 4 microbatches; with pp it is 1f1b:4'),
    **dict.fromkeys(("fsdp", "zero", "zero_stage", "ddp", "hsdp", "sharding"),
                    'Write layout="dp8 zero3" for FSDP over 8 ranks, layout="dp8" for DDP'),
    **dict.fromkeys(("tp", "tensor_parallel", "pp", "pipeline_parallel", "dp", "data_parallel", "cp",
                     "context_parallel", "sp", "ep"), 'Write layout="dp2 pp2 tp2"'),
    **dict.fromkeys(("recompute", "activation_checkpointing", "gradient_checkpointing"),
                    'Write layout="recompute:all", or recompute:selective'),
    **dict.fromkeys(("offload", "cpu_offload"), 'Write layout="offload:activations"'),
}  # fmt: skip
_WRITE_ONE = "`phalanx train --print-config` prints one to begin with"


def run_schema() -> dict[str, Any]:
    """The JSON Schema of the run file."""
    return schema(Run, "phalanx run file")


def misfits(run: Run, shape: Shape, layout: Layout | None) -> Iterator[Mistake]:
    """Why a model of this shape cannot be trained as the run says, in this layout if one is known."""
    yield from _tokens(run, shape)
    if layout is None or shape.kind != "decoder":
        return
    batch, sequence = shape.batch, run.tokens(shape)
    broken = legal(layout, shape, batch=batch, sequence=sequence)
    near = nearest(layout, shape, batch=batch, sequence=sequence) if broken else ()
    hint = f" Nearest that fit: {'; '.join(map(str, near))}." if near else ""
    for violation in broken:
        what = f"layout = {str(layout)!r}: {violation.what.rstrip('.')}"
        told_last = hint if violation is broken[-1] else ""
        yield Mistake("layout", what, violation.way_out.rstrip(".") + "." + told_last)


def _misfits(run: Run) -> Iterator[Mistake]:
    """What does not fit together, though each key by itself is right. `place` is a key."""
    yield from _plan(run)
    yield from _files(run)
    shape, layout = None, None
    try:
        if isinstance(run.model, dict):  # read here once more, for the keys of its mistakes
            reader = Reader(Shape)
            reader.table(Shape, {"name": "model", **run.model}, "model.")
            yield from reader.mistakes
        shape = None if run.own else run.shape
    except ShapeError as error:
        for wrong in () if isinstance(run.model, dict) else error.mistakes:
            what = f"model = {run.model!r}: {wrong.place}: {wrong.what}"
            yield Mistake("model", what, wrong.way_out)
    except LayoutError as error:
        what = f"model = {run.model!r}: {str(error).rstrip('.')}"
        yield Mistake("model", what, "See `phalanx check --help`")
    try:
        layout = None if run.layout.strip() == "auto" else Layout.parse(run.layout)
    except LayoutError as error:
        what = f"layout = {run.layout!r}: {str(error).rstrip('.')}"
        yield Mistake("layout", what, 'Or write "auto"')
    if shape is not None:
        yield from misfits(run, shape, layout)


def _tokens(run: Run, shape: Shape) -> Iterator[Mistake]:
    if shape.kind != "decoder":
        what = f"model = {run.model!r} is no decoder, and the data is text"
        yield Mistake("model", what, f"Choose one of {', '.join(_decoders())}")
        return
    if shape.positions == "learned" and run.sequence > shape.sequence:
        what = f"sequence = {run.sequence}: {shape.name} has learned {shape.sequence} positions"
        yield Mistake("sequence", what, f"Write sequence = {shape.sequence} or less")
    if run.data == "python" and shape.vocab < BYTES:
        what = f"model = {run.model!r} has a vocabulary of {shape.vocab}, and bytes are {BYTES}"
        yield Mistake("model", what, f"Give it vocab = {BYTES} or more")


def _decoders() -> list[str]:
    return [name for name in Shape.names() if Shape.load(name).kind == "decoder"]


def _plan(run: Run) -> Iterator[Mistake]:
    o = run.optimizer
    for name, steps in (("warmup", o.warmup), ("fall", o.fall)):
        if steps > run.steps:
            what = f"optimizer.{name} = {steps} is longer than steps = {run.steps}"
            yield Mistake(f"optimizer.{name}", what, f"Write {run.steps} or less")
    if o.schedule == "wsd" and o.warmup <= run.steps and o.warmup + o.fall > run.steps:
        what = f"optimizer.warmup + optimizer.fall = {o.warmup + o.fall} of steps = {run.steps}"
        yield Mistake("optimizer.fall", what, f"Write fall = {run.steps - o.warmup} or less")
    if o.fall and o.schedule != "wsd":
        what = f"optimizer.fall = {o.fall} means nothing with schedule = {o.schedule!r}"
        yield Mistake("optimizer.fall", what, 'Leave it out, or write schedule = "wsd"')
    if o.momentum and o.kind != "sgd":
        what = f"optimizer.momentum = {o.momentum} means nothing to adamw"
        yield Mistake("optimizer.momentum", what, 'Write optimizer.betas, or kind = "sgd"')
    if run.profile.steps and run.profile.start + run.profile.steps > run.steps:
        what = f"profile.start + profile.steps = {run.profile.start + run.profile.steps} of {run.steps} steps"
        yield Mistake("profile.start", what, "Profile earlier, or fewer steps")


def _files(run: Run) -> Iterator[Mistake]:
    if run.data != "python" and not Path(run.data).exists():
        what = f"data = {run.data!r} is not there"
        yield Mistake("data", what, 'Write data = "python" for the built-in text, or a path')
    for name in ("tensorboard", "wandb", "trackio"):
        if getattr(run.metrics, name) and importlib.util.find_spec(name) is None:
            what = f"metrics.{name} = true, and {name} is not installed"
            yield Mistake(f"metrics.{name}", what, f"pip install {name}, or leave it out")
    for name, folder in (("out", run.out), ("checkpoint.dir", run.checkpoint.dir)):
        yield from _folder(name, folder)
    file = split_name(run.own)[0]
    if file and not Path(file).is_file():
        what = f"model = {run.own!r}: there is no file {file}"
        yield Mistake("model", what, "See docs/bring-your-model.md")
    elif file and (wrong := syntax_error(file)):
        yield Mistake("model", f"model = {run.own!r}: {wrong}", "Mend it there")
    if run.machine and not Path(run.machine).is_file():
        what = f"machine = {run.machine!r} is not there"
        yield Mistake("machine", what, f"Measure it: phalanx doctor --out {run.machine}")


def _folder(name: str, folder: str) -> Iterator[Mistake]:
    """Why nothing can be written into a folder that may have to be made first."""
    path = Path(folder)
    while folder and not os.path.lexists(path) and path != path.parent:
        path = path.parent
    what = f"{name} = {folder!r}"
    if folder and not path.is_dir():
        below = "" if path == Path(folder) else f" lies below {str(path)!r}, which"
        link = path.is_symlink() and not path.exists()
        kind = "a link to nothing" if link else "no folder"
        yield Mistake(name, f"{what}{below} is {kind}", "Name a folder, or a new one")
    elif folder and not os.access(path, os.W_OK | os.X_OK):
        yield Mistake(name, f"{what}: {str(path)!r} cannot be written to", "Name another folder")
