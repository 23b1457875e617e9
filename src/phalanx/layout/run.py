"""The run file: model, data, layout and length of a training run, as one value.

It reads from TOML and `key=value` arguments and prints back. A wrong file is refused
with all its mistakes at once before any process starts, in a fraction of a second, as
torch is not loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from .adapters import ADAPTERS, AdapterTables
from .choices import PRECISIONS, PYTHON, elsewhere
from .codec import FileError, Mistake, Reader, changed_repr, dump, key, text_of
from .families import code_of
from .files import parse_toml, read_text
from .hub import model_folder
from .layout import Layout
from .mesh import LayoutError
from .optimizers import OptimizerChoice
from .run_checks import mistakes_of
from .shape import HUB, Shape, published
from .source import name_of_class, with_arguments
from .url import Url

CLASS = "class"  # key of [model] for the user's own class; the others are its arguments
DPO = "dpo"  # the loss of preference pairs
RANDOM = "random"  # weights drawn from `seed`
# Their place in a run's folder, unless checkpoint.dir names another.
CHECKPOINTS = "checkpoints"


class RunError(FileError):
    """Raised for a run file that cannot be run, with every mistake in it."""


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints: their folder, interval and retention."""

    dir: str = key("", "checkpoint folder; empty: checkpoints in `out`")
    remote: str = key(
        "",
        "fsspec URL to upload checkpoints to, such as s3://bucket/run; a run resumes"
        " from it if it has newer ones; ${NAME} in it is an environment variable",
    )
    remote_timeout: float = key(
        300.0,
        "seconds without progress after which an upload to `remote`, or a download"
        " from it, is given up; 0: never",
        maximum=1e6,
    )
    every: int = key(0, "steps between checkpoints; 0: only at the end")
    at_end: bool = key(
        True,
        "save after the last step too; a run that is stopped always saves",
    )
    keep: int = key(
        2, "checkpoints to keep; older ones are deleted", minimum=2
    )
    asynchronous: bool = key(
        False, "write while training continues", name="async"
    )
    adopt: bool = key(
        False,
        "resume even if the model's sizes differ, as long as the weights fit",
    )
    on_disk_full: str = key(
        "stop",
        "stop, or go-on: continue without saving",
        choices=("stop", "go-on"),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "remote", Url(self.remote))


@dataclass(frozen=True)
class Metrics:
    """Logging. metrics.jsonl in `out` is always written."""

    every: int = key(1, "steps between log lines", minimum=1)
    tensorboard: bool = key(False, "log to TensorBoard, if installed")
    wandb: bool = key(False, "log to Weights & Biases, if installed")
    trackio: bool = key(False, "log to trackio, if installed")


@dataclass(frozen=True)
class Training:
    """The reaction to ranks that fail or are missing."""

    restarts: int = key(0, "restarts of the local ranks after one has failed")
    in_memory: int = key(
        0,
        "steps between checkpoints in the memory of the hosts, from which restarted"
        " ranks resume; each part is also on the next host; 0: none",
    )
    check_copies: int = key(
        100,
        "steps between bit-by-bit comparisons of the copies of weights and optimizer"
        " state; also before each save; 0: never",
    )
    audit: int = key(
        0,
        "steps that each start records in `out`/audit, for `phalanx audit compare` with"
        " another layout of the run; 0: none",
    )
    fallback: str = key(
        "",
        "layouts for other numbers of ranks than that of `layout`, in order: dp3 tp2;"
        " dp2 tp2",
    )


@dataclass(frozen=True)
class Networking:
    """The network between hosts."""

    interface: str = key(
        "",
        "network interface of the ranks, such as eth0; empty: the one that leads to"
        " rank 0's host",
    )


@dataclass(frozen=True)
class Validation:
    """The loss on the validation split."""

    every: int = key(0, "steps between validations; 0: only at the end")
    batches: int = key(8, "batches of a validation; 0 disables")


