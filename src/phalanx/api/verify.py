"""Compares layouts with one process: every gradient and every update."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..layout import Layout, LayoutError, Shape
from ..layout.cases import (
    AXES,
    LARGER,
    SHAPES,
    covering,
    every_layout,
    exact_layouts,
)
from ..layout.choices import COMPARED, DTYPES, FP32, FP64, LOCAL_RANKS, THREADS
from ..layout.exact import EXACT, exact_batch
from ..layout.numbers import seconds_text
from ..layout.run import Run
from ..layout.shape import HUB
from ..layout.source import names_source, split_name
from ..program import refuse_own
from . import UsageError
from .request import misfit, model_of
from .signature import with_keywords

if TYPE_CHECKING:
    from ..parallel import Model
    from ..verification import Verdict
    from ..verification.first import Subject
    from ..verification.run_trial import RunTrial

Maker = Callable[[], "Model"]


class VerifyTerms(TypedDict, total=False):
    """The keywords of `verify` that define how layouts are trained; each may be
    omitted."""

    backend: str
    steps: int
    seed: int
    packed: bool
    dropout: float
    optimizer: str
    log: Path | None
    record: Path | None


@dataclass(frozen=True)
class Verified:
    """A verdict for each layout. Prints like `phalanx verify`; `figures` are those of
    `--json`."""

    model: str
    dtype: str
    verdicts: tuple[Verdict, ...]

    @property
    def compared(self) -> tuple[Verdict, ...]:
        """The verdicts without those whose `recompute:fit` cannot be met."""
        return tuple(v for v in self.verdicts if not v.cannot_fit)

    @property
    def passed(self) -> bool:
        """True if at least one layout was compared, and all agree with one process."""
        return bool(self.compared) and all(v.passed for v in self.compared)

    @property
    def figures(self) -> dict[str, Any]:
        passed = sum(v.passed for v in self.compared)
        return {
            "layouts": [asdict(v) for v in self.verdicts],
            "passed": passed,
            "failed": len(self.compared) - passed,
            "cannot_fit": len(self.verdicts) - len(self.compared),
            "not_covered": [*self.not_covered],
        }

    @property
    def summary(self) -> str:
        figures, worst = (
            self.figures,
            max((v.max_rel_error for v in self.compared), default=0.0),
        )
        apart = figures["cannot_fit"]
        against = next((v.against for v in self.verdicts), "")
        alone = f"{against} on one process" if against else "one process"
        return (
            f"{figures['passed']} of {len(self.compared)} layouts of {self.model} agree with {alone}"
            f" in {self.dtype}; largest relative error {worst:.1e}."
        ) + f" {apart} cannot fit and were not compared." * bool(apart)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """The cases that the compared steps should have reached and did not."""
        every = (v.not_covered for v in self.verdicts if v.not_covered)
        return tuple(dict.fromkeys(every))

    @property
    def text(self) -> str:
        """The summary, followed by a line for each case that is not covered."""
        missing = (f"Not covered: {case}." for case in self.not_covered)
        return "\n".join([self.summary, *missing])

    def __str__(self) -> str:
        return "\n".join([*map(verdict_text, self.verdicts), self.text])

    __repr__ = __str__  # shown by notebooks


def verdict_text(verdict: Verdict) -> str:
    layout = verdict.layout or "one process"
    # A layout whose limit cannot be met is neither right nor wrong.
    if verdict.cannot_fit:
        return f"none cannot fit  {layout}\n     {verdict.first_difference}"
    mark = "ok  " if verdict.passed else "FAIL"
    text = f"{mark} {verdict.max_rel_error:8.1e}  {layout}"
    return (
        text if verdict.passed else f"{text}\n     {verdict.first_difference}"
    )


@with_keywords(VerifyTerms)
def verify(
    model: str | Shape | Callable[[], object] = "gqa",
    layouts: str | Iterable[Layout | str] | None = None,
    *,
    describe: Callable[[Any], object] | None = None,
    ranks: int = 4,
    cover: int = 0,
    dtype: str = DTYPES[FP64].torch,
    memory: float | None = None,
    **terms: Unpack[VerifyTerms],
) -> Verified:
    """Train a few steps in each layout and on one process, and compare every value.

        verify("gqa", "dp2 tp2 zero3; pp2 cp2 1f1b:3").passed

    model: a shape by name, a Shape, FILE.py:Class, or a class, which may be defined in a notebook
    layouts: the layouts to compare, as text separated by ";" or a list; by default all with up to
        `ranks` ranks
    describe: function that describes a class; by default `describe` in the class's module
    ranks: largest number of ranks of a layout
    cover: select at least this many layouts, which cover every pair of choices; 0: all
    dtype: number format of the computation, by default "float64"
    memory: GiB that may be used; by default the free memory
    backend: threads, shm, gloo or nccl; by default threads
    steps: training steps, by default 3
    seed: seed of weights and batches
    packed: put several documents into a sequence
    dropout: dropout rate of the built-in models
    optimizer: its name in a run file; by default adamw
    log: file of results; layouts found in it are skipped
    record: file for the last step of the last layout, for `phalanx draw run`
    """
    shape, make = (
        own_model(model, describe)
        # A class or a function; a Shape is not callable.
        if callable(model)
        else model_to_verify(model)
    )
    backend = terms.get("backend", THREADS)
    # A process cannot import what a notebook defines.
    if callable(model) and backend != THREADS:
        raise UsageError(
            f"ranks of {backend} are processes, which would have to import the model. Use threads, or"
            " name it FILE.py:Class."
        )
    if isinstance(layouts, str) or layouts is None:
        chosen = layouts_to_verify(
            layouts, shape, make, ranks=ranks, cover=cover, dtype=dtype
        )
    # One text for both forms, so that both are checked alike.
    else:
        text = ";".join(map(str, layouts))
        chosen = layouts_to_verify(text, shape, make, dtype=dtype)
    return compared(shape, make, chosen, dtype=dtype, memory=memory, **terms)


def compared(
    shape: Shape,
    make: Maker | None,
    layouts: Sequence[Layout],
    *,
    dtype: str,
    memory: float | None,
    show: Callable[[Verdict], None] = lambda verdict: None,
    **terms: Any,
) -> Verified:
    """Compare each layout with one process, and show each verdict as it is made.

    Raises if the memory would not suffice, as the system would kill the process
    half-way.
    """
    from ..layout.host import available_memory

    # Imported here: `verify` loads torch, which takes seconds.
    from ..verification.memory import GIB, needed
    from ..verification.verify import verify as verdicts

    if layouts:
        # Counted from the model itself, whose description need not match its
        # shape.
        parameters = (
            sum(weight.numel() for weight in make().weights.values())
            if make
            else shape.total
        )
        need = needed(
            shape,
            parameters,
            layouts,
            steps=terms.get("steps", 3),
            dtype=dtype,
            processes=terms.get("backend", THREADS) != THREADS,
            builtin=make is None,
        )
        # The free memory of the host, or what the user allows.
        limit = available_memory() if memory is None else memory * GIB
        if need.total > limit:
            where = (
                "are available" if memory is None else "may be used (--memory)"
            )
            raise UsageError(
                f"verify --model {shape.name} needs {need}, but only {limit / GIB:,.1f} GiB {where}. Use a"
                " smaller shape with the same parts (gqa, gpt, qwen, or a TOML file of your own), fewer"
                " ranks or --steps, or --memory GIB if you know better."
            )
    found = []
    # Lazily: a verdict is shown as soon as it is there.
    for verdict in verdicts(shape, layouts, dtype=dtype, make=make, **terms):
        show(verdict)
        found.append(verdict)
    return Verified(shape.name, dtype, tuple(found))


@dataclass(frozen=True)
class VerifiedRun(Verified):
    """The verdicts on a scaled-down run, in float64 and in its own precision."""

    covered: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    real_seconds: float = 0.0

    @property
    def figures(self) -> dict[str, Any]:
        more = {"covered": [*self.covered], "left_out": [*self.left_out]}
        return super().figures | more | {"real_seconds": self.real_seconds}

    @property
    def summary(self) -> str:
        passed = sum(v.passed for v in self.verdicts)
        return "\n".join(
            [
                f"{passed} of {len(self.verdicts)} trials of the run agree with one process.",
                "Compared: " + "; ".join(self.covered) + ".",
                "Not compared: " + "; ".join(self.left_out) + ".",
                f"One step of the real sizes takes one core about {_long_text(self.real_seconds)}.",
            ]
        )


@dataclass(frozen=True)
class VerifiedExact(Verified):
    """A verdict for each layout of `exact`: the bits of one process, or others."""

    @property
    def summary(self) -> str:
        passed = sum(v.passed for v in self.verdicts)
        of = f"{passed} of {len(self.verdicts)} trials of {self.model}"
        return f"{of} have the bits of one process."


def exact_to_verify(
    text: str | None,
    shape: Shape,
    make: Maker | None,
    *,
    ranks: int = 4,
    cover: int | None = 0,
) -> tuple[Layout, ...]:
    """Return the named layouts as layouts of `exact`, or all that it covers."""
    if text is None:
        # Products in as many parts as there may be ranks of tp.
        parts = 1 << ranks.bit_length() - 1
        every = exact_layouts(shape, ranks)
        if parts > 1:
            every += exact_layouts(shape, ranks, parts)
        if make:
            from ..parallel import fitting

            every = fitting(make(), every)
        return covering(every, cover) if cover else every
    # Parsed with the word: it changes what other words leave to their defaults.
    words = [part for part in text.split(";") if part.strip()]
    named = [Layout.parse(_with_exact(part)) for part in words]
    named = [replace(layout, precision=FP32) for layout in named]
    reasons = [
        misfit(layout, shape, batch=exact_batch(layout)) for layout in named
    ]
    if wrong := [reason for reason in reasons if reason]:
        raise LayoutError("\n".join(wrong))
    for layout in named:
        refuse_own(layout)
    return tuple(named)


def _with_exact(text: str) -> str:
    """A layout's text, with the word `exact` unless it has one."""
    words = (word.partition(":")[0] for word in text.split())
    return text if EXACT in words else f"{text} {EXACT}"


