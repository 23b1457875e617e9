"""`phalanx draw`: a step, a mesh, or what recomputation costs, as a picture or a table.

A step is a schedule with options, a layout, a program file, or a step that ran. Whatever the words
were, they become one Program with its costs, which is checked, simulated and shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ..draw import MeshPicture, Picture, chrome, mesh_svg, mesh_text, page, svg, text, text_table
from ..layout import Layout, LayoutError, Mesh, Shape, stage_pieces
from ..layout.choices import CHUNKS, SCHEDULES, SEARCHED, traits
from ..layout.source import names_source
from ..program import (
    KINDS,
    Costs,
    Program,
    Recorded,
    Sizes,
    Timeline,
    build,
    check,
    ops,
    repeat,
    schedule,
    simulate,
)
from .before import refuse_illegal
from .usage import (
    Parser,
    UsageError,
    flags,
    print_json,
    read,
    real,
    result,
    say,
    screen,
    whole,
    write,
)

MOST = 4096  # ranks of the picture of a mesh

_EPILOG = """\
WHAT is one of
  a schedule       {schedules},
                   or your own as file.py:function
  a layout         "dp2 pp2 zero3 1f1b:4", with --model
  program FILE     a program saved with --out step.txt, perhaps edited
  run FILE         a step that ran, over its prediction: phalanx draw run --help
  mesh LAYOUT      coordinates and groups of ranks: phalanx draw mesh --help
  recompute        what recomputation costs: phalanx draw recompute --help

Costs are per stage: a stage of several chunks or layers spends them over all of these. B left out
costs what I and W cost together, R left out what F does; any other kind left out costs nothing.

  phalanx draw interleaved --stages 4 --microbatches 8 --chunks 2
  phalanx draw accum --layers 4 --zero 3 --costs F=4,B=8,G=4,S=4,U=2
  phalanx draw searched --costs F=1,I=1,W=1 --memory-limit 4 --out best.svg