@dataclass(frozen=True)
class SampleChoice:
    """A text that the model writes while it is trained."""

    every: int = key(
        0,
        "steps between texts; there is also one after the last step; 0: none",
    )
    prompt: str = key(
        "\n", "start of the text; a user's message if the run trains on chats"
    )
    tokens: int = key(
        40, "maximum number of tokens to write", minimum=1, maximum=1 << 16
    )
    temperature: float = key(
        0.8, "0: the likeliest token; above 0: sampled, with `seed`"
    )
    tokenizer: str = key(
        "",
        "tokenizer.json or its folder; empty: the tokenizer of `model` or `data`",
    )


@dataclass(frozen=True)
class Profiling:
    """A trace of some steps."""

    start: int = key(3, "first step of the trace")
    steps: int = key(0, "steps to trace with torch.profiler; 0 disables")
    nvtx: bool = key(False, "NVTX ranges named by operation")


@dataclass(frozen=True)
class Hangs:
    """Thresholds for a run that hangs, and for ranks reported as slow."""

    timeout: float = key(
        600.0,
        "seconds without progress, beyond the longest operation, after which the run"
        " is ended with the reason; 0: never",
        maximum=1e6,
    )
    straggler: float = key(
        2.0,
        "report a rank whose own work takes this many times as long as that of its"
        " peers; 0 disables",
    )


@dataclass(frozen=True)
class Preparing:
    """The preparation of `data`: its conversion to tokens of the model's tokenizer."""

    field: str = key(
        "",
        "field of the rows to read; empty: text, messages, conversations, or prompt"
        " and completion",
    )
    held_out: float = key(
        0.05, "share of the documents for validation", maximum=0.999
    )
    on_bad: str = key(
        "skip",
        "unreadable input: skip (leave it out and name it) or refuse",
        choices=("skip", "refuse"),
    )


@dataclass(frozen=True)
class PreferenceChoice:
    """Direct Preference Optimization."""

    beta: float = key(
        0.1,
        "smaller values let the model move farther from its start",
        above=0,
    )


@dataclass(frozen=True)
class RunKeys:
    """The keys and tables of a run file that belong to no adapter."""

    model: str | dict[str, Any] = key(
        "tiny",
        "a shape's name, a .toml file, a table of sizes, hf:FOLDER or hf:OWNER/NAME of the hub, or"
        " your own as FILE.py:Class, FILE.py:Class(n_layer=6), or a table of its arguments beside `class`",
    )
    layout: str = key(
        "auto",
        "how the ranks share the work, such as dp2 pp2 zero1 1f1b:4; or auto",
    )
    weights: str = key(
        "",
        "random: train the sizes of a published name, such as gpt2, from random"
        " weights; empty: hf:FOLDER starts from its weights, a shape from random ones,"
        " and a published name is refused",
        choices=("", RANDOM),
    )
    precision: str = key(
        "",
        "bf16, fp16, tf32, fp32, fp64; empty: the layout's, or fp32",
        choices=("", *PRECISIONS),
    )
    data: str | tuple[str, ...] = key(
        "python",
        "python (the text of its standard library), a path, hf:OWNER/NAME of the hub, or"
        " several as 'a:0.7, b:0.3'; see `phalanx data`",
    )
    freeze: str = key(
        "", "pieces that are not trained, such as embed, layers.0-3, head"
    )
    document_masks: bool = key(
        True, "no attention between the documents in a sequence"
    )
    packing: str = key(
        "",
        "wrapped: text is split where a sequence ends; bfd: whole documents share a"
        " sequence; none: one document in each, padded; empty: bfd for chats, wrapped"
        " otherwise",
        choices=("", "wrapped", "bfd", "none"),
    )
    batch: int = key(
        0, "global batch size in sequences; 0: the shape's", maximum=1 << 24
    )
    microbatch: int = key(
        0,
        "sequences of a microbatch per data-parallel rank; 0: the layout's accum:N or 1f1b:N",
        maximum=1 << 24,
    )
    sequence: int = key(
        0, "sequence length in tokens; 0: the shape's", maximum=1 << 28
    )
    epochs: float = key(
        0.0,
        "passes over the data, in place of `steps`; 0: as `steps` says",
        maximum=1e6,
    )
    steps: int = key(100, "optimizer steps", minimum=1, maximum=10**12)
    loss: str = key(
        "",
        "empty: cross-entropy of the next token; dpo: preference pairs",
        choices=("", DPO),
    )
    z_loss: float = key(
        0.0,
        "weight of log(Z)^2 in each token's loss; Z is the sum of exp(logits)",
    )
    dropout: float | None = key(
        None,
        "dropout probability of embeddings, heads' outputs, attention and MLP; unset: the"
        " model's own",
        maximum=0.99,
    )
    seed: int = key(
        0, "seed of the initial weights and the data order", maximum=2**62 - 1
    )
    out: str = key(
        "", "output folder; empty: runs/ plus the name of the run file"
    )
    machine: str = key(
        "",
        "machine file of `phalanx doctor --out`, for MFU and auto; empty: measure the peak rate",
    )
    memory: float = key(
        0.0,
        "memory limit per rank in GiB for recompute:fit; 0: 80 % of its GPU",
    )
    verify: bool = key(
        False,
        "before the ranks start, train a scaled-down run and compare it with one"
        " process, as `phalanx verify` does; a run that differs is refused",
    )
    verify_own: bool = key(
        True,
        "before a model of your own makes its first step in a layout, compare a step"
        " of a cut-down copy with one process, once",
    )
    dpo: PreferenceChoice = key(
        PreferenceChoice(), "the loss of pairs of answers"
    )
    optimizer: OptimizerChoice = key(
        OptimizerChoice(), "optimizer and learning-rate schedule"
    )
    checkpoint: Checkpoints = key(
        Checkpoints(), "when checkpoints are saved, and where"
    )
    train: Training = key(
        Training(), "what happens when ranks fail or are missing"
    )
    network: Networking = key(Networking(), "how hosts reach each other")
    metrics: Metrics = key(Metrics(), "what is logged")
    validation: Validation = key(
        Validation(), "the loss on the validation split"
    )
    sample: SampleChoice = key(
        SampleChoice(), "a text that the model writes while it is trained"
    )
    profile: Profiling = key(Profiling(), "a trace of some steps")
    prepare: Preparing = key(
        Preparing(), "how text is read where `model` has a tokenizer"
    )
    hang: Hangs = key(
        Hangs(),
        "when a run is taken to hang, and which ranks are reported as slow",
    )