def compared_exactly(
    shape: Shape,
    make: Maker | None,
    layouts: Sequence[Layout],
    *,
    show: Callable[[Verdict], None] = lambda verdict: None,
    **terms: Any,
) -> VerifiedExact:
    """Compare the bits of each layout with those of one process, and show each verdict."""
    from ..verification.exact import verify_exact

    found = []
    for verdict in verify_exact(shape, layouts, make=make, **terms):
        show(verdict)
        found.append(verdict)
    names = " and ".join(dict.fromkeys(terms.get("precisions", ())))
    return VerifiedExact(shape.name, names, tuple(found))


def _long_text(seconds: float) -> str:
    """Format a time that may be years."""
    days = seconds / 86_400
    return f"{days:,.0f} days" if days >= 2 else seconds_text(seconds)


def verify_run(
    run: Run,
    show: Callable[[Verdict], None] = lambda verdict: None,
    *,
    on_cpu: bool = False,
) -> VerifiedRun:
    """Compare a scaled-down run with one process, with its own ranks, optimizer,
    schedule, precision and data.

    `on_cpu`: do not use GPUs.
    """
    from ..training.program import shape_of

    shape = shape_of(run)
    # `auto` is decided at the start of the run, from its devices.
    layout = run.layout_of(shape)
    if layout is None:
        raise UsageError(
            "the layout of the run is auto. Write one, as layout='dp2 zero1'."
        )
    from tempfile import TemporaryDirectory

    from ..comm.late import late_worlds
    from ..verification.run_trial import real_seconds, run_trial
    from ..verification.run_trial import verify_run as verdicts

    found = []
    # Checkpoints, data and journals of the trial are deleted with the folder.
    with TemporaryDirectory() as out:
        trial = run_trial(run, shape, layout, out)
        refuse_own(trial.layout)
        # A user's model keeps its sizes, so its trial may be too large.
        if run.own:
            _refuse_large(run, trial)
        for verdict in verdicts(trial, late_worlds if on_cpu else None):
            show(verdict)
            found.append(verdict)
    covered = [*trial.covered, *(v.covered for v in found if v.covered)]
    return VerifiedRun(
        shape.name,
        trial.layout.precision,
        tuple(found),
        tuple(covered),
        trial.left_out,
        real_seconds(run, shape),
    )