"""
_SCHEDULE = (
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
_FORMATS: dict[str, Callable[[Picture], str]] = {".svg": svg, ".html": page, ".json": chrome}


def run(argv: list[str]) -> int:
    """Draw what the words name."""
    others = {"mesh": _mesh, "recompute": _recompute, "run": _recorded}
    if argv and argv[0] in others:
        return others[argv[0]](argv[1:])
    args = _parser().read(argv)
    step = _step(args)
    picture = _picture(step, args)
    formats = {**_FORMATS, ".txt": lambda _: str(step.program)}
    if args.out:
        write(args.out, formats, picture)
    _show(args, picture, _figures(step, picture, args.repeat) if args.json else {})
    return 0


def _parser() -> Parser:
    epilog = _EPILOG.format(schedules=" ".join(SCHEDULES))
    parser = Parser("phalanx draw", "Simulate a training step and show it.", epilog)
    add = parser.add
    add("what", nargs="+", metavar="WHAT", help="what to draw; see below")
    parser.section("a schedule by itself")
    add("--stages", type=whole(1, 4096), metavar="P", help="pipeline stages; default 4")
    add("--microbatches", help="of a step; default 8")
    add("--chunks", type=whole(1, CHUNKS), metavar="V", help="of the model on each stage")
    add("--layers", help="pieces, spread evenly; default one per chunk")
    add("--zero", type=int, choices=range(4), help="shard over two copies; default 0, nothing")
    add("--gather", choices=("step", "micro"), help="weights once a step, or for each use")
    add("--reduce", choices=("step", "micro"), help="gradients once, or per microbatch")
    add("--prefetch", type=whole(0), metavar="N", help="gather N units ahead; default 1")
    add("--recompute", metavar="MODE", help="none, all, every=C, sqrt or fit")
    parser.section("a layout")
    add("--model")
    add("--batch")
    add("--seq")
    parser.section("all of them")
    add("--costs", metavar="K=T,...", help="as F=1,B=2 or F=1,I=1,W=1,send=0.1; also R P G S U ...")
    add(
        "--memory-limit",
        type=real(),
        metavar="N",
        help="searched: microbatches a stage may hold; recompute fit: pieces",
    )
    add("--clip", action="store_true", help="clip gradients: all agree before any update")
    add("--repeat", type=whole(1, 10_000), default=1, metavar="N", help="steps in a row")
    _add_picture(
        parser, (*_FORMATS, ".txt"), ".svg, .html, .json (for Perfetto), .txt (the program)"
    )
    return parser


def _add_picture(parser: Parser, suffixes: Sequence[str], help: str) -> None:
    """How every picture is shown."""
    parser.add(
        "--width", type=whole(24, 10_000), metavar="N", help="columns; default the terminal's"
    )
    parser.add_output("--out", *suffixes, help=help)
    parser.add("--json", help="figures, program and timeline as JSON")


def _show(args: argparse.Namespace, picture: Picture, figures: Mapping[str, object]) -> None:
    """What the command prints of a step, once its file is written."""
    if args.json:
        print_json(figures)
    elif args.out:
        say("\n".join((picture.title, *picture.summary, *picture.notes, f"wrote {args.out}")))
    else:
        width, colour = screen(args.width)
        say(text(picture, width=width, colour=colour), end="", colour=colour)


# ---- a step


@dataclass(frozen=True)
class _Step:
    """One training step: its program, what its operations cost, and what it is called."""

    title: str
    program: Program
    costs: Costs
    stages: int
    chunks: int = 1
    notes: tuple[str, ...] = ()
    free: Program | None = None  # the same without the agreement of clipping, where there is one


def _step(args: argparse.Namespace) -> _Step:
    name = " ".join(args.what)
    if args.what[0] == "program":
        if len(args.what) != 2:
            raise UsageError(
                "`phalanx draw program` takes one file: phalanx draw program step.txt."
            )
        return _of_file(args.what[1], args)
    if args.model:
        return _of_layout(name, args)
    if name not in SCHEDULES and _is_layout(name):
        raise UsageError(f"the layout {name!r} needs a model: add --model 124m, or another shape.")
    return _of_schedule(name, args)


def _is_layout(text: str) -> bool:
    """Whether a text that is no schedule's name reads as a layout."""
    try:
        return not names_source(Layout.parse(text).schedule)
    except LayoutError:
        return " " in text


def _of_schedule(name: str, args: argparse.Namespace) -> _Step:
    """The step of a bare schedule: its stages are the only ranks."""
    if name not in SCHEDULES and not names_source(name):
        schedule(name, 1, 1)  # refuses it, with the nearest name
    kind = traits(name)
    stages = args.stages or (4 if kind.pipelined else 1)
    microbatches = args.microbatches or 8
    notes: tuple[str, ...] = ()
    if kind.whole_batch and microbatches > 1:
        microbatches = 1
        notes = (f"{name} sharding takes the batch whole, as one microbatch",)
    layout = Layout(
        # ZeRO shards over copies, so there have to be two; they follow the same rows.
        mesh=Mesh.parse(f"dp2 pp{stages}" if args.zero else f"pp{stages}"),
        zero=args.zero or 0,
        schedule=name,
        chunks=args.chunks or 0,
        microbatches=microbatches,
        gather=args.gather or "",
        reduce=args.reduce or "",
        prefetch=1 if args.prefetch is None else args.prefetch,
        recompute=args.recompute or "none",
    )
    pieces = _spread(args.layers, layout.virtual_stages)
    layers = pieces[-1].stop
    costs = Costs(
        _costs_of(args.costs, split=layout.splits_backward),
        share=dict.fromkeys(range(layers), stages / layers),
    )
    title = f"{name}: {_many(stages, 'stage')}, {_many(microbatches, 'microbatch')}"
    title += f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    title += f", zero{layout.zero}" if layout.zero else ""
    title += f", recompute {layout.recompute}" if layout.recompute != "none" else ""
    program, free = _built(layout, pieces, (), args, costs)
    return _Step(title, program, costs, stages, layout.chunks, notes, free)