# The fields of the last class come first.
@dataclass(frozen=True)
class Run(AdapterTables, RunKeys):
    """One training run. `shape` and `layout_of` resolve the names in it."""

    def __post_init__(self) -> None:
        if isinstance(self.model, type):  # Run(model=GPT)
            name = name_of_class(self.model, LayoutError)
            object.__setattr__(self, "model", name)

    @classmethod
    def parse(
        cls,
        text: str,
        name: str = "run",
        overrides: tuple[str, ...] = (),
        adopt: Adopt | None = None,
    ) -> Run:
        """The run of a file's text and the arguments after it.

        If they name no model, `adopt` may replace the default one.
        """
        # What users of other libraries write, and our key for it.
        pointers = {
            other: f"Write {ours}" for other, ours in elsewhere("run").items()
        }
        reader = Reader(cls, text, name, overrides, pointers, {"model": CLASS})
        run: Run = reader.table(cls, reader.given)
        # "configs/small.toml" -> runs/small.
        run = replace(run, out=run.out or f"runs/{Path(name).stem}")
        if adopt is not None and "model" not in reader.given:
            run = adopt(run)
        # The place of each mistake is the line or argument that set the key.
        misfits = [
            m._replace(place=reader.place(m.place) or name)
            for m in mistakes_of(run)
        ]
        if mistakes := [*reader.mistakes, *misfits]:
            # A key of [model] may be reported by the reader and again by the
            # shape: once is enough.
            raise RunError(name, list(dict.fromkeys(mistakes)))
        return run

    @classmethod
    def load(
        cls,
        path: str,
        overrides: tuple[str, ...] = (),
        adopt: Adopt | None = None,
    ) -> Run:
        """The run of a file. With an empty path, the run of the arguments alone."""
        write_one = "`phalanx train --print-config` prints one to begin with"
        text = text_of(path, "run file", RunError, write_one) if path else ""
        return cls.parse(text, path or "run", overrides, adopt)

    def __str__(self) -> str:
        return dump(self)

    __repr__ = changed_repr  # shown by notebooks

    @cached_property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """The paths of the data with their integer weights; 0 if none are given."""
        items = self.data
        if isinstance(items, str):
            # A path may contain commas: as a whole it takes precedence.
            whole = items == PYTHON or Path(items).exists()
            items = (
                (items,)
                if whole
                else tuple(x.strip() for x in items.split(",") if x.strip())
            )
        pairs = [_weighted(item) for item in items]
        # Fractions times their common denominator are exact integers.
        unit = math.lcm(*(weight.denominator for _, weight in pairs))
        return tuple((path, int(weight * unit)) for path, weight in pairs)

    @property
    def own(self) -> str:
        """FILE.py:Class(...) of a custom model, hf:FOLDER for transformers, or ""."""
        text = self.model
        if isinstance(text, dict):
            arguments = {key: x for key, x in text.items() if key != CLASS}
            text = with_arguments(str(text.get(CLASS, "")), arguments)
        return text if code_of(text)[0] else ""

    @property
    def hub(self) -> str:
        """The folder of the Hugging Face model that the run starts from, or ""."""
        # "hf:FOLDER" -> FOLDER.
        named = isinstance(self.model, str) and self.model.startswith(HUB)
        return str(self.model).removeprefix(HUB) if named else ""

    @property
    def hub_folder(self) -> Path:
        """The folder with the weights of that model, downloaded if it is a name of the hub."""
        return Path(model_folder(self.hub))

    @cached_property
    def shape(self) -> Shape:
        """The sizes of a built-in model, with the batch and the sequence of this run.

        The sizes of a user's own model are known to its file only: see `sized`.
        """
        if isinstance(self.model, dict):
            return self.sized(Shape.of(self.model))
        return self.sized(Shape.load(self.model))

    def sized(self, plain: Shape) -> Shape:
        """A model's sizes with the batch and the sequence of this run."""
        # Learned positions are weights: their number belongs to the model, not the run.
        learned = plain.positions == "learned"
        sequence = (
            plain.sequence if learned else self.sequence or plain.sequence
        )
        dropout = plain.dropout if self.dropout is None else self.dropout
        sized = replace(
            plain,
            batch=self.batch or plain.batch,
            sequence=sequence,
            dropout=dropout,
        )
        if self.freeze:
            sized = replace(
                sized, freeze=tuple(re.split("[, ]+", self.freeze.strip()))
            )
        sizes = dict[str, Any]()
        for row in ADAPTERS:
            sizes |= row.sizes(getattr(self, row.key))
        return replace(sized, **sizes) if sizes else sized

    def layout_of(self, shape: Shape | None = None) -> Layout | None:
        """The layout including `precision` and `microbatch`, or None for `auto`.

        Without a shape the batch may be unknown, and with it the number of
        microbatches.
        """
        if self.layout.strip() == "auto":
            return None
        # The keys that the layout itself names, to find contradictions.
        written = Layout.written(self.layout)
        if (
            self.precision
            and written.get("precision", self.precision) != self.precision
        ):
            what = (
                f"precision = {self.precision!r}, and layout = {self.layout!r}"
            )
            raise RunError(
                "run", [Mistake("precision", what, "Write one of them")]
            )
        layout = Layout.parse(self.layout)
        layout = replace(layout, precision=self.precision or layout.precision)
        batch = self.batch or (shape.batch if shape else 0)
        divided = self.divided(layout, batch) if batch else layout
        # Microbatches written in the layout must agree with those that follow
        # from the run.
        count = written.get("microbatches", divided.microbatches)
        if batch and self.microbatch and count != divided.microbatches:
            cut = f"microbatch = {self.microbatch} cuts batch = {batch} over dp{layout.dp}"
            what = f"{cut} into {divided.microbatches} microbatches, and layout = {self.layout!r}"
            mistake = Mistake(
                "microbatch", f"{what} into {count}", "Write one of them"
            )
            raise RunError("run", [mistake])
        return divided

    @property
    def fallbacks(self) -> list[Run]:
        """This run in each of its fallback layouts."""
        texts = [each.strip() for each in self.train.fallback.split(";")]
        return [
            replace(self, layout=each, train=Training())
            for each in texts
            if each
        ]

    def for_ranks(self, ranks: int, *, fewer: bool = False) -> Run:
        """The run in its first layout for these ranks; unchanged if none."""
        # The layout itself first, then the fallbacks in the user's order.
        for run in (self, *self.fallbacks):
            layout = run.layout_of()
            if (
                layout is None
                or layout.ranks == ranks
                or (fewer and layout.ranks < ranks)
            ):
                return replace(self, layout=run.layout)
        return self

    def divided(self, layout: Layout, batch: int) -> Layout:
        """The layout with the microbatches that `microbatch` makes of a batch."""
        if not self.microbatch:
            return layout
        dp = layout.dp
        count, rest = divmod(batch, dp * self.microbatch)
        if rest or not count:
            what = f"microbatch = {self.microbatch} on each of dp{dp}"
            # Sequences that would divide the batch: the three nearest to the
            # one asked for.
            fits = [
                n
                for n in range(1, min(batch // dp, 4096) + 1)
                if batch % (dp * n) == 0
            ]
            fits = sorted(
                sorted(fits, key=lambda n: abs(n - self.microbatch))[:3]
            )
            way_out = f"Write {' or '.join(map(str, fits)) or f'a batch that {dp} divides'}"
            mistake = Mistake(
                "microbatch",
                f"{what} does not divide batch = {batch}",
                way_out,
            )
            raise RunError("run", [mistake])
        return replace(layout, microbatches=count)

    def tokens(self, shape: Shape) -> int:
        """The tokens of a sequence. The model may know more positions."""
        return self.sequence or shape.sequence

    @property
    def checkpoints(self) -> Path:
        return (
            Path(self.checkpoint.dir)
            if self.checkpoint.dir
            else Path(self.out, CHECKPOINTS)
        )


_WEIGHT = re.compile(r"(.+):([0-9]*\.?[0-9]+(?:e-?[0-9]{1,2})?)")


def _weighted(item: str) -> tuple[str, Fraction]:
    """A path and its weight; 0 if it has none."""
    # A file named "a:0.5" takes precedence over a weight.
    match = None if Path(item).exists() else _WEIGHT.fullmatch(item)
    return (match[1], Fraction(match[2])) if match else (item, Fraction(0))


Adopt = Callable[[Run], Run]


def run_file(name: str) -> Run | None:
    """The run of a file that names a model or a layout, else None."""
    if not name.endswith(".toml") or not Path(name).is_file():
        return None
    keys = parse_toml(
        read_text(name, "run file", LayoutError), name, LayoutError
    ).keys()
    # A shape or a machine is a TOML file too: only these keys make it a run.
    return Run.load(name) if keys & {"model", "layout"} else None


def shape_named(name: str) -> Shape:
    """The shape of a name, or of a run file's model with its trained weights."""
    run = run_file(name)
    return run.shape if run else Shape.load(name)


def random_by_name(run: Run) -> Mistake | None:
    """The mistake of training random weights under the name of published ones, or None."""
    if (
        not isinstance(run.model, str)
        or run.weights == RANDOM
        or not published(run.model)
    ):
        return None
    what = f"model = {run.model!r} names published weights, and phalanx has only their sizes"
    way_out = (
        "Write model = 'hf:FOLDER' with a folder of the model to train its weights, or add"
        f" weights = {RANDOM!r} to train these sizes from random ones"
    )
    return Mistake("model", what, way_out)


def refuse_random_by_name(run: Run) -> None:
    """Raise if a run would train random weights under the name of published ones."""
    begun = run.checkpoints.is_dir() and any(run.checkpoints.iterdir())
    # The ranks look for checkpoints elsewhere, and refuse too if there are none.
    elsewhere = run.checkpoint.remote or run.train.in_memory
    if not begun and not elsewhere and (mistake := random_by_name(run)):
        raise RunError("run", [mistake])
