"""`phalanx draw`: draws a simulated step, a mesh, or the cost of recomputation, as a
picture or a table. The step is that of a schedule with options, of a layout, of a
program file, or one that ran.

WHAT is one of
  a schedule       {schedules},
                   or your own as file.py:function
  a layout         "dp2 pp2 zero3 1f1b:4", with --model
  RUN.toml         a run file, and key=value, as `phalanx train` takes them
  program FILE     a program saved with --out step.txt, perhaps edited
  run FILE         a step that ran, over its prediction: phalanx draw run --help
  mesh LAYOUT      coordinates and groups of ranks: phalanx draw mesh --help
  recompute        what recomputation costs: phalanx draw recompute --help

Costs are per stage and divided among its chunks or layers. By default B costs as much
as I and W together, R as much as F, and any other kind nothing.

  phalanx draw run.toml optimizer.name=muon
  phalanx draw interleaved --stages 4 --microbatches 8 --chunks 2
  phalanx draw accum --layers 4 --zero 3 --costs F=4,B=8,G=4,S=4,U=2
  phalanx draw searched --costs F=1,I=1,W=1 --memory-limit 4 --out best.svg
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any

from ..api.step import StepProgram, StepTerms, costs_of, draw, step_of
from ..drawing import (
    FORMATS,
    MeshPicture,
    Picture,
    mesh_svg,
    mesh_text,
    recorded_picture,
    svg,
    text,
    text_table,
)
from ..layout import Layout, Run, plain_pieces
from ..layout.choices import CHUNKS, SCHEDULES
from ..layout.optimizers import OPTIMIZERS
from ..program import (
    Costs,
    Recorded,
    Sizes,
    StepOptions,
    Timeline,
    build,
    check,
    ops,
    simulate,
)
from .parser import Parser, real, whole
from .run_words import run_of_words
from .usage import (
    UsageError,
    print_json,
    read,
    result,
    save,
    say,
    screen,
    write,
)

MOST = 4096  # maximum ranks in the picture of a mesh


def run(argv: list[str]) -> int:
    others = {"mesh": _mesh, "recompute": _recompute, "run": _recorded}
    if argv and argv[0] in others:
        return others[argv[0]](argv[1:])
    parser = _parser()
    # Words that completion offers in place of a layout.
    parser.subverbs = (*others, "program", *SCHEDULES)
    args = parser.read(argv, intermixed=True)
    args.clip = args.clip or None
    given = {name: getattr(args, name) for name in StepTerms.__annotations__}
    # Options that were not given keep their defaults in `draw`.
    terms: Any = {
        name: value for name, value in given.items() if value is not None
    }
    run = run_of_words(args.what, args.layout)
    what = run or " ".join(args.what)
    # With a cluster, costs are seconds; without one, units.
    if args.cluster and (args.model or run):
        return _priced(args, what, terms)
    step = step_of(what, args.model or "", terms)
    # A page and a trace also show memory over time.
    memory = bool(args.out) and args.out.endswith((".html", ".json"))
    picture = step.picture(args.repeat, memory=memory)
    formats = {**_formats(args), ".txt": lambda _: str(step.program)}
    if args.out:
        write(args.out, formats, picture)
    _show(
        args,
        picture,
        _figures(step, picture, args.repeat) if args.json else {},
    )
    return 0


def _priced(args: argparse.Namespace, what: str | Run, terms: Any) -> int:
    picture = draw(what, args.model or "", **terms)
    assert isinstance(picture, Picture)
    if args.out:
        write(args.out, _formats(args), picture)
    _show(args, picture, {"title": picture.title, **_times(picture.timeline)})
    return 0


def _parser() -> Parser:
    # Names of schedules, wrapped below one another in the help.
    names = fill(" ".join(SCHEDULES), 58).replace("\n", "\n" + 19 * " ")
    parser = Parser(__doc__, schedules=names)
    add = parser.add
    add("what", nargs="+", metavar="WHAT", help="what to draw; see below")
    parser.section("options for a schedule")
    add(
        "--stages",
        type=whole(1, 4096),
        metavar="P",
        help="pipeline stages; default 4",
    )
    add("--microbatches", help="microbatches in a step; default 8")
    add(
        "--chunks",
        type=whole(1, CHUNKS),
        metavar="V",
        help="model chunks on each stage",
    )
    add("--layers", help="layers, divided evenly; default one for each chunk")
    copies = "ZeRO stage over two replicas; default 0"
    add("--zero", type=whole(0), choices=range(4), help=copies)
    add(
        "--gather",
        choices=("step", "micro"),
        help="gather weights once a step, or for each use",
    )
    add(
        "--reduce",
        choices=("step", "micro"),
        help="reduce gradients once a step, or for each microbatch",
    )
    add("--prefetch", type=whole(0), help="gather N units ahead; default 1")
    add("--recompute", metavar="MODE", help="none, all, every=C, sqrt or fit")
    parser.section("options for a layout")
    add("--model")
    add(
        "--layout",
        metavar="TEXT",
        help="the layout of a run file, the same as layout=TEXT",
    )
    add("--batch")
    add("--seq")
    add(
        "--cluster",
        metavar="NAME",
        help="show planned times in seconds, for example on h100x64",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help="optimizer; default: that of the run file, else adamw",
    )
    parser.section("options for all")
    add(
        "--costs",
        metavar="K=T,...",
        help="costs, such as F=1,B=2 or F=1,I=1,W=1,send=0.1; also R P G S U ...",
    )
    held = "for searched: microbatches that a stage may hold; for recompute fit: pieces"
    add("--memory-limit", type=real(), help=held)
    add(
        "--clip",
        action="store_true",
        help="clip gradients by their global norm, as every run can",
    )
    add("--repeat", type=whole(1, 10_000), default=1, help="steps in a row")
    _add_picture(
        parser,
        (*FORMATS, ".txt"),
        ".svg, .html, .json (for Perfetto), .txt (the program)",
    )
    return parser


def _add_picture(parser: Parser, suffixes: Sequence[str], help: str) -> None:
    parser.add(
        "--width",
        help="width in columns of text, or pixels of an .svg; default: what fits",
    )
    parser.add_output("--out", *suffixes, help=help)


def _formats(args: argparse.Namespace) -> dict[str, Callable[[Picture], str]]:
    """File formats by suffix; an SVG alone has the width that was given."""
    width = args.width or 0
    if width and args.out and not args.out.endswith(".svg"):
        raise UsageError(
            f"--width is for text and .svg; {args.out} has no width of its own."
        )
    return {**FORMATS, ".svg": lambda picture: svg(picture, width)}


def _show(
    args: argparse.Namespace, picture: Picture, figures: Mapping[str, object]
) -> None:
    """Prints a step, once its file is written."""
    if args.json:
        print_json(figures)
    elif args.out:
        say(
            "\n".join(
                (
                    picture.title,
                    *picture.summary,
                    *picture.notes,
                    f"wrote {args.out}",
                )
            )
        )
    else:
        width, colour = screen(args.width)
        say(text(picture, width=width, colour=colour), end="", colour=colour)


def _figures(
    step: StepProgram, picture: Picture, steps: int
) -> dict[str, object]:
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


def _recorded(argv: list[str]) -> int:
    """`phalanx draw run`: draws a step that ran over its prediction.

    The file is a recorded step: a run's timeline.json, or the output of `phalanx verify
    --layouts "pp2 1f1b:4" --record step.json`. The prediction is simulated with the
    median costs of that run, so the two differ only in waiting.

      phalanx draw run step.json
      phalanx draw run step.json --out step.html
    """
    from ..report.happened import with_shown_ranks

    parser = Parser(_recorded.__doc__)
    parser.add("file", metavar="FILE", help="the recorded step")
    _add_picture(parser, tuple(FORMATS), ".svg, .html or .json (a trace)")
    args = parser.read(argv)
    recorded = Recorded.parse(read(args.file, "recorded step"))
    predicted, measured = recorded.predicted(), recorded.measured()
    # The prediction has the median costs of this very step.
    picture = with_shown_ranks(recorded_picture(recorded), recorded.program)
    if args.out:
        write(args.out, _formats(args), picture)
    both = {"predicted": _times(predicted), "measured": _times(measured)}
    _show(args, picture, {**both, "program": str(recorded.program)})
    return 0


# ---- a mesh


def _mesh(argv: list[str]) -> int:
    """`phalanx draw mesh`: shows the coordinates of each rank, its groups, and how a
    weight is sharded.

      phalanx draw mesh "dp2 pp2 tp2"
      phalanx draw mesh "dp2 tp4 zero3" --weight "kv=1024/128 embed=4096"

    The dimensions of a weight are heads, kv, ffn or vocab, which tp shards, and embed,
    head or position, which it does not. With zero3 each rank keeps a flat shard of its
    tp part.
    """
    parser = Parser(_mesh.__doc__)
    parser.add(
        "layout", nargs="+", metavar="LAYOUT", help='such as "dp2 pp2 tp2"'
    )
    parser.add(
        "--weight",
        default="",
        metavar="DIMS",
        help='dimensions of a weight, such as "heads=4096 embed=4096"',
    )
    _add_picture(parser, (".svg",), "write the picture as SVG")
    args = parser.read(argv)
    picture = MeshPicture.parse(" ".join(args.layout), args.weight)
    if (ranks := picture.mesh.size) > MOST:
        raise UsageError(
            f"{ranks} ranks are too many for a picture; draw {MOST} or fewer."
        )
    text = mesh_text(picture, width=screen(args.width)[0])
    if args.out:
        drawn = (
            mesh_svg(picture, args.width) if args.width else mesh_svg(picture)
        )
        save(args.out, drawn)
        text = f"{picture.title}\nwrote {args.out}"
    groups = {
        axis: [list(g) for g in picture.mesh.groups([axis])]
        for axis in picture.axes
    }
    figures = {
        "layout": str(picture.layout),
        "ranks": [*map(partial(_of_rank, picture), range(ranks))],
    }
    return result(args, figures | {"groups": groups}, text)


def _of_rank(picture: MeshPicture, rank: int) -> dict[str, object]:
    figures: dict[str, object] = {
        "rank": rank,
        "coordinates": picture.mesh.coordinates(rank),
    }
    if picture.weight:
        cuts, shard = picture.part(rank)
        figures["part"] = {
            name: [cut.start, cut.stop]
            for (name, _, _), cut in zip(picture.weight, cuts, strict=True)
        }
        figures["shard"] = [shard.start, shard.stop] if shard else None
    return figures


# ---- recomputation


def _recompute(argv: list[str]) -> int:
    """`phalanx draw recompute`: shows the time that each recomputation mode costs and
    the memory that it saves. Every line is a program that was built, checked and
    simulated: one stage of N layers, one microbatch."""
    parser = Parser(_recompute.__doc__)
    parser.add("--layers", default=16, help="layers of the stage")
    parser.add(
        "--costs",
        metavar="K=T,...",
        help="costs of one layer; default F=1,B=2",
    )
    args = parser.read(argv)
    costs = Costs(costs_of(args.costs, split=False))
    sizes = Sizes(kept=(1.0,) * args.layers, input=(1.0,) * args.layers)
    table: list[dict[str, Any]] = []
    pieces = plain_pieces([range(args.layers)])
    # every=2, every=4, ... up to all layers.
    every = (f"every={2**k}" for k in range(1, args.layers.bit_length()))
    for mode in ("none", "all", *every, "sqrt"):
        program = build(
            Layout(recompute=mode), pieces, StepOptions(agree=False)
        )
        time, proof = simulate(program, costs).makespan, check(program, sizes)
        # Bytes if sizes say them, else counts.
        peak = (proof.bytes or proof.counts)[0]
        line = {
            "recompute": mode,
            "recomputed": sum(
                op.kind == ops.RECOMPUTE for op in program.rows[0]
            ),
            "time": time,
            "against_none": time / table[0]["time"] if table else 1.0,
            "peak": peak.total,
            "pieces": peak.then.get("activations", 0.0),
            "inputs": peak.then.get("inputs", 0.0),
        }
        table.append(line)
    head = (
        "recompute",
        "recomputed",
        "time",
        "against none",
        "peak",
        "pieces",
        "inputs",
    )
    formats = ("", "", ".4g", ".3f", ".4g", ".4g", ".4g")
    rows = [[*map(format, line.values(), formats)] for line in table]
    text = (
        f"{args.layers} layers on one stage, one microbatch; the peak is the most that is held at once\n\n"
        f"{text_table(head, rows)}\n"
        "pieces: layers of which all activations are held; inputs: layers of which only the input is held"
    )
    return result(args, {"layers": args.layers, "table": table}, text)