def _of_layout(text: str, args: argparse.Namespace) -> _Step:
    """The step of a layout for a model; an illegal one is refused with the nearest that is not."""
    if given := flags(args, _SCHEDULE):
        raise UsageError(
            f"{given[0]} is part of the layout; write it there, as in 'dp2 pp2 zero3 1f1b:4'."
        )
    layout, shape = Layout.parse(text), Shape.load(args.model)
    refuse_illegal(layout, shape, batch=args.batch or 0, sequence=args.seq or 0)
    kinds = _costs_of(args.costs, split=layout.splits_backward)
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
    title = f"{str(layout) or 'one rank'} on {shape.name}"
    return _Step(title, program, costs, layout.pp, layout.chunks, free=free)


def _of_file(path: str, args: argparse.Namespace) -> _Step:
    """The step of a program file, checked."""
    if given := flags(args, (*_SCHEDULE, "model", "batch", "seq", "memory_limit", "clip")):
        raise UsageError(f"{given[0]} does not go with a program file, which is the step itself.")
    program = Program.parse(read(path, "program"), path)
    check(program)
    stages = program.mesh.of("pp")
    split = any(
        op.kind in (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT) for row in program.rows for op in row
    )
    share = dict.fromkeys(range(program.pieces), stages / max(1, program.pieces))
    costs = Costs(_costs_of(args.costs, split=split), share=share)
    return _Step(path, program, costs, stages, max(1, program.pieces // stages))


def _costs_of(text: str | None, *, split: bool) -> dict[str, float]:
    """The times in `F=1,B=2,send=0.1`; left out, backward costs twice the forward."""
    if text is None:
        if split:
            return dict.fromkeys((ops.FORWARD, ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT), 1.0)
        return {ops.FORWARD: 1.0, ops.BACKWARD: 2.0}
    kinds = (*(kind for kind in KINDS if kind not in (ops.DROP, *ops.MESSAGES)), "send")
    costs: dict[str, float] = {}
    for word in text.split(","):
        kind, equals, value = word.strip().partition("=")
        if kind not in kinds or not equals:
            raise UsageError(
                f"--costs: {word.strip()!r} is not KIND=TIME. Kinds are {', '.join(kinds)};"
                " write --costs F=1,B=2,send=0.1."
            )
        if kind in costs:
            raise UsageError(f"--costs: {kind} stands twice in {text!r}; write it once.")
        try:
            costs[kind] = float(value)
        except ValueError:
            raise UsageError(f"--costs: {value!r} in {word.strip()!r} is not a number.") from None
        if not 0 <= costs[kind] < float("inf"):
            raise UsageError(f"--costs: {word.strip()!r}; a time is 0 or more, and finite.")
    if not any(costs.get(kind) for kind in (ops.FORWARD, *ops.BACKWARDS)):
        raise UsageError(f"--costs {text}: nothing takes time; give F and B, or F, I and W.")
    return costs


def _built(
    layout: Layout,
    pieces: Sequence[range],
    tied: tuple[tuple[int, int], ...],
    args: argparse.Namespace,
    costs: Costs,
) -> tuple[Program, Program | None]:
    """The program, and with clipping also the one without."""
    limit, fitting = args.memory_limit, layout.recompute == "fit"
    if limit is not None and not traits(layout.schedule).searched and not fitting:
        raise UsageError(
            f"--memory-limit is for the schedule {SEARCHED!r} (microbatches that a stage may hold)"
            " and for recompute fit (pieces whose activations it may hold whole)."
        )
    if limit is None and fitting:
        raise UsageError("recompute fit needs --memory-limit: how many pieces a stage may hold.")
    count = pieces[-1].stop
    step = partial(
        build,
        layout,
        pieces,
        tied,
        costs=costs,
        sizes=Sizes(kept=(1.0,) * count, input=(0.0,) * count) if fitting else None,
        limit=float("inf") if limit is None else limit,
        held=None if limit is None else [limit] * layout.pp,
    )
    return step(agree=args.clip), step() if args.clip else None


def _spread(layers: int | None, stages: int) -> tuple[range, ...]:
    """Layers over virtual stages as evenly as can be, the earlier ones longer."""
    layers = layers or stages
    if layers < stages:
        raise UsageError(
            f"--layers {layers} cannot fill {stages} stages with one each; use {stages} or more."
        )
    ends = [-(-layers * i // stages) for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


def _many(count: int, what: str) -> str:
    plural = what if count == 1 else f"{what}{'es' if what.endswith('h') else 's'}"
    return f"{count} {plural}"


def _picture(step: _Step, args: argparse.Namespace) -> Picture:
    proof = check(step.program)
    # A page and a trace show memory over time; in pieces, as their bytes are not known here.
    counted = args.out and args.out.endswith((".html", ".json"))
    sizes = Sizes.counts(step.program.pieces) if counted else None
    timeline = simulate(repeat(step.program, args.repeat), step.costs, sizes)
    title = step.title + (f", {args.repeat} steps" if args.repeat > 1 else "")
    notes = (*step.notes, *_barrier(step, timeline, args.repeat))
    return Picture(title, timeline, held=proof.held, notes=notes, unit="pieces and units")


def _barrier(step: _Step, timeline: Timeline, steps: int) -> tuple[str, ...]:
    """What the agreement of clipping costs over several steps, measured by leaving it out."""
    if step.free is None or steps == 1:
        return ()
    free = simulate(repeat(step.free, steps), step.costs).makespan
    if free >= timeline.makespan - 1e-9:
        return ()
    return (
        "clipping is a barrier: no stage updates before all have agreed on the norm, so the next step"
        f" cannot begin in this one's idle time. Without it the {steps} steps take {free:.4g}, not"
        f" {timeline.makespan:.4g}: the barrier takes the gain away.",
    )


def _figures(step: _Step, picture: Picture, steps: int) -> dict[str, object]:
    return {
        "title": picture.title,
        "stages": step.stages,
        "microbatches": step.program.microbatches,
        "chunks": step.chunks,
        "steps": steps,
        "ideal": picture.timeline.ideal,
        **_times(picture.timeline),
        "peak_held": list(picture.held),
        "notes": list(picture.notes),
        "program": str(step.program),
    }


def _times(timeline: Timeline) -> dict[str, object]:
    return {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "inner_idle": [timeline.inner_idle(rank) for rank in timeline.ranks],
        "exposed": [timeline.exposed(rank) for rank in timeline.ranks],
        "timeline": timeline.to_json(),
    }


# ---- a step that ran

_RUN = """\
The file is what a step leaves that was carried out: `phalanx verify --layouts "pp2 1f1b:4" --record
step.json` writes one. The prediction is simulated with that run's own median costs, so what differs
between the two is the waiting.

  phalanx draw run step.json
  phalanx draw run step.json --out step.html"""


def _recorded(argv: list[str]) -> int:
    """The measured timeline of a real step over the predicted one."""
    parser = Parser("phalanx draw run", "A step that ran, over its prediction.", _RUN)
    parser.add("file", metavar="FILE", help="the recorded step")
    _add_picture(parser, tuple(_FORMATS), ".svg, .html or .json (a trace)")
    args = parser.read(argv)
    recorded = Recorded.parse(read(args.file, "recorded step"))
    held = check(recorded.program).held
    predicted, measured = recorded.predicted(), recorded.measured()
    note = (
        f"bubble: {predicted.bubble_fraction:.1%} predicted, {measured.bubble_fraction:.1%} measured;"
        f" step: {predicted.makespan:.4g} s predicted, {measured.makespan:.4g} s measured."
    )
    title = f"a step on {recorded.program.mesh.size} ranks, predicted and measured"
    picture = Picture(title, predicted, measured, held=held, notes=(note,), clock="s")
    if args.out:
        write(args.out, _FORMATS, picture)
    both = {"predicted": _times(predicted), "measured": _times(measured)}
    _show(args, picture, {**both, "program": str(recorded.program)})
    return 0


# ---- a mesh

_MESH = """\
  phalanx draw mesh "dp2 pp2 tp2"
  phalanx draw mesh "dp2 tp4 zero3" --weight "kv=1024/128 embed=4096"

A dim of a weight is heads, kv, ffn or vocab, which tp cuts, or embed, head, position, which it does
not. With zero3 each rank keeps a flat shard of what tp leaves it."""


def _mesh(argv: list[str]) -> int:
    """The coordinates of each rank, its groups, and how a weight is cut over them."""
    parser = Parser("phalanx draw mesh", "The coordinates and the groups of each rank.", _MESH)
    parser.add("layout", nargs="+", metavar="LAYOUT", help='as "dp2 pp2 tp2"')
    parser.add("--weight", default="", metavar="DIMS", help='as "heads=4096 embed=4096"')
    _add_picture(parser, (".svg",), "write the picture as SVG")
    args = parser.read(argv)
    picture = MeshPicture.parse(" ".join(args.layout), args.weight)
    if picture.mesh.size > MOST:
        raise UsageError(
            f"{picture.mesh.size} ranks are too many for a picture; draw {MOST} or fewer."
        )
    if args.out:
        write(args.out, {".svg": mesh_svg}, picture)
    if args.json:
        groups = {axis: [list(g) for g in picture.mesh.groups([axis])] for axis in picture.axes}
        ranks = [_of_rank(picture, rank) for rank in range(picture.mesh.size)]
        print_json({"layout": str(picture.layout), "ranks": ranks, "groups": groups})
    elif args.out:
        say(f"{picture.title}\nwrote {args.out}")
    else:
        say(mesh_text(picture, width=screen(args.width)[0]), end="")
    return 0


def _of_rank(picture: MeshPicture, rank: int) -> dict[str, object]:
    figures: dict[str, object] = {"rank": rank, "coordinates": picture.mesh.coordinates(rank)}
    if picture.weight:
        part = picture.part(rank)
        figures["part"] = {
            name: [cut.start, cut.stop]
            for (name, _, _), cut in zip(picture.weight, part.cuts, strict=True)
        }
        figures["shard"] = [part.shard.start, part.shard.stop] if part.shard else None
    return figures


# ---- recomputation


def _recompute(argv: list[str]) -> int:
    """What each way to recompute costs in time and saves in memory. Every line is a program that was
    built, checked and simulated: one stage of N layers, one microbatch. Nothing in it is a formula."""
    parser = Parser(
        "phalanx draw recompute", "Time and space of recomputation on one stage, one microbatch."
    )
    parser.add("--layers", default=16, help="of the stage")
    parser.add("--costs", metavar="K=T,...", help="of one layer; default F=1,B=2")
    parser.add("--json")
    args = parser.read(argv)
    costs = Costs(_costs_of(args.costs, split=False))
    modes = ["none", "all", *(f"every={2**k}" for k in range(1, args.layers.bit_length())), "sqrt"]
    table = [_recomputing(mode, args.layers, costs) for mode in modes]
    for line in table:
        line["against_none"] = line["time"] / table[0]["time"]
    head = ("recompute", "recomputed", "time", "against none", "peak", "pieces", "inputs")
    formats = ("", ".4g", ".3f", ".4g", ".4g", ".4g")
    rows = [
        [mode, *map(format, line.values(), formats)]
        for mode, line in zip(modes, table, strict=True)
    ]
    lines = [{"recompute": mode, **line} for mode, line in zip(modes, table, strict=True)]
    result(
        args,
        {"layers": args.layers, "table": lines},
        f"{args.layers} layers on one stage, one microbatch; the peak counts what is held at once\n\n"
        f"{text_table(head, rows)}\n"
        "pieces: layers whose every activation is held; inputs: layers of which only the input is",
    )
    return 0


def _recomputing(mode: str, layers: int, costs: Costs) -> dict[str, float]:
    """Forwards computed again, time, and what is held at the peak."""
    sizes = Sizes(kept=(1.0,) * layers, input=(1.0,) * layers)
    program = build(Layout(recompute=mode), [range(layers)])
    proof = check(program, sizes)
    peak = (proof.bytes or proof.counts)[0]
    return {
        "recomputed": sum(op.kind == ops.RECOMPUTE for op in program.rows[0]),
        "time": simulate(program, costs).makespan,
        "against_none": 1.0,
        "peak": peak.total,
        "pieces": peak.then.get("activations", 0.0),
        "inputs": peak.then.get("inputs", 0.0),
    }