def subject_of(run: Run) -> Subject:
    """Return a run's model of the user's own, with random tokens, for its first trial."""
    from ..training.program import maker_of, shape_of
    from ..verification.first import Subject, batches_of_shape

    # The class's own forward may stand in another file than its pieces.
    path, _ = split_name(run.own) if run.own else ("", "")
    code = (Path(path),) if path else ()
    return Subject(maker_of(run), batches_of_shape(shape_of(run)), code)


def _refuse_large(run: Run, trial: RunTrial) -> None:
    """Raise if a model of other code, which is trained in its own sizes, would not fit
    into memory."""
    from ..layout.host import available_memory
    from ..training.program import maker_of, shape_of
    from ..verification.memory import GIB, needed

    # The trial's run, which has fewer steps and smaller batches than the run
    # itself.
    small = trial.run
    parameters = sum(
        weight.numel() for weight in maker_of(small)().weights.values()
    )
    need = needed(
        shape_of(small),
        parameters,
        (trial.layout,),
        steps=small.steps,
        dtype=DTYPES[FP64].torch,
        processes=False,
        builtin=False,
    )
    if need.total > (limit := available_memory()):
        smaller = "one of the same file: a function that returns it, such as model=FILE.py:small"
        # A model of transformers is made smaller by its configuration, another
        # by its own arguments.
        if run.own.startswith(HUB):
            smaller = "model: a folder whose config.json has fewer and narrower layers"
        raise UsageError(
            f"verify of {run.own} in its own sizes needs {need}, but only {limit / GIB:,.1f} GiB are"
            f" available. Name a smaller {smaller}."
        )


