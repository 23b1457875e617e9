"""One training step as a value: of a schedule, of a layout of a model, or of a program
file.

`draw` and `simulate` take the same arguments as `phalanx draw`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypedDict, Unpack

from ..drawing import MeshPicture, Picture, recorded_picture
from ..layout import (
    Layout,
    LayoutError,
    Mesh,
    Run,
    Shape,
    StagedPieces,
    plain_pieces,
)
from ..layout.choices import SCHEDULES, SEARCHED, traits
from ..layout.files import read_text
from ..layout.optimizers import ADAMW
from ..layout.pieces import piece_work
from ..layout.source import names_source
from ..planner.step import Pricer
from ..program import (
    KINDS,
    Costs,
    Program,
    Recorded,
    Sizes,
    StepOptions,
    Timeline,
    build,
    check,
    ops,
    repeat,
    schedule,
)
from ..program import simulate as simulated
from . import TEXT, UsageError
from .request import (
    RunStep,
    refuse_beside_run,
    refuse_illegal,
    request_for,
    run_named,
    step_of_layout,
    step_of_run,
    where,
)
from .signature import with_keywords


class StepTerms(TypedDict, total=False):
    """The keywords of `draw` and `simulate`; each may be omitted. `draw` explains
    them."""

    stages: int
    microbatches: int
    chunks: int
    layers: int
    zero: int
    gather: str
    reduce: str
    prefetch: int
    recompute: str
    batch: int
    seq: int
    cluster: str
    optimizer: str
    costs: Mapping[str, float] | str | None
    memory_limit: float | None
    clip: bool
    repeat: int


# Keywords that a layout or a program file defines itself.
# From `stages` to `recompute`.
OF_A_SCHEDULE = tuple(StepTerms.__annotations__)[:9]


@dataclass(frozen=True)
class StepProgram:
    """One training step: its program, the cost of its operations, and its title."""

    title: str
    program: Program
    costs: Costs
    stages: int
    chunks: int = 1
    notes: tuple[str, ...] = ()
    free: Program | None = None  # the same without the gradient norm

    def timeline(self, steps: int = 1, sizes: Sizes | None = None) -> Timeline:
        return simulated(repeat(self.program, steps), self.costs, sizes)

    def picture(self, steps: int = 1, *, memory: bool = True) -> Picture:
        """Return the picture of the step.

        `memory`: show memory over time, as a page and a trace do; in pieces, as bytes
        are unknown here.
        """
        # Raises if the program is wrong, and counts what each stage holds at
        # most.
        proof = check(self.program)
        timeline = self.timeline(
            steps, Sizes.counts(self.program.pieces) if memory else None
        )
        title = self.title + (f", {steps} steps" if steps > 1 else "")
        notes = (*self.notes, *_barrier(self, timeline, steps))
        return Picture(
            title,
            timeline,
            held=proof.held,
            notes=notes,
            unit="pieces and units",
        )


@with_keywords(StepTerms)
def simulate(
    what: str | Layout | Program | Run,
    model: str | Shape | type = "",
    **terms: Unpack[StepTerms],
) -> Timeline:
    """Return the timeline of a step: each rank's operations over time, the makespan and the bubble.

    `what` is a schedule's name, a layout with its `model`, a run or its file, a program, or `program FILE`.

        simulate("1f1b", stages=4, microbatches=8).bubble_fraction
        simulate("dp2 pp2 zero3 1f1b:4", "8b", cluster="h100x4").makespan

    The keywords are those of `draw`.
    """
    # With hardware named, operations take the planner's seconds; without,
    # those of `costs`.
    if terms.get("cluster") and _names_step(what, model):
        return _priced(_step_asked(what, model, terms), terms).timeline
    return step_of(what, model, terms).timeline(terms.get("repeat") or 1)


@with_keywords(StepTerms)
def draw(
    what: str | Layout | Program | Run,
    model: str | Shape | type = "",
    **terms: Unpack[StepTerms],
) -> Picture | MeshPicture:
    """Return the picture of a step, a mesh (`mesh LAYOUT`), or a recorded step (`run FILE`).

    For a run (a `Run`, or the name of its file) or a layout with its `model`, it is the step that
    `phalanx train` executes.

    A notebook displays it, `print` draws it as text, and `save` writes a file in the format of its
    suffix.

        draw("dp2 pp2 zero3 1f1b:4", "124m", costs="F=1,B=2,G=0.2,S=0.2")

    what: a schedule by name, a layout with its `model`, a Run or its file, a Program, "program FILE",
        "mesh LAYOUT" or "run FILE"
    model: the model of a layout: a shape by name, a Shape or a .toml file

    For a schedule by itself:
    stages: pipeline stages, by default 4
    microbatches: number in a step, by default 8
    chunks: number of model chunks on each stage
    layers: number of pieces, spread evenly over the stages; by default one per chunk
    zero: ZeRO stage 0 to 3, over two data-parallel ranks; by default 0
    gather: when to gather weights: once a "step" or for each use ("micro")
    reduce: when to reduce gradients: once a "step" or per microbatch ("micro")
    prefetch: number of units gathered ahead, by default 1
    recompute: none, all, every=C, sqrt or fit

    For a layout:
    batch: sequences in a step; by default the model's
    seq: tokens in a sequence; by default the model's
    cluster: hardware on which to time the operations in seconds, such as "h100x64"
    optimizer: its name in a run file; by default that of the run file given as model, or adamw

    For both:
    costs: time by kind of operation, such as "F=1,B=2,send=0.1" or {"F": 1, "B": 2}
    memory_limit: microbatches that a stage may hold (searched), or pieces (recompute fit)
    clip: include gradient clipping, for which all ranks agree on the norm, as in every run
    repeat: number of consecutive steps, by default 1
    """
    kind, _, name = (
        str(what).partition(" ") if isinstance(what, str) else ("", "", "")
    )
    # A mesh and a recorded step are drawn without a program.
    if kind == "mesh":
        return MeshPicture.parse(name)
    if kind == "run":
        # A browser has no reports, and draws no recorded step.
        from ..report.happened import with_shown_ranks

        text = read_text(name, "recorded step", UsageError, TEXT)
        recorded = Recorded.parse(text)
        picture = recorded_picture(recorded)
        return with_shown_ranks(picture, recorded.program)
    if terms.get("cluster") and _names_step(what, model):
        return _priced(_step_asked(what, model, terms), terms)
    return step_of(what, model, terms).picture(terms.get("repeat") or 1)


def _names_step(what: object, model: object) -> bool:
    """True for a run, and for a layout with its model."""
    return bool(model) or isinstance(what, Run) or str(what).endswith(".toml")


def step_of(
    what: str | Layout | Program | Run,
    model: str | Shape | type,
    terms: StepTerms,
) -> StepProgram:
    known = StepTerms.__annotations__
    # A mapping may come from a program, with any keys.
    if unknown := ", ".join(sorted(set(terms) - set(known))):
        raise UsageError(
            f"{unknown} is not a valid option for this command; use {', '.join(known)}."
        )
    name = str(what)
    of_file = isinstance(what, str) and name.split()[:1] == ["program"]
    if of_file or isinstance(what, Program):
        # A program fixes its order and its units; only the price of operations
        # is left to choose.
        not_its = (
            *OF_A_SCHEDULE,
            "batch",
            "seq",
            "cluster",
            "optimizer",
            "memory_limit",
            "clip",
        )
        if given := "--model" if model else _given(terms, not_its):
            raise UsageError(
                f"{given} cannot be combined with a program file, which defines the whole step."
            )
    if isinstance(what, Program):
        return _of_program("program", what, terms)
    if of_file:
        _, *files = name.split()
        if len(files) != 1:
            raise UsageError(
                "`phalanx draw program` takes one file: phalanx draw program step.txt."
            )
        path = files[0]
        text = read_text(path, "program", UsageError, TEXT)
        return _of_program(path, Program.parse(text, path), terms)
    if _names_step(what, model):
        return _of_run_step(_step_asked(what, model, terms), terms)
    if given := _given(terms, ("cluster", "optimizer")):
        raise UsageError(f"{given} needs a layout of a model: add --model.")
    # A layout by itself has no pieces to draw.
    if isinstance(what, Layout) or (
        name not in SCHEDULES and _is_layout(name)
    ):
        raise UsageError(
            f"the layout {name!r} needs a model: add --model 124m, or another shape;"
            f" in Python, draw({name!r}, '124m')."
        )
    return _of_schedule(name, terms)


def _is_layout(text: str) -> bool:
    """True if a text that is no schedule's name reads as a layout. A word of another library, such
    as fsdp8, is refused with our spelling."""
    try:
        # A single word that parses as a layout, such as "dp2"; "file.py:name"
        # is a schedule.
        return not names_source(Layout.parse(text).schedule)
    except LayoutError as wrong:
        # Several words, or a spelling that our message corrects: the layout's
        # own error is the better one.
        if " " in text or ". Write " in str(wrong):
            raise
        return False


def _of_schedule(name: str, terms: StepTerms) -> StepProgram:
    """Return the step of a schedule alone: its stages are the only ranks."""
    if name not in SCHEDULES and not names_source(name):
        schedule(name, 1, 1)  # raises, with the nearest name
    kind = traits(name)
    stages = terms.get("stages") or (4 if kind.pipelined else 1)
    microbatches = terms.get("microbatches") or 8
    zero = terms.get("zero") or 0
    notes: tuple[str, ...] = ()
    if kind.whole_batch and microbatches > 1:
        microbatches = 1
        notes = (f"{name} sharding takes the whole batch as one microbatch",)
    layout = Layout(
        # ZeRO shards over replicas, so there must be two; they have the same rows.
        mesh=Mesh.parse(f"dp2 pp{stages}" if zero else f"pp{stages}"),
        zero=zero,
        schedule=name,
        chunks=terms.get("chunks") or 0,
        microbatches=microbatches,
        gather=terms.get("gather") or "",
        reduce=terms.get("reduce") or "",
        prefetch=terms.get("prefetch", 1),
        recompute=terms.get("recompute") or "none",
    )
    pieces = _spread(terms.get("layers"), layout.virtual_stages)
    layers = pieces[-1].stop
    costs = Costs(
        costs_of(terms.get("costs"), split=layout.splits_backward),
        # Layers cost the same, and a stage as much as with one layer: 1.
        share=dict.fromkeys(range(layers), stages / layers),
    )
    title = (
        f"{name}: {many(stages, 'stage')}, {many(microbatches, 'microbatch')}"
    )
    title += f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    title += f", zero{layout.zero}" if layout.zero else ""
    title += (
        f", recompute {layout.recompute}" if layout.recompute != "none" else ""
    )
    options = StepOptions(agree=terms.get("clip", False), costs=costs)
    program, free = _built(layout, plain_pieces(pieces), terms, options)
    return StepProgram(
        title, program, costs, stages, layout.chunks, notes, free
    )


def _of_run_step(step: RunStep, terms: StepTerms) -> StepProgram:
    """Return the step that a run executes. Costs price it and do not change it."""
    layout, shape = step.layout, step.shape
    kinds = costs_of(terms.get("costs"), split=layout.splits_backward)
    # A piece costs its share of an average stage by multiply-adds, and an operation on
    # a unit its share by weights.
    rows = step.pieces.rows
    work, weights = (
        [piece_work(row, shape) for row in rows],
        [row.numel for row in rows],
    )
    costs = Costs(
        kinds,
        share={p: layout.pp * w / sum(work) for p, w in enumerate(work)},
        pieces={
            (kind, p): kinds[kind] * layout.pp * w / sum(weights)
            for kind in set(ops.ON_UNIT) & set(kinds)
            for p, w in enumerate(weights)
        },
    )
    program, free = _built(layout, step.pieces, terms, step.options)
    title = f"{str(layout) or 'one rank'} on {shape.name}"
    title += f", {step.optimizer}" if step.optimizer != ADAMW else ""
    return StepProgram(
        title, program, costs, layout.pp, layout.chunks, free=free
    )


def _step_asked(
    what: object, model: str | Shape | type, terms: StepTerms
) -> RunStep:
    """Return the step of a run or a layout; refuse an illegal one with the nearest
    legal ones."""
    if given := _given(terms, OF_A_SCHEDULE):
        raise UsageError(
            f"{given} is part of the layout; write it there, as in 'dp2 pp2 zero3 1f1b:4'."
        )
    # 0 and "" stand for the run's or the model's own values.
    batch, sequence = terms.get("batch", 0), terms.get("seq", 0)
    optimizer = terms.get("optimizer", "")
    if (run := run_named(what, model)) is not None:
        refuse_beside_run(batch=batch, seq=sequence, optimizer=optimizer)
        step = step_of_run(run)
    else:
        step = step_of_layout(
            str(what),
            model,
            optimizer=optimizer,
            batch=batch,
            sequence=sequence,
        )
    # Both are refused before anything is drawn: first what no layout allows,
    # then what this module forbids.
    refuse_illegal(
        step.layout, step.shape, batch=step.batch, sequence=step.sequence
    )
    step.refuse_unfit()
    return step


def _priced(step: RunStep, terms: StepTerms) -> Picture:
    """Return the step of a layout with planned times in seconds; one rank stands for
    equal ones."""
    # A price in seconds comes from the planner, which knows neither unit costs
    # nor limits.
    if given := _given(terms, ("costs", "memory_limit", "clip")):
        raise UsageError(
            f"{given} cannot be combined with --cluster, which prices the step itself."
        )
    layout, shape = step.layout, step.shape
    hardware = where(terms["cluster"], None, layout.ranks).hardware
    request = request_for(
        shape,
        hardware,
        batch=step.batch,
        sequence=step.sequence,
        model=step.model,
        optimizer=step.optimizer,
    )
    # As `plan` does: an unnamed precision is that of the device.
    if not step.has_precision:
        layout = replace(layout, precision=request.precision)
    pricer = Pricer(replace(request, precision=layout.precision))
    title = f"{layout} on {shape.name}, {hardware.name}"
    return Picture(
        title, pricer.timeline(layout, layout.microbatches), clock="s"
    )


def _given(terms: StepTerms, names: Iterable[str]) -> str:
    """Return the first of these options that was given, as spelled on the command
    line."""
    given = [
        # False is the default of a switch, and 0 a value that was given.
        n
        for n in names
        if (value := terms.get(n)) is not None and value is not False
    ]
    return f"--{given[0].replace('_', '-')}" if given else ""


def _of_program(title: str, program: Program, terms: StepTerms) -> StepProgram:
    check(program)
    stages = program.mesh.of("pp")
    # A program with separate gradients costs each 1, and any other backward 2.
    gradients = (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)
    split = any(op.kind in gradients for row in program.rows for op in row)
    share = dict.fromkeys(
        range(program.pieces), stages / max(1, program.pieces)
    )
    costs = Costs(costs_of(terms.get("costs"), split=split), share=share)
    return StepProgram(
        title, program, costs, stages, max(1, program.pieces // stages)
    )


def costs_of(
    times: Mapping[str, float] | str | None, *, split: bool
) -> dict[str, float]:
    """Parse the times in `F=1,B=2,send=0.1`. By default, backward costs twice the
    forward."""
    if times is None:
        if split:
            return dict.fromkeys(
                (ops.FORWARD, ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT), 1.0
            )
        # The backward of a matmul has two products of the size of the
        # forward's.
        return {ops.FORWARD: 1.0, ops.BACKWARD: 2.0}
    # A drop takes no time, and both ends of a message share the name "send".
    kinds = (
        *(kind for kind in KINDS if kind not in (ops.DROP, *ops.MESSAGES)),
        "send",
    )
    costs: dict[str, float] = {}
    text = (
        times
        if isinstance(times, str)
        else ",".join(f"{k}={times[k]}" for k in times)
    )
    for word in text.split(","):
        kind, equals, value = word.strip().partition("=")
        if kind not in kinds or not equals:
            raise UsageError(
                f"--costs: {word.strip()!r} is not KIND=TIME. Kinds are {', '.join(kinds)};"
                " write --costs F=1,B=2,send=0.1."
            )
        if kind in costs:
            raise UsageError(
                f"--costs: {kind} appears twice in {text!r}; write it once."
            )
        try:
            costs[kind] = float(value)
        except ValueError:
            raise UsageError(
                f"--costs: {value!r} in {word.strip()!r} is not a number."
            ) from None
        # This comparison is false for NaN, too.
        if not 0 <= costs[kind] < float("inf"):
            raise UsageError(
                f"--costs: {word.strip()!r}; a time is 0 or more, and finite."
            )
    if not any(costs.get(kind) for kind in (ops.FORWARD, *ops.BACKWARDS)):
        raise UsageError(
            f"--costs {text}: nothing takes time; set F and B, or F, I and W."
        )
    return costs


def _built(
    layout: Layout,
    pieces: StagedPieces,
    terms: StepTerms,
    options: StepOptions,
) -> tuple[Program, Program | None]:
    """Build the program and, for several steps with a gradient norm, also the one
    without."""
    limit, fitting = terms.get("memory_limit"), layout.recompute == "fit"
    if (
        limit is not None
        and not traits(layout.schedule).searched
        and not fitting
    ):
        raise UsageError(
            f"--memory-limit is for the schedule {SEARCHED!r} (microbatches that a stage may hold)"
            " and for recompute fit (pieces whose activations it may hold whole)."
        )
    if limit is None and fitting:
        raise UsageError(
            "recompute fit needs --memory-limit: the number of pieces that a stage may hold."
        )
    count = len(pieces)
    options = replace(
        options,
        # In pieces: each counts 1 for kept activations and 0 for its input.
        sizes=Sizes(kept=(1.0,) * count, input=(0.0,) * count)
        if fitting
        else None,
        limit=float("inf") if limit is None else limit,
        held=None if limit is None else (limit,) * layout.pp,
    )
    # Only over several steps is there a next step that the norm could delay.
    compared = options.agree and (terms.get("repeat") or 1) > 1
    free = (
        build(layout, pieces, replace(options, agree=False))
        if compared
        else None
    )
    return build(layout, pieces, options), free


def _spread(layers: int | None, stages: int) -> tuple[range, ...]:
    """Divide layers among virtual stages as evenly as possible, earlier stages
    first."""
    layers = layers or stages
    if layers < stages:
        raise UsageError(
            f"--layers {layers} cannot fill {stages} stages; use {stages} or more."
        )
    # 5 layers on 4 stages: ceil(5 i / 4) = 0, 2, 3, 4, 5.
    ends = [-(-layers * i // stages) for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


def many(count: int, what: str) -> str:
    """Format a count with its noun: 1 microbatch, 2 microbatches, 3 ranks."""
    plural = (
        what if count == 1 else f"{what}{'es' if what.endswith('h') else 's'}"
    )
    return f"{count} {plural}"


def _barrier(
    step: StepProgram, timeline: Timeline, steps: int
) -> tuple[str, ...]:
    """Describe the cost of the gradient norm over several steps, measured by leaving it
    out."""
    if step.free is None or steps == 1:
        return ()
    free = simulated(repeat(step.free, steps), step.costs).makespan
    # A tie but for rounding.
    if free >= timeline.makespan - 1e-9:
        return ()
    return (
        "the gradient norm is a barrier: no stage updates before all know it, so the next step"
        f" cannot begin in this one's idle time. Without it the {steps} steps take {free:.4g}, not"
        f" {timeline.makespan:.4g}: the barrier undoes the gain.",
    )
