"""A training step as the command line names it: a schedule with flags, a layout, or a program file.

Whatever the words were, they become one Program with its costs; drawing and checking read that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ..layout import Layout, LayoutError, Mesh, Shape, legal, nearest, stage_pieces
from ..layout.source import names_source
from ..program import KINDS, SCHEDULES, Costs, Program, Sizes, build, check, ops, schedule
from .usage import UsageError, flags, read

__all__ = ["Step", "costs_of", "of_file", "of_layout", "of_schedule", "refuse_illegal"]

_SCHEDULE_FLAGS = (
    "stages",
    "microbatches",
    "chunks",
    "layers",
    "zero",
    "gather",
    "reduce",
    "prefetch",
    "recompute",
)
_FREE = (ops.DROP, *ops.MESSAGES)
_KINDS = (*(kind for kind in KINDS if kind not in _FREE), "send")


@dataclass(frozen=True)
class Step:
    """One training step: its program, what its operations cost, and what it is called."""

    title: str
    program: Program
    costs: Costs
    stages: int
    chunks: int = 1
    notes: tuple[str, ...] = ()
    free: Program | None = None  # the same without the agreement of clipping, where there is one


def costs_of(text: str | None, *, split: bool) -> dict[str, float]:
    """The times that `F=1,B=2,send=0.1` names; left out, backward costs twice the forward."""
    if text is None:
        split_costs = {ops.FORWARD: 1.0, ops.INPUT_GRADIENT: 1.0, ops.WEIGHT_GRADIENT: 1.0}
        return split_costs if split else {ops.FORWARD: 1.0, ops.BACKWARD: 2.0}
    found: dict[str, float] = {}
    for word in text.split(","):
        kind, equals, value = word.strip().partition("=")
        if kind not in _KINDS or not equals:
            raise UsageError(
                f"--costs: {word.strip()!r} is not KIND=TIME. Kinds are {', '.join(_KINDS)};"
                " write --costs F=1,B=2,send=0.1."
            )
        if kind in found:
            raise UsageError(f"--costs: {kind} stands twice in {text!r}; say it once.")
        try:
            found[kind] = float(value)
        except ValueError:
            raise UsageError(f"--costs: {value!r} in {word.strip()!r} is not a number.") from None
        if not 0 <= found[kind] < float("inf"):
            raise UsageError(f"--costs: {word.strip()!r}; a time is 0 or more, and finite.")
    if not any(found.get(kind) for kind in (ops.FORWARD, *ops.BACKWARDS)):
        raise UsageError(f"--costs {text}: nothing takes time; give F and B, or F, I and W.")
    return found


def of_schedule(name: str, args: argparse.Namespace) -> Step:
    """The step of a bare schedule: its stages are the only ranks."""
    if name not in (*SCHEDULES, "searched") and not names_source(name):
        schedule(name, 1, 1)  # refuses it, with the nearest name
    stages = _count("stages", args.stages, 1 if name == "accum" else 4)
    microbatches = _count("microbatches", args.microbatches, 8)
    notes: tuple[str, ...] = ()
    if name == "naive" and microbatches > 1:
        microbatches = 1
        notes = ("naive sharding takes the batch whole, as one microbatch",)
    layout = Layout(
        # ZeRO shards over copies, so there have to be two; they follow the same rows.
        mesh=Mesh.parse(f"dp2 pp{stages}" if args.zero else f"pp{stages}"),
        zero=args.zero or 0,
        schedule=name,
        chunks=0 if args.chunks is None else _count("chunks", args.chunks, 1),
        microbatches=microbatches,
        gather=args.gather or "",
        reduce=args.reduce or "",
        prefetch=1 if args.prefetch is None else args.prefetch,
        recompute=args.recompute or "none",
    )
    pieces = _spread(args.layers, layout.virtual_stages)
    layers = pieces[-1].stop
    costs = Costs(
        costs_of(args.costs, split=layout.splits_backward),
        share=dict.fromkeys(range(layers), stages / layers),
    )
    title = f"{name}: {_many(stages, 'stage')}, {_many(microbatches, 'microbatch')}"
    title += f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    title += f", zero{layout.zero}" if layout.zero else ""
    title += f", recompute {layout.recompute}" if layout.recompute != "none" else ""
    program, free = _built(layout, pieces, (), args, costs)
    return Step(title, program, costs, stages, layout.chunks, notes, free)


def of_layout(text: str, args: argparse.Namespace) -> Step:
    """The step of a layout for a model; an illegal one is refused with the nearest that is not."""
    if given := flags(args, _SCHEDULE_FLAGS):
        raise UsageError(
            f"{given[0]} is args by the layout; write it there, as in 'dp2 pp2 zero3 1f1b:4'."
        )
    layout, shape = Layout.parse(text), Shape.load(args.model)
    refuse_illegal(layout, shape, batch=args.batch or 0, sequence=args.seq or 0)
    kinds = costs_of(args.costs, split=layout.splits_backward)
    # What a piece costs: its part of an average stage, by multiply-adds; what is done with a unit,
    # by its weights.
    work, weights = ([f(p) for p in range(shape.pieces)] for f in (shape.cost, shape.parameters))
    costs = Costs(
        kinds,
        share={p: layout.pp * w / sum(work) for p, w in enumerate(work)},
        pieces={
            (kind, p): kinds[kind] * layout.pp * w / sum(weights)
            for kind in ops.ON_UNIT
            if kind in kinds
            for p, w in enumerate(weights)
        },
    )
    tied = ((shape.pieces - 1, 0),) if shape.tied else ()
    program, free = _built(layout, stage_pieces(layout, shape), tied, args, costs)
    title = f"{layout} on {shape.name}" if str(layout) else f"one rank on {shape.name}"
    return Step(title, program, costs, layout.pp, layout.chunks, free=free)


def of_file(path: str, args: argparse.Namespace) -> Step:
    """The step that a program file tells, checked."""
    if given := flags(args, (*_SCHEDULE_FLAGS, "model", "batch", "seq", "memory_limit", "clip")):
        raise UsageError(f"{given[0]} does not go with a program file, which is the step itself.")
    program = Program.parse(read(path, "program"), path)
    check(program)
    stages = program.mesh.of("pp")
    split = any(
        op.kind in (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT) for row in program.rows for op in row
    )
    share = stages / max(1, program.pieces)
    costs = Costs(
        costs_of(args.costs, split=split), share=dict.fromkeys(range(program.pieces), share)
    )
    chunks = max(1, program.pieces // stages)
    return Step(path, program, costs, stages, chunks)


def refuse_illegal(layout: Layout, shape: Shape, *, batch: int, sequence: int) -> None:
    """Raise with every reason why a layout does not fit, and what would."""
    found = legal(layout, shape, batch=batch, sequence=sequence)
    if found:
        near = nearest(layout, shape, batch=batch, sequence=sequence)
        way = f"\nNearest that fit: {'; '.join(map(str, near))}." if near else ""
        reasons = "".join(f"\n- {violation}" for violation in found)
        raise LayoutError(f"{layout} does not fit {shape.name}:{reasons}{way}")


def _built(
    layout: Layout,
    pieces: Sequence[range],
    tied: tuple[tuple[int, int], ...],
    args: argparse.Namespace,
    costs: Costs,
) -> tuple[Program, Program | None]:
    """The program, and with clipping also the one without."""
    limit = args.memory_limit
    if limit is not None and layout.schedule != "searched" and layout.recompute != "fit":
        raise UsageError(
            "--memory-limit is for the schedule 'searched' (microbatches that a stage may hold) and"
            " for recompute fit (pieces whose activations it may hold whole)."
        )
    sizes = None
    if layout.recompute == "fit":
        if limit is None:
            raise UsageError(
                "recompute fit needs --memory-limit: how many pieces a stage may hold."
            )
        count = pieces[-1].stop
        sizes = Sizes(kept=(1.0,) * count, input=(0.0,) * count)
    step = partial(
        build,
        layout,
        pieces,
        tied,
        costs=costs,
        sizes=sizes,
        limit=float("inf") if limit is None else limit,
        held=None if limit is None else [limit] * layout.pp,
    )
    return step(agree=args.clip), step() if args.clip else None


def _spread(layers: int | None, stages: int) -> tuple[range, ...]:
    """Layers over virtual stages as evenly as can be, the earlier ones longer."""
    layers = stages if layers is None else layers
    if layers < stages:
        raise UsageError(
            f"--layers {layers} cannot fill {stages} stages with one each; use {stages} or more."
        )
    ends = [-(-layers * i // stages) for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


def _count(name: str, number: int | None, default: int) -> int:
    if number is None:
        return default
    if number < 1:
        raise UsageError(f"--{name} is {number}; a schedule needs 1 or more.")
    return number


def _many(count: int, what: str) -> str:
    plural = what if count == 1 else f"{what}{'es' if what.endswith('h') else 's'}"
    return f"{count} {plural}"