def own_model(
    kind: Callable[[], object], describe: Callable[[Any], object] | None
) -> tuple[Shape, Maker]:
    """Return the shape of a user's class, and a function that makes a model of it."""
    # `describe` of the module in which the class is defined.
    describe = describe or getattr(
        sys.modules[kind.__module__], "describe", None
    )
    from ..parallel.load import model_of_class

    make = partial(model_of_class, kind, describe)
    shape = make().shape
    if shape is None:
        raise LayoutError(
            "describe() returns no shape; add shape=Shape(...) to its Model."
        )
    return shape, make


def model_to_verify(name: str | Shape) -> tuple[Shape, Maker | None]:
    """Return one of the small shapes with awkward traits, or any model that commands
    accept."""
    if isinstance(name, Shape):
        return name, None
    # Shapes for comparisons have precedence over models of the same name.
    if known := (SHAPES | LARGER).get(name):
        return known, None
    file = name.endswith(".toml") or name.startswith(HUB) or names_source(name)
    if name not in Shape.names() and not file:
        raise UsageError(
            f"unknown model {name!r}. Small shapes with awkward traits are"
            f" {', '.join(SHAPES)}; larger ones, beyond thresholds in the code, are {', '.join(LARGER)};"
            f" shapes are {', '.join(Shape.names())}; your own is FILE.py:Class."
        )
    return model_of(name)


def layouts_to_verify(
    text: str | None,
    shape: Shape,
    make: Maker | None,
    *,
    ranks: int = 4,
    axes: str = " ".join(AXES),
    cover: int | None = 0,
    dtype: str,
) -> tuple[Layout, ...]:
    """Return the named layouts, all legal ones up to `ranks` ranks, or a subset that
    covers all pairs of choices."""
    if text is None:
        # With `cover`, each layout has one more option, in turn.
        every = every_layout(shape, ranks, axes=axes, besides=bool(cover))
        # A user's model may be wrong in some layouts, which are left out here
        # rather than refused.
        if make:
            from ..parallel import fitting

            every = fitting(make(), every)
        return covering(every, cover) if cover else every
    named = Layout.parse_many(text)
    most = max((layout.ranks for layout in named), default=1)
    # Ranks are threads or processes of this machine.
    if most > LOCAL_RANKS:
        raise UsageError(
            f"--layouts: one has {most:,} ranks; one machine starts 1 to {LOCAL_RANKS}."
        )
    if wrong := [
        reasons for layout in named if (reasons := misfit(layout, shape))
    ]:
        raise LayoutError("\n".join(wrong))
    # A schedule of the user's own is run and proved before any rank starts.
    for layout in named:
        refuse_own(layout)
    # Only in float64 are layouts themselves set to float64; in others their
    # words stay.
    if COMPARED[dtype] != FP64:
        return tuple(named)
    return tuple(replace(layout, precision=FP64) for layout in named)
